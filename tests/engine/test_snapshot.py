"""Snapshots of live caches: exact after restoring, independent of the live row, no larger than they need to be."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kvserve.engine.model import LoadedModel, load
from kvserve.engine.quantised import KvSettings, PackedCache
from kvserve.engine.snapshot import CacheLayout, merged
from tests.engine.engines import FAMILIES, prompt_of
from tests.laws import sampled
from tests.models import DEEP_ONES, TWO_LAYERS, tiny_model

CUTTABLE = {"qwen3", "llama", "glm4_moe_lite"}
NUM_TOKENS = 200
CHECKPOINTS = (80, 140)
SHALLOW = ("qwen3",)
"""What can be cut anywhere; DEEP_ONES have states and windows, several of each."""


@pytest.fixture(scope="module", params=[*sampled(FAMILIES, SHALLOW), *DEEP_ONES])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return load(tiny_model(request.param), 131072)


def extend(model: LoadedModel, caches: list[Any], tokens: list[int]) -> mx.array:
    """Run tokens through the model in one chunk; the logits of the last one."""
    logits = model.module(mx.array([tokens]), cache=caches)[0, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def greedy(model: LoadedModel, caches: list[Any], tokens: list[int], num_tokens: int) -> list[int]:
    """Continue greedily, one token at a time."""
    out = []
    logits = extend(model, caches, tokens)
    for _ in range(num_tokens):
        out.append(int(mx.argmax(logits).item()))
        logits = extend(model, caches, out[-1:])
    return out


def record(model: LoadedModel, layout: CacheLayout, tokens: list[int]):
    """Prefill with stops at the checkpoints; the pieces and states there, and the live caches."""
    caches, pieces, states, start = model.new_caches(), [], {}, 0
    for end in (*CHECKPOINTS, len(tokens)):
        extend(model, caches, tokens[start:end])
        kv = layout.read_kv(caches, start, end)
        pieces.append((kv, 0, kv.num_tokens))
        states[end] = layout.read_state(caches)
        start = end
    return pieces, states, caches


def test_which_families_can_be_cut(model: LoadedModel, request: pytest.FixtureRequest) -> None:
    """Dense and latent caches can be cut anywhere; windows and recurrent states cannot."""
    family = request.node.callspec.params["model"]
    assert CacheLayout(model.new_caches).is_cuttable == (family in CUTTABLE)


def test_a_restored_row_goes_on_bit_equal(model: LoadedModel) -> None:
    """From each checkpoint the next chunk's logits equal those of the row that was never interrupted."""
    layout = CacheLayout(model.new_caches)
    tokens = prompt_of(NUM_TOKENS)
    pieces, states, _ = record(model, layout, tokens)
    for count, end in enumerate(CHECKPOINTS, start=1):
        control = model.new_caches()
        for start, stop in zip((0, *CHECKPOINTS)[:count], CHECKPOINTS[:count], strict=True):
            extend(model, control, tokens[start:stop])
        restored = layout.restore(pieces[:count], states[end], NUM_TOKENS - end)
        assert mx.array_equal(extend(model, restored, tokens[end:]), extend(model, control, tokens[end:]))
        assert greedy(model, restored, [7], 12) == greedy(model, control, [7], 12)


def test_a_snapshot_does_not_move_with_the_live_row(model: LoadedModel) -> None:
    """What the live row and two restored rows do later changes neither the record nor each other."""
    layout = CacheLayout(model.new_caches)
    tokens = prompt_of(NUM_TOKENS)
    pieces, states, live = record(model, layout, tokens)
    expected = greedy(model, layout.restore(pieces, states[NUM_TOKENS], 1), [5], 12)
    greedy(model, live, prompt_of(90, 3), 12)
    first, second = (layout.restore(pieces, states[NUM_TOKENS], 1) for _ in range(2))
    assert greedy(model, first, prompt_of(90, 4), 4) != expected
    assert greedy(model, second, [5], 12) == expected


