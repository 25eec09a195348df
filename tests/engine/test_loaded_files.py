"""Which files of a folder make the model: all that a loader may read, wherever they lie, and how a change shows."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvserve.engine.model import load
from kvserve.engine.model_files import CACHES_FILE, MEMORY_FILE, differing, file_stamps
from kvserve.engine.tool_parser import library_tool_parser
from kvserve.prompt.tokenizer import load_tokenizer
from tests.models import tiny_model

READ = (
    "model-00001-of-00002.safetensors",
    "vision_tower.safetensors",
    "adapters.safetensors",
    "adapter_config.json",
    "hf_quant_config.json",
    "preprocessor_config.json",
    "tokenizer.model",
    "merges.txt",
    "qwen.tiktoken",
    "modeling_own.py",
    "pytorch_model.bin",
    "no suffix",
    "additional_chat_templates/rag.jinja",
    "encoder_config/config.json",
    "experts/layer_0.safetensors",
    "linear_spec_lora/adapter_model.safetensors",
    "deep/below/weights.npz",
)
NOT_READ = (
    "README.md",
    "LICENSE",
    "LICENSE.txt",
    "Notice.txt",
    "picture.png",
    ".DS_Store",
    ".cache/huggingface/download/model.safetensors.metadata",
    "index.sqlite",
    "index.sqlite-wal",
    "agents.sqlite3",
    MEMORY_FILE,
    f"{MEMORY_FILE}.17.part",
    CACHES_FILE,
    "0123456789abcdef0123456789abcdef/0123456789abcdef0123456789abcdef01234567.safetensors",
    "records-0123456789abcdef0123456789abcdef/records.json",
    "__pycache__/modeling_own.cpython-312.pyc",
    "original/consolidated.00.pth",
    "checkpoint-500/optimizer.pt",
    "onnx/model.onnx",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3"), copy)
    return copy


def put(folder: Path, name: str, text: str = "x") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", READ)
def test_what_a_loader_may_read_counts(folder: Path, name: str) -> None:
    """That it is there, and each change of it."""
    before = file_stamps(folder)
    path = put(folder, name)
    with_it = file_stamps(folder)
    assert differing(before, with_it) == Path(name)
    path.write_text("xy")
    assert differing(with_it, file_stamps(folder)) == Path(name)


@pytest.mark.parametrize("name", NOT_READ)
def test_what_no_loader_reads_does_not_count(folder: Path, name: str) -> None:
    """Documentation, hidden files, kvserve's own, other programs' weights in subfolders: they come and go."""
    before = file_stamps(folder)
    put(folder, name)
    assert differing(before, file_stamps(folder)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x7f"),
        lambda path: path.rename(path.with_name("model2.safetensors")),
        lambda path: path.unlink(),
        lambda path: shutil.copyfile(path, path.with_name("copy")) and path.with_name("copy").replace(path),
    ],
    ids=["edited", "renamed", "removed", "replaced"],
)
def test_a_change_shows_also_where_times_were_set_back(folder: Path, change: Callable[[Path], object]) -> None:
    """Size and time of contents are those of before."""
    path = folder / "model.safetensors"
    before, was = file_stamps(folder), path.stat()
    change(path)
    for each in folder.iterdir():
        if each.stat().st_size == was.st_size:
            os.utime(each, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert differing(before, file_stamps(folder)) is not None


def test_links_are_followed(folder: Path, tmp_path: Path) -> None:
    """As a hub's snapshot has them: what changes is the file that they lead to, and where they lead. A link in a circle
    and one that leads nowhere are none."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    (folder / "circle").symlink_to(folder)
    (folder / "nowhere.json").symlink_to(tmp_path / "nowhere")
    before = file_stamps(folder)
    assert {path.name for path in before} == {path.name for path in blobs.iterdir()}
    (blobs / "config.json").write_text((blobs / "config.json").read_text() + " ")
    assert differing(before, file_stamps(folder)) == Path("config.json")
    before = file_stamps(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(shutil.copy(blobs / "tokenizer.json", tmp_path / "other.json"))
    assert differing(before, file_stamps(folder)) == Path("tokenizer.json")


def test_what_the_config_names_counts_wherever_it_is(folder: Path, tmp_path: Path) -> None:
    """Outside of the folder, in a form that counts nowhere else, and through a manifest that is named."""
    outside = put(tmp_path, "elsewhere/rows.bin")
    manifest = put(folder, "ple/manifest.json", f'{{"data_file": "rows.bin", "root": "{outside}"}}')
    rows = put(folder, "ple/rows.bin")
    before = file_stamps(folder)
    assert Path("ple/rows.bin") not in before and outside not in before
    put(folder, "config.json", f'{{"text_config": {{"ple_storage": [{{"manifest": "ple/{manifest.name}"}}]}}}}')
    named = file_stamps(folder)
    assert {Path("ple/rows.bin"), outside} <= set(named)
    for path in (rows, outside):
        before = file_stamps(folder)
        path.write_text("xyz")
        assert differing(before, file_stamps(folder)) is not None


_heard: list[str] = []
_is_listening = [False]


def _listen(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _is_listening[0] and isinstance(arguments[0], str):
        _heard.append(arguments[0])


@contextmanager
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that are opened meanwhile, by Python or by MLX; an audit hook cannot be taken away again."""
    if not _heard:
        sys.addaudithook(_listen)
        _heard.append("")
    real = mx.load

    def noted(path: str, *rest: Any, **more: Any) -> Any:
        _heard.append(str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(mx, "load", noted)
    del _heard[1:]
    _is_listening[0] = True
    try:
        yield _heard
    finally:
        _is_listening[0] = False


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_vl", "gemma4_vl"])
def test_every_file_that_is_opened_for_a_model_counts(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By mlx-lm, mlx-vlm and the tokenizer of the installed releases; the list of `READ` is from reading them."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(family), folder)
    with heard(monkeypatch) as opened:
        load_tokenizer(folder)
        library_tool_parser(folder)
        load(folder, 4096)
    counted = {str(folder / path) for path in file_stamps(folder)}
    read = {path for path in opened if path.startswith(str(folder)) and Path(path).is_file()}
    assert read <= counted and str(folder / "model.safetensors") in read and str(folder / "config.json") in read
