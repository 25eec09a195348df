"""Negative controls of the exactness matrix: faults planted in what is kept or restored, each of which it must notice.

A fault stands in the real path, at the border between records and live caches. The matrix compares tokens and logits,
of so many steps as are compared here; tokens alone notice all faults but those that `only_in_logits` names, which move
the logits too little. Every run plants every fault, in the kinds of caches that logits are compared for in every run.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvserve.core import GenerationFailed
from kvserve.engine.snapshot import CacheLayout, KvSlice, StateSnapshot
from kvserve.engine.worker import Engine
from tests.engine.engines import (
    CUTTABLE,
    FAMILIES,
    HYBRID,
    TAIL_TOKENS,
    WINDOWED,
    assert_close,
    assert_exact,
    cached,
    generate,
    generate_each_with_logits,
    generate_with_logits,
    prompt_of,
    running_engine,
    turn,
)
from tests.laws import THREE_KINDS, sampled, sampled_cells

STALE_TOKENS = 16

BASE, OTHER = prompt_of(288), prompt_of(288, 40)
LONGER, OTHER_LONGER = [*BASE, *prompt_of(60, 1)], [*OTHER, *prompt_of(60, 2)]

Pieces = Sequence[tuple[KvSlice, int, int]]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a row is restored from."""

    pieces: Pieces
    state: StateSnapshot | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Genuine records of the same model: this row's, the same row's 16 tokens earlier, and another row's."""

    own: Kept
    earlier: Kept
    other: Kept


@dataclass(frozen=True, slots=True)
class Fault:
    """`spoil_record` changes what a row is restored from, `spoil_caches` the live caches that came of it.

    `only_in_logits`: in these families all NUM_ANSWER_TOKENS greedy tokens stay the same.
    """

    families: frozenset[str]
    spoil_record: Callable[[Kept, Evidence], Kept] = lambda kept, _: kept
    spoil_caches: Callable[[list[Any]], None] = lambda _: None
    only_in_logits: frozenset[str] = frozenset()


# --- the faults -------------------------------------------------------------------------------------------------------


def _wrong_first_token(kept: Kept, _: Evidence) -> Kept:
    """The first token's keys and values are the second one's."""

    def spoil(array: mx.array) -> mx.array:
        return mx.concatenate([array[..., 1:2, :], array[..., 1:, :]], axis=-2)

    (first, *rows), *rest = kept.pieces
    leaves = tuple(tuple(spoil(array) for array in leaf) for leaf in first.leaves)
    return replace(kept, pieces=[(replace(first, leaves=leaves), *rows), *rest])


def _state_dropped(kept: Kept, _: Evidence) -> Kept:
    return _with_leaves(kept, lambda leaf, _: _map(leaf, mx.zeros_like))


def _state_stale(kept: Kept, evidence: Evidence) -> Kept:
    """Arrays of 16 tokens earlier under the true offset."""
    return _with_leaves(kept, _with_arrays_of, evidence.earlier)


def _conv_stale(kept: Kept, evidence: Evidence) -> Kept:
    """The inputs of the short convolution are those of 16 tokens earlier, the recurrent state is right."""

    def spoil(leaf: Any, earlier: Any) -> Any:
        twin = copy.copy(leaf)
        twin.cache = [earlier.cache[0], *leaf.cache[1:]]
        return twin

    return _with_leaves(kept, spoil, evidence.earlier)


def _rows_swapped(kept: Kept, evidence: Evidence) -> Kept:
    """Of two rows each gets the other's checkpoint."""
    is_own = kept.state is evidence.own.state
    return replace(kept, state=(evidence.other if is_own else evidence.own).state)


def _newest_row_missing(kept: Kept, _: Evidence) -> Kept:
    """The window ends a token too early."""
    return _with_leaves(
        kept, lambda leaf, _: _map(leaf, lambda rows: mx.concatenate([rows[..., :1, :], rows[..., :-1, :]], axis=-2))
    )


def _oldest_row_blank(kept: Kept, _: Evidence) -> Kept:
    """Of the rows that the next token sees the oldest is blank.

    That is the second one: a window counts the token that looks, so the first is seen by nobody any more.
    """
    return _with_leaves(
        kept, lambda leaf, _: _map(leaf, lambda rows: mx.concatenate([0 * rows[..., :2, :], rows[..., 2:, :]], axis=-2))
    )


def _window_cut_short(kept: Kept, _: Evidence) -> Kept:
    """The same row is not even there: the window has one row less than the next token sees."""

    def spoil(leaf: Any, _: Any) -> Any:
        twin = _map(leaf, lambda rows: rows[..., 2:, :])
        twin._idx = twin.keys.shape[-2]
        return twin

    return _with_leaves(kept, spoil)