def test_cut_rows_of_a_piece_are_exact(model: LoadedModel) -> None:
    """Where all layers can be cut, any rows of any pieces make a prefix; merged pieces are the same."""
    layout = CacheLayout(model.new_caches)
    if not layout.is_cuttable:
        pytest.skip("this family has layers that cannot be cut")
    tokens = prompt_of(NUM_TOKENS)
    (first, second, third), _, _ = record(model, layout, tokens)
    cut = [first, (second[0], 0, 50)]
    control = model.new_caches()
    extend(model, control, tokens[:80])
    extend(model, control, tokens[80:130])
    for pieces in (cut, [(merged(cut), 0, 130)], [(merged([first, second, third]), 0, 130)]):
        restored = layout.restore(pieces, None, 0)
        assert mx.allclose(
            extend(model, restored, tokens[130:180]), extend(model, _copy(layout, control), tokens[130:180]), atol=1e-4
        )


def _copy(layout: CacheLayout, caches: list[Any]) -> list[Any]:
    kv = layout.read_kv(caches, 0, caches[0].offset)
    return layout.restore([(kv, 0, kv.num_tokens)], layout.read_state(caches), 0)


def test_a_wrong_state_changes_the_text(model: LoadedModel) -> None:
    """Negative control: a state of another offset, or another row's, is visible, so equality means something."""
    layout = CacheLayout(model.new_caches)
    tokens = prompt_of(NUM_TOKENS)
    pieces, states, _ = record(model, layout, tokens)
    if layout.is_cuttable:
        other, _, _ = record(model, layout, prompt_of(NUM_TOKENS, 8))
        wrong = layout.restore([other[0], *pieces[1:]], None, 0)
    else:
        wrong = layout.restore(pieces, states[CHECKPOINTS[1]], 0)
    right = layout.restore(pieces, states[NUM_TOKENS], 0)
    assert not mx.allclose(extend(model, wrong, [5]), extend(model, right, [5]), atol=1e-3)


def test_a_slice_does_not_keep_its_parent_alive() -> None:
    """A slice of 100 tokens from a large buffer keeps its own bytes only, with one head too."""
    for heads in (1, 2):
        cache = KVCache()
        cache.update_and_fetch(mx.ones((1, heads, 50_000, 64)), mx.ones((1, heads, 50_000, 64)))
        mx.eval(cache.keys, cache.values)
        before = mx.get_active_memory()
        kept = CacheLayout(lambda: [KVCache()]).read_kv([cache], 100, 200)
        assert kept.num_bytes == 2 * heads * 100 * 64 * 4
        del cache
        assert mx.get_active_memory() < before - 2 * heads * 49_000 * 64 * 4


def test_a_part_that_is_cut_from_a_slice_frees_the_rest() -> None:
    """Rows cut out of a stored slice are a copy of their own."""
    whole = CacheLayout(lambda: [KVCache()]).read_kv([_filled(50_000)], 0, 50_000)
    before = mx.get_active_memory()
    part = merged([(whole, 100, 200)])
    assert part.num_bytes == 2 * 100 * 64 * 4
    del whole
    assert mx.get_active_memory() < before - 2 * 49_000 * 64 * 4


def _filled(num_tokens: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, num_tokens, 64)), mx.ones((1, 1, num_tokens, 64)))
    mx.eval(cache.keys, cache.values)
    return cache


def test_a_window_keeps_its_size_and_true_offset() -> None:
    """A window snapshot holds at most max_size rows, in temporal order, with the offset of the whole row."""
    window = RotatingKVCache(8)
    for start in (0, 5, 11):
        rows = mx.arange(start, start + 6, dtype=mx.float32)[None, None, :, None]
        window.update_and_fetch(rows, rows)
    state = CacheLayout(lambda: [RotatingKVCache(8)]).read_state([window])
    assert state is not None
    [kept] = state.leaves
    assert kept.offset == 18
    assert kept.keys.flatten().tolist()[-6:] == [11, 12, 13, 14, 15, 16]
    assert kept.keys.shape[2] == 8


# --- quantised KV -----------------------------------------------------------------------------------------------------

BORDER = 100


@pytest.fixture(scope="module")
def quantised() -> LoadedModel:
    folder = tiny_model("gemma3", scale=replace(TWO_LAYERS, head_dim=32))
    return load(folder, 131072, KvSettings(bits=4, scheme="uniform", group_size=32, start=BORDER))


