"""Text models that only mlx-vlm has are loaded with it; what writes no text, or looks ahead, is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache

from benchmarks.tiny_families import write_model
from kvserve.engine import text_load, vision_load
from kvserve.engine.fingerprint import libraries_of
from kvserve.engine.kv_buffers import flat_caches
from kvserve.engine.model import check_folder, load
from kvserve.engine.self_check import check_caches
from kvserve.engine.vision import CurrentPass, RopeShift, VlmDecoder
from kvserve.errors import ModelLoadError
from tests.models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain decoder that mlx-lm does not know."""
    return write_model(tmp_path_factory.mktemp("k2_horizon"), "mlx-vlm", "k2_horizon")


def test_a_text_model_of_mlx_vlm_is_batched_and_cut(folder: Path) -> None:
    """Its caches do what mlx-lm's of the same name do, which stand for them, and its KV belongs to both libraries."""
    check_folder(folder)
    model = load(folder, 4096)
    support = check_caches(model)
    assert (support.can_batch, support.can_keep, support.notes) == (True, True, ())
    assert {type(leaf) for leaf in flat_caches(model.new_caches())} == {KVCache}
    assert "mlx-vlm" in libraries_of(folder)


def test_a_cache_that_does_otherwise_is_not_stood_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mlx-lm's class would lead to other logits, or fails, the model keeps its own."""
    written = KVCache.update_and_fetch
    monkeypatch.setattr(KVCache, "update_and_fetch", lambda cache, keys, values: written(cache, 0 * keys, values))
    model = load(folder, 4096)
    assert {type(leaf).__module__ for leaf in flat_caches(model.new_caches())} == {"mlx_vlm.models.cache"}


def test_caches_that_a_model_replaces_are_the_rows_from_then_on() -> None:
    """mlx-vlm's Qwen 3.5 makes new ones at each step of a batch of one row: the step was lost with them."""

    class Replaces(Module):
        def __call__(self, inputs: mx.array, *, cache: list[Any], **_: Any) -> Any:
            cache[0] = "another one"
            return SimpleNamespace(logits=mx.zeros((*inputs.shape, 8)))

    cache = [KVCache(), RopeShift()]
    VlmDecoder(Replaces(), CurrentPass(), has_positions=True)(mx.array([[1]]), cache)
    assert cache[0] == "another one" and isinstance(cache[1], RopeShift)


def test_a_model_that_looks_ahead_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says of a token must not depend on later ones."""
    run = VlmDecoder._run
    monkeypatch.setattr(VlmDecoder, "_run", lambda *args: run(*args)[:, ::-1])
    with pytest.raises(ModelLoadError, match=r"no text token by token.*depends on later ones"):
        load(folder, 4096)


def test_a_model_with_a_tower_that_looks_ahead_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diffusion model of text that also sees is one: it is looked at as well."""
    monkeypatch.setattr(vision_load, "is_for_mlx_lm", lambda _: False)
    run = VlmDecoder._run
    monkeypatch.setattr(VlmDecoder, "_run", lambda *args: run(*args)[:, ::-1])
    with pytest.raises(ModelLoadError, match=r"qwen3_vl.*depends on later ones"):
        load(tiny_model("qwen3_vl"), 4096)


def test_code_that_a_model_brings_is_not_run(folder: Path, tmp_path: Path) -> None:
    """mlx-vlm would import a file that the config names, told to trust it or not: of a model with a vision tower too,
    and of an architecture that is mlx-lm's."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\nraise SystemExit")
    for changes in ({}, {"vision_config": {"hidden_size": 8}}, {"model_type": "llama"}):
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_file": "own.py"} | changes))
        for use in (check_folder, lambda each: load(each, 4096)):
            with pytest.raises(ModelLoadError, match=r"brings code of its own \(model_file\), which is not run"):
                use(tmp_path)
    assert not (tmp_path / "was run").exists()


def test_what_has_no_language_model_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder or a model of images."""

    def without_language(*_: Any, **__: Any) -> object:
        return object()

    monkeypatch.setattr("mlx_vlm.utils.load_model", without_language)
    with pytest.raises(ModelLoadError, match="writes no text: it has no language model"):
        load(folder, 4096)


def test_a_helper_of_a_model_is_no_model() -> None:
    """mlx-vlm's drafters are found by the same name."""
    assert not text_load.is_for_mlx_vlm({"model_type": "eagle3"})
    assert text_load.is_for_mlx_vlm({"model_type": "hy_v4"})
    assert not text_load.is_for_mlx_vlm({"model_type": "imaginary9"})