def _shift(num_tokens: int) -> Callable[[list[Any]], None]:
    def spoil(caches: list[Any]) -> None:
        for cache in caches:
            if hasattr(cache, "offset"):
                cache.offset += num_tokens

    return spoil


def _with_leaves(kept: Kept, change: Callable[[Any, Any], Any], other: Kept | None = None) -> Kept:
    assert kept.state is not None
    others = other.state.leaves if other is not None and other.state is not None else kept.state.leaves
    leaves = tuple(change(leaf, twin) for leaf, twin in zip(kept.state.leaves, others, strict=True))
    return replace(kept, state=replace(kept.state, leaves=leaves))


def _map(leaf: Any, change: Callable[[mx.array], mx.array]) -> Any:
    """A copy of a cache with its arrays changed."""
    twin = copy.copy(leaf)
    for name, value in vars(leaf).items():
        if isinstance(value, mx.array):
            setattr(twin, name, change(value))
        elif isinstance(value, list):
            setattr(twin, name, [change(each) if isinstance(each, mx.array) else each for each in value])
    return twin


def _with_arrays_of(leaf: Any, other: Any) -> Any:
    twin = copy.copy(leaf)
    for name, value in vars(other).items():
        if isinstance(value, mx.array | list):
            setattr(twin, name, value)
    return twin


STATEFUL = HYBRID | WINDOWED
FAULTS = {
    # One of 284 rows, in one layer of two, below which there is a window.
    "wrong first token": Fault(
        frozenset(FAMILIES), _wrong_first_token, only_in_logits=frozenset({"gemma4", "gpt_oss"})
    ),
    "state dropped": Fault(STATEFUL, _state_dropped),
    "state 16 tokens stale": Fault(STATEFUL, _state_stale, only_in_logits=frozenset({"qwen3_next"})),
    "only the conv state stale": Fault(HYBRID, _conv_stale),
    "window without its newest row": Fault(WINDOWED, _newest_row_missing),
    # The next token sees that row, the one after it does not.
    "window with its oldest row blank": Fault(WINDOWED, _oldest_row_blank, only_in_logits=WINDOWED),
    "offset one too small": Fault(frozenset(FAMILIES), spoil_caches=_shift(-1)),
    "offset one too large": Fault(frozenset(FAMILIES), spoil_caches=_shift(1)),
}
"""Faults that a row on its own shows."""


# --- planting them ----------------------------------------------------------------------------------------------------


@contextmanager
def restoring(through: Callable[[CacheLayout, Kept, int], list[Any]]) -> Iterator[None]:
    """Every restore of something goes through this function."""
    real = CacheLayout.restore

    def restore(self: CacheLayout, pieces: Pieces, state: StateSnapshot | None, num_next_tokens: int) -> list[Any]:
        if not pieces and state is None:
            return real(self, pieces, state, num_next_tokens)
        return through(self, Kept(pieces, state), num_next_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheLayout, "restore", restore)
        yield


REAL_RESTORE = CacheLayout.restore


@contextmanager
def planted(fault: Fault, evidence: Evidence) -> Iterator[None]:
    """Every row that is restored meanwhile has this fault."""

    def through(layout: CacheLayout, kept: Kept, num_next_tokens: int) -> list[Any]:
        spoiled = fault.spoil_record(kept, evidence)
        caches = REAL_RESTORE(layout, spoiled.pieces, spoiled.state, num_next_tokens)
        fault.spoil_caches(caches)
        return caches

    with restoring(through):
        yield


def _record_of(engine: Engine, tokens: list[int]) -> Kept:
    """What the engine restores from once it knows `tokens`; a branch that leaves them before their tail asks for it."""
    seen: list[Kept] = []

    def through(layout: CacheLayout, kept: Kept, num_next_tokens: int) -> list[Any]:
        seen.append(kept)
        return REAL_RESTORE(layout, kept.pieces, kept.state, num_next_tokens)

    generate(engine, turn(tokens, 1))
    with restoring(through):
        generate(engine, turn([*tokens[:-TAIL_TOKENS], *prompt_of(2 * TAIL_TOKENS, 90)], 1))
    [kept] = seen
    return kept


@dataclass(frozen=True)
class Prepared:
    """A running engine that knows BASE and OTHER, its genuine records, and what a cold server answers."""

    family: str
    engine: Engine
    evidence: Evidence
    tokens: tuple[int, ...]
    other_tokens: tuple[int, ...]
    logits: np.ndarray
    other_logits: np.ndarray

    def forget_answers(self) -> None:
        """BASE and OTHER are known, nothing else."""
        self.engine.clear_cache()
        generate(self.engine, turn(BASE, 1))
        generate(self.engine, turn(OTHER, 1))


