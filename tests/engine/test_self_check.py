"""What the check at load finds out about caches: every family passes, every oddity is seen, and it is cheap."""

import copy
import itertools
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, BatchKVCache, ConcatenateKVCache, KVCache, RotatingKVCache

from benchmarks.tiny_families import write_model
from kvserve.engine import leaf_forms
from kvserve.engine import self_check as self_check_module
from kvserve.engine.kv_buffers import BatchKv, RowKv
from kvserve.engine.model import CacheSupport, LoadedModel, load
from kvserve.engine.quantised import BatchPackedCache, KvSettings
from kvserve.engine.self_check import check_caches
from kvserve.engine.snapshot import CacheLayout
from kvserve.errors import ModelLoadError
from tests.engine.engines import CUTTABLE, FAMILIES
from tests.engine.odd_caches import (
    CopiesItself,
    DropsPadding,
    FailsToMerge,
    HidesItsArrays,
    LongMemory,
    RefusesCopies,
    ShortMemory,
    Unmergeable,
    use_cache,
)
from tests.laws import THREE_KINDS, sampled, sampled_cells
from tests.models import TWO_LAYERS, tiny_model


def qwen3() -> LoadedModel:
    return load(tiny_model("qwen3"), 131072)


class Forwards:
    """Counts a model's forward passes by their number of tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: LoadedModel) -> None:
        self.lengths: list[int] = []
        real_call = type(model.module).__call__

        def counted(module: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
            self.lengths.append(inputs.shape[1])
            return real_call(module, inputs, *args, **kwargs)

        monkeypatch.setattr(type(model.module), "__call__", counted)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_batched_and_kept_at_little_cost(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The families that mlx-lm can batch pass without a note, in some 33 short forward passes, 37 where rows can be
    padded."""
    model = load(tiny_model(family), 131072)
    forwards = Forwards(monkeypatch, model)
    support = check_caches(model)
    assert (support.can_batch, support.can_keep, support.notes) == (True, True, ())
    assert support.can_pad == (family in CUTTABLE), "windows and states would take padding in"
    assert len(forwards.lengths) <= 34 + 4 * support.can_pad
    assert max(forwards.lengths) <= 12


def test_the_check_takes_a_fraction_of_a_second() -> None:
    """Of the processors' time, on a tiny model, where the passes themselves cost next to nothing."""
    model = qwen3()
    seconds = []
    for _ in range(3):
        started = time.process_time()
        check_caches(model)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.6


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("family", sampled(["qwen3", "qwen3_5", "gemma3", "llama"], THREE_KINDS))
@sampled_cells(lambda family, dtype: dtype == mx.bfloat16 and family != "qwen3")
def test_rounding_is_not_taken_for_a_fault(family: str, dtype: mx.Dtype) -> None:
    """Weights of 16 bits, and of four, differ between one row and several by less than what counts."""
    model = load(tiny_model(family), 131072)
    for quantised in (False, True):
        if quantised:
            nn.quantize(model.module, group_size=32, bits=4, class_predicate=_is_wide)
        model.module.set_dtype(dtype)
        support = check_caches(model)
        assert (support.can_batch, support.can_keep) == (True, True), support.notes


