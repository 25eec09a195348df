"""`kvserve models`: MODEL_PATH, folders, the hub's cache, aliases, and what is broken."""

import json
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants

from kvserve.cli import model_list
from kvserve.engine.hub import download
from tests.cli.fake_hub import serving_hub
from tests.cli.running import run, told, words_of
from tests.models import tiny_model

COMMIT = "0" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in, and an empty cache of the hub."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(folder))
    return folder


def put_into(cache: Path, name: str, family: str) -> None:
    """A snapshot of a tiny model under a hub name, as the hub's library lays it out."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots" / COMMIT).symlink_to(tiny_model(family), target_is_directory=True)


def test_all_that_can_be_served_is_listed_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default, a folder's models, the cache's, and an alias of one of them; sizes as their files say."""
    folders = tmp_path / "models"
    folders.mkdir()
    (folders / "small").symlink_to(tiny_model("llama"))
    put_into(cache, "mlx-community/one", "qwen3")
    put_into(cache, "mlx-community/two", "gemma3")
    monkeypatch.setenv("MODEL_PATH", "mlx-community/one")
    monkeypatch.setenv("MODEL_FOLDERS", str(folders))
    monkeypatch.setenv("MODEL_ALIASES", "mine=small")
    found = told("models")
    assert [(each["name"], each["where"], each["architecture"], each["alias_of"]) for each in found] == [
        ("mlx-community/one", "MODEL_PATH", "qwen3", None),
        ("small", "MODEL_FOLDERS", "llama", None),
        ("mlx-community/two", "hub cache", "gemma3_text", None),
        ("mine", "alias", None, "small"),
    ]
    size = (tiny_model("llama") / "model.safetensors").stat().st_size
    assert (found[1]["weight_bytes"], found[1]["context_tokens"], found[1]["fault"]) == (size, 131_072, None)
    shown = words_of(run("models").stdout)
    assert "small MODEL_FOLDERS llama" in shown and "mine alias = small" in shown


def test_what_is_not_there_or_not_whole_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that a start would download, and a folder whose weights are cut off."""
    assert told("models")[0]["fault"] == "not on this machine: a start downloads it"
    broken = tmp_path / "broken"
    broken.mkdir()
    source = tiny_model("qwen3")
    (broken / "config.json").write_bytes((source / "config.json").read_bytes())
    (broken / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-10])
    monkeypatch.setenv("MODEL_PATH", str(broken))
    [found] = told("models")
    assert "bytes instead of" in found["fault"] and found["weight_bytes"] > 0


def test_what_was_downloaded_moves_no_cursor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has the escapes of what a config calls its architecture; JSON has them as JSON does."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "x\x1b[2Jy"}), "utf-8")
    (folder / "model.safetensors").write_bytes((tiny_model("qwen3") / "model.safetensors").read_bytes())
    monkeypatch.setenv("MODEL_PATH", str(folder))
    assert told("models")[0]["architecture"] == "x\x1b[2Jy"
    shown = run("models").stdout
    assert "x\\x1b[2Jy" in shown and "\x1b" not in shown


def test_a_model_of_the_hub_is_fetched_and_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a server reads, once: what is here is not fetched again. A name that there is not is an error in
    words."""
    source = tiny_model("qwen3")
    files = {name: (source / name).read_bytes() for name in ("config.json", "tokenizer.json", "model.safetensors")}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving_hub({"some/model": files | {"pytorch_model.bin": b"x"}}) as (url, downloaded):
        monkeypatch.setattr(model_list, "download", partial(download, endpoint=url))
        for _ in range(2):
            [found] = told("models", "--fetch", "some/model")
            assert (found["name"], found["architecture"], found["fault"]) == ("some/model", "qwen3", None)
            assert found["weight_bytes"] == len(files["model.safetensors"])
            assert sorted(downloaded) == sorted(files)
        done = run("models", "--fetch", "no/model")
    assert done.exit_code == 1 and "could be fetched from the hub" in done.stderr
    assert [each["name"] for each in told("models")][1:] == ["some/model"]