@pytest.fixture(scope="module", params=sampled(FAMILIES, THREE_KINDS))
def prepared(request: pytest.FixtureRequest) -> Iterator[Prepared]:
    family = str(request.param)
    with running_engine(family) as engine:
        other, other_logits = generate_with_logits(engine, turn(OTHER_LONGER))
        result, logits = generate_with_logits(engine, turn(LONGER))
        assert cached(result) == 0
        engine.clear_cache()
        # The state before a tail: a prompt that ends 16 tokens earlier leaves the state of 16 tokens earlier.
        earlier = _record_of(engine, BASE[:-STALE_TOKENS])
        evidence = Evidence(_record_of(engine, BASE), earlier, _record_of(engine, OTHER))
        yield Prepared(family, engine, evidence, result.tokens, other.tokens, logits, other_logits)


def _num_known(prepared: Prepared) -> int:
    return len(BASE) if prepared.family in CUTTABLE else len(BASE) - TAIL_TOKENS


def _only(prepared: Prepared, families: frozenset[str]) -> None:
    if prepared.family not in families:
        pytest.skip("this family has no such layers")


# --- the controls -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_without_a_fault_the_same_path_is_exact(prepared: Prepared) -> None:
    """What the controls below compare is equal as long as nothing is planted."""
    with planted(Fault(frozenset(FAMILIES)), prepared.evidence):
        prepared.forget_answers()
        alone, logits = generate_with_logits(prepared.engine, turn(LONGER))
        prepared.forget_answers()
        together = generate_each_with_logits(prepared.engine, turn(LONGER), turn(OTHER_LONGER))
    assert_exact(alone, prepared.tokens)
    assert_close(logits, prepared.logits)
    right = ((prepared.tokens, prepared.logits), (prepared.other_tokens, prepared.other_logits))
    for (warm, logits), (expected, expected_logits) in zip(together, right, strict=True):
        assert_exact(warm, expected)
        assert_close(logits, expected_logits)


@sampled_cells(lambda prepared, name: prepared == "qwen3_5" or (prepared == "gemma3" and "window" in name))
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(prepared: Prepared, name: str) -> None:
    """A warm row with a fault has neither the logits nor, but where said, the tokens of a cold server."""
    fault = FAULTS[name]
    _only(prepared, fault.families)
    prepared.engine.clear_cache()
    generate(prepared.engine, turn(BASE, 1))
    with planted(fault, prepared.evidence):
        warm, logits = generate_with_logits(prepared.engine, turn(LONGER))
    assert cached(warm) == _num_known(prepared)
    assert logits.shape == prepared.logits.shape
    with pytest.raises(AssertionError):
        assert_close(logits, prepared.logits)
    if prepared.family not in fault.only_in_logits:
        with pytest.raises(AssertionError):
            assert_exact(warm, prepared.tokens)


@sampled_cells(lambda prepared: prepared == "qwen3_5")
def test_swapped_checkpoints_are_noticed_in_both_rows(prepared: Prepared) -> None:
    """Two warm rows of one batch, each with the state of the other."""
    _only(prepared, STATEFUL)
    prepared.forget_answers()
    own, other = _record_of(prepared.engine, BASE), _record_of(prepared.engine, OTHER)
    evidence = replace(prepared.evidence, own=own, other=other)
    with planted(Fault(STATEFUL, _rows_swapped), evidence):
        swapped = generate_each_with_logits(prepared.engine, turn(LONGER), turn(OTHER_LONGER))
    right = ((prepared.tokens, prepared.logits), (prepared.other_tokens, prepared.other_logits))
    for (warm, logits), (expected, expected_logits) in zip(swapped, right, strict=True):
        assert cached(warm) == _num_known(prepared)
        assert logits.shape == expected_logits.shape
        with pytest.raises(AssertionError):
            assert_close(logits, expected_logits)
        if prepared.family != "qwen3_next":
            with pytest.raises(AssertionError):
                assert_exact(warm, expected)


@sampled_cells(lambda prepared: prepared in WINDOWED)
def test_a_window_with_a_row_less_than_is_seen_ends_the_request(prepared: Prepared) -> None:
    """Where the oldest row is not even there the masks do not fit: the request fails instead of answering wrongly."""
    _only(prepared, WINDOWED)
    prepared.forget_answers()
    with planted(Fault(WINDOWED, _window_cut_short), prepared.evidence):
        [warm] = generate(prepared.engine, turn(LONGER))
    assert isinstance(warm.end, GenerationFailed)
    with pytest.raises(AssertionError):
        assert_exact(warm, prepared.tokens)