def _is_wide(_path: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


@pytest.mark.parametrize(
    ("new_cache", "can_batch", "can_keep", "notes"),
    [
        (Unmergeable, False, True, r"take turns.*Unmergeable.*mlx-lm cannot merge.*\n.*whole copies of Unmergeable"),
        (ConcatenateKVCache, False, True, r"take turns.*ConcatenateKVCache.*mlx-lm cannot merge[^\n]*$"),
        (DropsPadding, False, True, r"take turns.*DropsPadding.*logits are off by \d+%"),
        (FailsToMerge, False, True, "take turns.*FailsToMerge.*NotImplementedError: planned"),
        (ShortMemory, False, False, r"take turns.*ShortMemory.*logits are off"),
        (LongMemory, False, True, "take turns.*LongMemory.*4,096"),
        (CopiesItself, False, False, r"take turns.*\n.*prefix cache is off.*CopiesItself.*logits are off"),
        (HidesItsArrays, False, False, r"take turns.*\n.*prefix cache is off.*HidesItsArrays.*logits are off"),
        (RefusesCopies, False, False, r"take turns.*\n.*prefix cache is off.*RefusesCopies.*TypeError: not to be"),
    ],
)
def test_what_is_odd_is_found_and_said(
    new_cache: type, can_batch: bool, can_keep: bool, notes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each oddity costs exactly what it must, and the notes name the class, the reason and the price."""
    use_cache(monkeypatch, new_cache)
    support = check_caches(qwen3())
    assert (support.can_batch, support.can_keep) == (can_batch, can_keep)
    assert re.search(notes, "\n".join(support.notes))


def test_leaves_that_could_not_be_looked_at_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What classes say is not believed in its place: a model may write a cache in another way. The start says why."""
    monkeypatch.setattr(leaf_forms, "_kind", lambda *_: 1 / 0)
    model = qwen3()
    assert model.sizes.per_token > 0
    support = check_caches(model)
    assert (support.can_batch, support.can_keep) == (True, False)
    assert re.search(r"prefix cache is off.*ZeroDivisionError", support.notes[0])


@pytest.mark.parametrize(("new_cache", "can_keep", "cut_tokens"), [(KVCache, False, 1), (Unmergeable, True, 256)])
def test_where_cuts_matter_is_said(
    new_cache: type, can_keep: bool, cut_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints have places where every prompt is cut; rows that others cut anywhere have none, and are not kept."""
    use_cache(monkeypatch, new_cache)
    model = qwen3()
    assert model.leaf_forms is not None
    first, *others = model.leaf_forms
    support = check_caches(replace(model, leaf_forms=(replace(first, cut_error=0.5), *others)))
    assert (support.can_keep, support.cut_tokens) == (can_keep, cut_tokens)
    assert any("depends on where a prefill is cut" in note for note in support.notes)


def test_an_unknown_class_that_behaves_is_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour decides: a subclass whose rows can be merged and copied is used like its parent, and copied whole."""

    class Harmless(KVCache):
        pass

    use_cache(monkeypatch, Harmless)
    model = qwen3()
    forwards = Forwards(monkeypatch, model)
    support = check_caches(model)
    assert (support.can_batch, support.can_keep) == (True, True)
    assert "whole copies of Harmless" in support.notes[0]
    assert max(forwards.lengths) > KVCache.step, "it was tried behind the one length that it names"


def test_a_batch_that_breaks_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known classes are tried too: a batch that is wrong, or a library whose mask or write is, costs the batch and not
    the start."""
    with monkeypatch.context() as patch:
        patch.setattr(RowKv, "merge", None)
        support = check_caches(qwen3())
        assert (support.can_batch, support.can_keep) == (False, True)
        assert "KVCache" in support.notes[0]
    with monkeypatch.context() as patch:
        real = BatchKv.extend
        patch.setattr(BatchKv, "extend", lambda ours, other: (real(ours, other), _forget_padding(ours)))
        assert not check_caches(qwen3()).can_batch
    with monkeypatch.context() as patch:
        real_extract = BatchKv.extract
        patch.setattr(BatchKv, "extract", lambda ours, index: real_extract(ours, 0))
        assert not check_caches(qwen3()).can_batch
    with monkeypatch.context() as patch:
        patch.setattr(
            BatchKVCache, "make_mask", lambda ours, num_tokens, **_: create_causal_mask(num_tokens, ours._idx)
        )
        assert not check_caches(qwen3()).can_batch
    with monkeypatch.context() as patch:
        patch.setattr(BatchKVCache, "update_and_fetch", _written_one_too_early)
        assert not check_caches(qwen3()).can_batch
    assert check_caches(qwen3()).can_batch


def _written_one_too_early(batch: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """A library that counts slots in another way."""
    start, end = batch._idx - 1, batch._idx
    batch.keys[..., start:end, :], batch.values[..., start:end, :] = keys, values
    batch.offset, batch._idx = batch.offset + 1, end + 1
    return batch.keys[..., : batch._idx, :], batch.values[..., : batch._idx, :]


def _forget_padding(batch: Any) -> None:
    batch.left_padding = mx.zeros_like(batch.left_padding)


def test_a_state_that_is_lost_or_stale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent states: dropped from a copy, or swapped between the rows of a batch."""
    model = load(tiny_model("qwen3_5"), 131072)
    with monkeypatch.context() as patch:
        real = CacheLayout.read_state

        def without_states(layout: CacheLayout, caches: Any) -> Any:
            state = real(layout, caches)
            assert state is not None
            return replace(state, leaves=tuple(ArraysCache(len(leaf.cache)) for leaf in state.leaves))

        patch.setattr(CacheLayout, "read_state", without_states)
        support = check_caches(model)
        assert (support.can_batch, support.can_keep) == (True, False)
    with monkeypatch.context() as patch:
        real_merge = ArraysCache.merge
        patch.setattr(ArraysCache, "merge", lambda caches: real_merge(list(reversed(caches))))
        support = check_caches(model)
        assert (support.can_batch, support.can_keep) == (False, True)


def test_quantised_kv_is_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised rows decode in one batch only if that comes out right too."""
    folder = tiny_model("qwen3", scale=replace(TWO_LAYERS, head_dim=32))
    plain, packed = (load(folder, 131072, settings) for settings in (KvSettings(), KvSettings(bits=4, group_size=32)))
    assert check_caches(packed) == CacheSupport()
    real = BatchPackedCache.make_mask
    monkeypatch.setattr(
        BatchPackedCache, "make_mask", lambda batch, *args, **kwargs: real(_blind(batch), *args, **kwargs)
    )
    assert (check_caches(plain).can_batch, check_caches(packed).can_batch) == (True, False)


def _blind(batch: Any) -> Any:
    twin = copy.copy(batch)
    _forget_padding(twin)
    return twin


def test_a_row_that_cannot_be_copied_cannot_be_quantised_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where quantised KV begins a row is copied; from the first token on there is nothing to copy."""
    layers = itertools.cycle((KVCache, CopiesItself))
    use_cache(monkeypatch, lambda: next(layers)())  # noqa: PLW0108 - one class after the other
    folder = tiny_model("qwen3", scale=replace(TWO_LAYERS, head_dim=32))
    at_once, later = (load(folder, 131072, KvSettings(bits=8, group_size=32, start=start)) for start in (0, 64))
    assert not check_caches(at_once).can_keep
    with pytest.raises(ModelLoadError, match=r"QUANTIZED_KV_START=64 .*copies of CopiesItself.*KV_BITS=OFF"):
        check_caches(later)


def test_a_model_that_cannot_compute_a_row_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be done with it, so nothing is decided."""
    model = qwen3()
    monkeypatch.setattr(RotatingKVCache, "merge", None)
    monkeypatch.setattr(type(model.module), "__call__", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check_caches(model)


def test_forbidden_tokens_do_not_count_and_no_number_is_an_error() -> None:
    """A logit of minus infinity on both sides is no difference; on one side, or without a number, it is."""
    error = self_check_module.logits_error
    logits = mx.array([1.0, -2.0, -mx.inf, 4.0])
    assert error(logits, logits) == 0
    assert 0 < error(logits + mx.array([0.0, 0.01, 0.0, 0.0]), logits) < 0.01
    assert not error(mx.array([1.0, -2.0, 3.0, 4.0]), logits) <= 1
    assert not error(mx.array([1.0, mx.nan, -mx.inf, 4.0]), logits) <= 1


def test_attention_to_chosen_blocks_is_not_batched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row beside a longer one reads other blocks than alone, which rows as short as a start tries do not show."""
    model = load(write_model(tmp_path, "mlx-lm", "minimax_m3_vl"), 4096)
    support = check_caches(model)
    assert support.can_keep and not support.can_batch and not support.can_pad
    assert "of more than 32 tokens it reads blocks" in support.notes[0]
    monkeypatch.setattr(self_check_module, "_blocks_of", lambda module: "")
    assert check_caches(model).can_batch
    monkeypatch.setattr(self_check_module, "LONG_ROW_TOKENS", 100)
    monkeypatch.setattr(self_check_module, "SHORT_ROW_TOKENS", 45)
    assert "its logits are off by" in check_caches(model).notes[0]