def recorded(model: LoadedModel, layout: CacheLayout, ends: list[int]):
    """A row that is converted at the border: its pieces, its states and the live caches."""
    tokens, caches, pieces, states, start = prompt_of(300), model.new_caches(), [], {}, 0
    for end in ends:
        caches = model.ready(caches, start)
        extend(model, caches, tokens[start:end])
        kv = layout.read_kv(caches, start, end)
        pieces.append((kv, 0, end - start))
        states[end] = layout.read_state(caches)
        start = end
    return pieces, states, caches


def test_a_row_behind_the_border_is_restored_as_it_was_converted(quantised: LoadedModel) -> None:
    """The first part is packed again: the same arrays as in the live row, and bit-equal logits."""
    layout = CacheLayout(quantised.new_caches, quantised.quantiser)
    pieces, states, live = recorded(quantised, layout, [60, BORDER, 180, 240])
    assert [kv.is_packed for kv, _, _ in pieces] == [False, False, True, True]
    restored = layout.restore(pieces, states[240], 10)
    for ours, theirs in zip(restored, live, strict=True):
        if isinstance(theirs, PackedCache):
            assert ours.offset == theirs.offset == 240
            pairs = zip(ours.rows, theirs.rows, strict=True)
            assert all(mx.array_equal(a[..., :240, :], b[..., :240, :]) for a, b in pairs)
    assert mx.array_equal(extend(quantised, restored, [5, 6, 7]), extend(quantised, live, [5, 6, 7]))


def test_a_row_that_ends_at_the_border_or_before_it(quantised: LoadedModel) -> None:
    """Before the border a restored row is in full precision, at the border its next token needs it packed."""
    layout = CacheLayout(quantised.new_caches, quantised.quantiser)
    pieces, states, _ = recorded(quantised, layout, [60, BORDER])
    assert {type(leaf) for leaf in layout.restore(pieces[:1], states[60], 1)} == {KVCache, RotatingKVCache}
    assert {type(leaf) for leaf in layout.restore(pieces, states[BORDER], 1)} == {PackedCache, RotatingKVCache}


def test_pieces_of_both_forms_can_be_joined_and_cut(quantised: LoadedModel) -> None:
    """A joined slice has both forms behind each other; any rows of it make the row that its pieces make."""
    layout = CacheLayout(quantised.new_caches, quantised.quantiser)
    pieces, states, _ = recorded(quantised, layout, [60, BORDER, 180, 240])
    whole = merged(pieces)
    assert (whole.num_tokens, whole.num_bytes) == (240, sum(kv.num_bytes for kv, _, _ in pieces))
    expected = layout.restore(pieces, states[240], 10)
    head, tail = merged([(whole, 0, 130)]), merged([(whole, 130, 240)])
    assert (head.num_tokens, tail.num_tokens, tail.is_packed) == (130, 110, True)
    for parts in ([(whole, 0, 240)], [(head, 0, 130), (tail, 0, 110)], [(whole, 0, 80), (whole, 80, 240)]):
        found = layout.restore(parts, states[240], 10)
        for ours, theirs in zip(found, expected, strict=True):
            if isinstance(theirs, PackedCache):
                assert all(mx.array_equal(a, b) for a, b in zip(ours.rows, theirs.rows, strict=True))


def test_rows_in_the_wrong_form_are_refused(quantised: LoadedModel) -> None:
    """Neither packed rows before the border nor rows in full precision behind it may ever be kept."""
    layout = CacheLayout(quantised.new_caches, quantised.quantiser)
    _, _, live = recorded(quantised, layout, [60, BORDER, 180])
    with pytest.raises(ValueError, match="quantised KV starts at 100"):
        layout.read_kv(live, 90, 180)
    plain = quantised.new_caches()
    extend(quantised, plain, prompt_of(120))
    with pytest.raises(ValueError, match="quantised KV starts at 100"):
        layout.read_kv(plain, 60, 101)
    assert layout.read_kv(plain, 60, BORDER).num_tokens == 40
