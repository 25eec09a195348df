"""`kvserve fit` for folders, hub names and other machines. `tests/engine/test_foreseen.py` has the figures."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from kvserve.engine.hub import look_at_hub
from kvserve.errors import ModelLoadError
from tests.cli.fake_hub import serving_hub
from tests.cli.running import run, told, words_of
from tests.models import tiny_model

CONFIG = {"model_type": "llama", "hidden_size": 64}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No `.env`, and no cache of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_folder_is_told_in_words_and_as_json() -> None:
    """The same figures in both; a machine that is named counts instead of this one, settings as in a start."""
    folder = str(tiny_model("gemma3"))
    body = told("fit", folder, "--memory", "1GiB")
    assert body["weights_from"] == "files" and body["memory_bytes"] == 2**30 and body["leaves_room"]
    assert body["context_tokens"] == body["model_context_tokens"] == 131_072 and body["is_cut_by"] == "model"
    assert [each["kind"] for each in body["caches"]] == ["window", "every token"]
    assert [each["window"] for each in body["caches"]] == [64, None]
    shown = words_of(run("fit", folder, "--memory", "1GiB").stdout)
    assert folder in shown and "131,072 tokens: all that the model was made for" in shown
    assert "a window of 64 tokens" in shown and "float32" in shown


def test_the_settings_of_a_start_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """MODEL_PATH where no model is named, MAX_KV_SIZE, budgets that are set, and a word on KV_BITS."""
    monkeypatch.setenv("MODEL_PATH", str(tiny_model("qwen3")))
    monkeypatch.setenv("MAX_KV_SIZE", "4096")
    monkeypatch.setenv("MAX_BATCH_BYTES", "3MiB")
    monkeypatch.setenv("KV_BITS", "4")
    body = told("fit")
    assert body["running_budget_bytes"] == 3 * 2**20 and 0 < body["context_tokens"] <= 4096
    assert "KV_BITS=4 makes KV smaller" in run("fit").stdout


def test_over_ranks_each_holds_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the KV, and of the weights all but embeddings and head; a model that cannot be divided says so."""
    whole, part = (told("fit", str(tiny_model("qwen3")), "--ranks", number) for number in ("1", "2"))
    assert (whole["num_ranks"], part["num_ranks"]) == (1, 2)
    assert part["kv_bytes_per_10k_tokens"] * 2 == whole["kv_bytes_per_10k_tokens"]
    assert whole["weight_bytes"] / 2 < part["weight_bytes"] < whole["weight_bytes"]
    assert "on each of 2 ranks" in run("fit", str(tiny_model("qwen3")), "--ranks=2").stdout
    for family, number in (("gemma3", "2"), ("qwen3", "3")):
        refused = run("fit", str(tiny_model(family)), "--ranks", number)
        assert refused.exit_code == 1 and f"cannot be divided over {number} ranks" in words_of(refused.output)
    (tmp_path / "hosts.json").write_text('[["a:1"], ["b:1"]]', "utf-8")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
    monkeypatch.setenv("MLX_RANK", "1")
    assert run("fit", str(tiny_model("qwen3")), "--ranks=2").exit_code == 2


@pytest.mark.parametrize("size", ["much", "0", "-3GB"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    assert run("fit", "a/b", f"--memory={size}").exit_code == 2


# --- a name on the hub ------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    files = {"config.json": json.dumps(CONFIG).encode(), "x.safetensors": b"x" * 9}
    weights = {"model-1-of-2.safetensors": b"x" * 7, "model-2-of-2.safetensors": b"x" * 5}
    with serving_hub({"some/model": files | weights}) as (url, _):
        yield url


def test_the_hub_tells_config_and_sizes_and_nothing_stays(hub: str, tmp_path: Path) -> None:
    """Weights are files that are loaded, and a start that downloads later finds an empty cache."""
    found = look_at_hub("some/model", hub)
    assert (found.config, found.weight_bytes) == (CONFIG, 12)
    assert not (tmp_path / "hub").exists()


def test_a_name_that_the_hub_does_not_know_is_an_error(hub: str) -> None:
    with pytest.raises(ModelLoadError, match="neither on this machine nor"):
        look_at_hub("no/model", hub)


def test_without_a_network_a_hub_name_is_an_error_in_words() -> None:
    """The tests are offline."""
    done = run("fit", "some/model")
    assert done.exit_code == 1 and "neither on this machine nor could it be looked up" in done.stderr
