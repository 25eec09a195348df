"""The folder that the builder leaves behind: complete, reproducible, reused, mended, and never somebody else's."""

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvserve.demo import build
from kvserve.demo.build import FAMILIES, build_digest, build_model
from kvserve.demo.folder import MARKER_NAME, unfinished
from kvserve.errors import ModelLoadError

ROOT = Path(__file__).resolve().parents[2]


def fingerprints(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_arguments_give_the_same_bytes(family: str, tmp_path: Path) -> None:
    """Two builds of one recipe are byte-identical in every file."""
    first, second = build_model(family, tmp_path / "one"), build_model(family, tmp_path / "two")
    assert fingerprints(first) == fingerprints(second)


@pytest.mark.long
def test_another_process_gives_the_same_bytes(tmp_path: Path) -> None:
    """The command line builds the same folder as the function does here, so nothing depends on the process."""
    here = build_model("qwen3", tmp_path / "here")
    command = [sys.executable, "-m", "kvserve.demo", "qwen3", str(tmp_path / "there")]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    shown = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    assert Path(shown.strip()) == tmp_path / "there"
    assert fingerprints(tmp_path / "there") == fingerprints(here)


@pytest.mark.parametrize("change", [{"seed": 1}, {"context_length": 4096}, {"answer_tokens": None}])
def test_another_recipe_replaces_the_folder(change: dict[str, int | None], tmp_path: Path) -> None:
    """A folder of another recipe is rebuilt, and its digest tells the two apart."""
    directory = build_model("llama", tmp_path / "model")
    before = fingerprints(directory)
    build_model("llama", directory, **change)
    assert fingerprints(directory) != before
    assert build_digest("llama", **change) != build_digest("llama")
    assert json.loads((directory / MARKER_NAME).read_text())["digest"] == build_digest("llama", **change)


def test_a_complete_folder_is_reused_at_once(tmp_path: Path) -> None:
    """A second call changes nothing and costs next to nothing; the first stays below two seconds."""
    started = time.process_time()
    directory = build_model("qwen3", tmp_path / "model")
    assert time.process_time() - started < 2
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    started = time.process_time()
    build_model("qwen3", directory)
    assert time.process_time() - started < 0.2
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"])
def test_a_damaged_folder_is_mended(name: str, tmp_path: Path) -> None:
    """A file that is missing or cut short is noticed and the folder is built again."""
    directory = build_model("qwen3", tmp_path / "model")
    before = fingerprints(directory)
    (directory / name).unlink()
    assert fingerprints(build_model("qwen3", directory)) == before
    (directory / name).write_bytes((directory / name).read_bytes()[:-1])
    assert fingerprints(build_model("qwen3", directory)) == before


def test_an_interrupted_build_leaves_no_folder_and_is_redone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the weights cannot be written, nothing stands under the folder's name, and the next build succeeds."""

    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(build, "save_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build_model("qwen3", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    assert (build_model("qwen3", tmp_path / "model") / "model.safetensors").is_file()


def test_what_a_killed_builder_left_goes_with_the_next_build(tmp_path: Path) -> None:
    """At once, however young it is: nobody holds it. That of a living builder stays, however old."""
    left = tmp_path / ".model.building-left"
    left.mkdir()
    with unfinished(tmp_path / "model") as living:
        os.utime(living, (time.time() - 7200,) * 2)
        build_model("qwen3", tmp_path / "model")
        assert sorted(path.name for path in tmp_path.iterdir()) == [living.name, "model"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_where_there_are_no_locks_what_is_old_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder older than an hour goes with the next build; a young one may belong to a living builder."""

    def refused(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    old, young = tmp_path / ".model.building-old", tmp_path / ".model.building-young"
    for path in (old, young):
        path.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    build_model("qwen3", tmp_path / "model")
    assert young.is_dir() and not old.exists()


def test_a_folder_that_is_taken_away_before_it_is_held_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another builder that looks for what was left, just then: it has removed it, or is about to."""
    make, made = tempfile.mkdtemp, list[Path]()

    def swept(**where: Any) -> str:
        made.append(Path(make(**where)))
        if len(made) == 1:
            made[0].rmdir()
        elif len(made) == 2:
            held.append(os.open(made[1], os.O_RDONLY))
            fcntl.flock(held[0], fcntl.LOCK_EX)
        return str(made[-1])

    held: list[int] = []
    monkeypatch.setattr(tempfile, "mkdtemp", swept)
    with unfinished(tmp_path / "model") as building:
        assert building == made[2] and building.is_dir()
    os.close(held[0])


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_a_foreign_folder_is_refused_untouched(name: str, tmp_path: Path) -> None:
    """What the builder did not make is named in the error and kept."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("{}")
    with pytest.raises(ModelLoadError, match="mine"):
        build_model("qwen3", tmp_path / "mine")
    assert (tmp_path / "mine" / name).read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    """An empty folder that exists already is as good as none."""
    (tmp_path / "model").mkdir()
    assert (build_model("qwen3", tmp_path / "model") / "config.json").is_file()


def test_builders_that_race_share_one_result(tmp_path: Path) -> None:
    """Eight builders of one folder all return it complete, and no temporary folder is left."""
    directory = tmp_path / "model"
    with ThreadPoolExecutor(8) as pool:
        built = list(pool.map(lambda _: build_model("llama", directory), range(8)))
    assert set(built) == {directory}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert fingerprints(directory) == fingerprints(build_model("llama", tmp_path / "alone"))


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    """The error names the family that does not exist and those that do."""
    with pytest.raises(ModelLoadError, match=r"'gpt2'.*qwen3"):
        build_model("gpt2", tmp_path / "model")
