"""Loading: sizes that are true, and clear errors for what cannot be loaded."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from kvserve.engine.hub import fetched_folder
from kvserve.engine.model import check_folder, load
from kvserve.errors import ModelLoadError
from tests.engine.engines import FAMILIES, of_each_kind
from tests.models import tiny_model


def held_bytes(model, num_tokens: int) -> int:
    """Bytes of the state that a row of this length really has."""
    caches = model.new_caches()
    for start in range(0, num_tokens, 64):
        model.module(mx.ones((1, min(64, num_tokens - start)), dtype=mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])
    leaves = tree_flatten([cache.state for cache in caches])
    return sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, mx.array))


@pytest.mark.parametrize("family", of_each_kind(FAMILIES))
def test_measured_sizes_predict_a_rows_bytes(family: str) -> None:
    """Bytes per token and fixed bytes, measured on 16 tokens, predict what a row of 768 tokens holds."""
    model = load(tiny_model(family), 131072)
    held = held_bytes(model, 768)
    assert model.sizes.held(768) == pytest.approx(held, rel=0.1), "a window holds up to a chunk more"
    assert model.vocab_size == model.module(mx.zeros((1, 1), dtype=mx.int32)).shape[-1]


def test_experts_count_by_the_share_that_is_chosen() -> None:
    """A mixture of experts reads fewer bytes per step than it has; a dense model reads all."""
    moe, dense = load(tiny_model("qwen3_5_moe"), 131072), load(tiny_model("qwen3"), 131072)
    assert moe.active_weight_bytes < moe.weight_bytes
    assert dense.active_weight_bytes == dense.weight_bytes


def test_the_context_limit_is_the_smaller_one() -> None:
    """MAX_KV_SIZE and the model's own limit: the smaller one holds."""
    assert load(tiny_model("qwen3"), 1000).context_limit == 1000
    assert load(tiny_model("qwen3"), 10**9).context_limit == 131072


def broken(tmp_path: Path, **changes: object) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    """The message names the architecture and says what to do."""
    with pytest.raises(ModelLoadError, match=r"'no_such_model'.*mlx-lm"):
        load(broken(tmp_path, model_type="no_such_model"), 1000)


def test_the_architecture_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    """A folder's config alone tells whether mlx-lm knows the architecture; a good one passes."""
    with pytest.raises(ModelLoadError, match="'imaginary9'"):
        check_folder(broken(tmp_path, model_type="imaginary9"))
    check_folder(tiny_model("llama"))


def test_broken_files_are_one_paragraph(tmp_path: Path) -> None:
    """Missing config, broken config, missing, truncated and mismatched weights are each a ModelLoadError."""
    folder = broken(tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        load(folder, 1000)
    weights.unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        load(folder, 1000)
    weights.write_bytes(whole)
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"hidden_size": 64', '"hidden_size": 32')
    )
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        load(folder, 1000)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load(folder, 1000)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="model_type"):
        load(folder, 1000)
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load(folder, 1000)


def test_a_hub_name_without_network_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that cannot be reached ends in a message that names the setting."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    notes: list[str] = []
    with pytest.raises(ModelLoadError, match="MODEL_PATH='nobody/nothing'"):
        fetched_folder("nobody/nothing", notes.append)
