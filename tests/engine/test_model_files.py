"""Models on disk: whole, broken, in parts, and in the hub's cache."""

import shutil
from pathlib import Path

import pytest

from kvserve.engine.model_files import cached_folder, check_weights, is_model_folder, weights_stamp
from kvserve.errors import ModelLoadError
from tests.models import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("qwen3"), tmp_path / "model"))


def test_whole_weights_pass(folder: Path) -> None:
    """As the builder writes them; a longer file is somebody else's business."""
    check_weights(folder)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    check_weights(folder)


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 500, -1])
def test_cut_weights_are_found_without_loading_them(folder: Path, num_bytes: int) -> None:
    """Wherever the file ends; the message names it."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ModelLoadError, match=r"could not be loaded: model\.safetensors"):
        check_weights(folder)


def test_a_missing_part_is_named(folder: Path) -> None:
    """Names say how many parts there are."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.safetensors is missing"):
        check_weights(folder)
    for part in (2, 3):
        shutil.copy(folder / "model-00001-of-00003.safetensors", folder / f"model-0000{part}-of-00003.safetensors")
    check_weights(folder)


def test_a_folder_without_weights_is_no_model(folder: Path) -> None:
    """A config alone is what a broken download leaves."""
    assert is_model_folder(folder)
    (folder / "model.safetensors").unlink()
    assert not is_model_folder(folder)
    with pytest.raises(ModelLoadError, match="no weights"):
        check_weights(folder)


def test_a_mended_folder_has_another_stamp(folder: Path) -> None:
    """The same files have the same stamp."""
    before = weights_stamp(folder)
    assert weights_stamp(folder) == before
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    assert weights_stamp(folder) != before


def test_the_hubs_cache_is_looked_at_and_the_hub_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that is there is found; what is not there, and what is no hub name, is None without any network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    assert cached_folder("org/name") == snapshot
    for name in ("org/other", "org", "../../etc", "a/b/c", "", "org/..", "/x/y", "org/na me"):
        assert cached_folder(name) is None, name
