"""What the engine makes of a family: whether it loads and computes, how it is decoded and kept, and whether what is
kept leads to the tokens and logits of a row that was computed anew.

It knows models and caches, no family's name. A warm row is compared with a cold one that was cut elsewhere; three
records that are wrong in one way each must be told from the right one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from kvserve.engine.model import LoadedModel, check_folder, load
from kvserve.engine.self_check import check_caches
from kvserve.engine.snapshot import CacheLayout, KvSlice, StateSnapshot

type Keeping = Literal["cut", "checkpoints", "off"]

NUM_PROMPT_TOKENS = 150
NUM_KEPT_TOKENS = 144
"""Few tokens follow: a recurrent state forgets what was wrong with it."""

NUM_CUT_TOKENS = 53
NUM_ANSWER_TOKENS = 12
COLD_BORDER = 64
MAX_CONTEXT_TOKENS = 4096

TOLERANCE = 1e-4
"""The largest difference of two logits, as a share of their standard deviation: see `tests/engine/engines.py`."""

MIN_FAULT = 1e-3
"""A fault must move them by more."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a family. `failure`: why it is not served, empty where it is.

    `error` is that of the warm row, `error_as_cut` beside a cold row that was cut at the same places, `faults` are
    those of the three wrong ones; `notes` are what the start says.
    """

    failure: str = ""
    can_batch: bool = False
    keeping: Keeping = "off"
    error: float = 0.0
    error_as_cut: float = 0.0
    has_same_tokens: bool = False
    faults: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Kept, and a warm row is a cold one."""
        return not self.failure and self.keeping != "off" and self.has_same_tokens and self.error <= TOLERANCE

    @property
    def depends_on_cuts(self) -> bool:
        """Not exact, as the model itself writes other logits where a prefill is cut."""
        return not self.failure and self.keeping != "off" and not self.is_exact and self.error_as_cut <= TOLERANCE

    @property
    def are_faults_seen(self) -> bool:
        """Whether the comparison can tell a wrong record."""
        return len(self.faults) == 3 and min(self.faults) > MIN_FAULT


def outcome_of(folder: Path) -> Outcome:
    """Load a folder and try it. Whatever is raised is the outcome."""
    try:
        check_folder(folder)
        model = load(folder, MAX_CONTEXT_TOKENS)
        model = replace(model, cache_support=check_caches(model))
        return _outcome(model)
    except Exception as error:  # noqa: BLE001  # the reason is the result
        reason = " ".join(str(error).replace(str(folder), "the folder").split())
        return Outcome(failure=f"{type(error).__name__}: {reason[:200]}")


def _outcome(model: LoadedModel) -> Outcome:
    support = model.cache_support
    found = Outcome(can_batch=support.can_batch, notes=support.notes)
    cold = _cold(model, COLD_BORDER)
    if not support.can_keep:
        return found
    layout = CacheLayout(model.new_caches, model.quantiser, model.leaf_forms)
    if layout.is_cuttable:
        warm, faults = _cut(model, layout)
    else:
        warm, faults = _checkpointed(model, layout)
    same_cuts = () if layout.is_cuttable else (NUM_KEPT_TOKENS // 2, NUM_KEPT_TOKENS)
    return replace(
        found,
        error_as_cut=warm.error(_cold(model, *(same_cuts or (NUM_CUT_TOKENS,)))),
        keeping="cut" if layout.is_cuttable else "checkpoints",
        error=warm.error(cold),
        has_same_tokens=warm.tokens == cold.tokens,
        faults=tuple(fault.error(cold) for fault in faults),
    )


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    """Greedy tokens, and the logits (tokens, vocabulary) that they were chosen by."""

    tokens: tuple[int, ...]
    logits: mx.array

    def error(self, other: "_Answer") -> float:
        """How far the first logits, and those of later tokens while these are the same, are apart."""
        same = next((i for i, pair in enumerate(zip(self.tokens, other.tokens, strict=True)) if pair[0] != pair[1]), -1)
        num = len(self.tokens) if same < 0 else same + 1
        ours, theirs = self.logits[:num], other.logits[:num]
        finite = mx.isfinite(theirs)
        spread = mx.std(mx.where(finite, theirs, 0))
        difference = mx.where(ours == theirs, 0, mx.abs(ours - theirs)).max() / spread
        return float(difference.item())  # type: ignore[arg-type]


def _cold(model: LoadedModel, *borders: int) -> _Answer:
    """A prompt that is computed anew, cut at these places."""
    prompt, caches = prompt_of(model), model.new_caches()
    for start, end in pairwise((0, *borders)):
        _step(model, caches, prompt[start:end])
    return _answer(model, caches, prompt[borders[-1] :])


def prompt_of(model: LoadedModel, seed: int = 0) -> list[int]:
    """Tokens that differ from their neighbours, others for another seed."""
    return [1 + (place * 7919 + seed * 104729 + place * place * 31) % (model.vocab_size - 1) for place in range(150)]


def _answer(model: LoadedModel, caches: list[Any], tokens: Sequence[int]) -> _Answer:
    """Greedy tokens behind a prompt's last part."""
    logits = [_step(model, caches, tokens)]
    chosen = [int(mx.argmax(logits[0]).item())]
    for _ in range(NUM_ANSWER_TOKENS - 1):
        logits.append(_step(model, caches, chosen[-1:]))
        chosen.append(int(mx.argmax(logits[-1]).item()))
    return _Answer(tuple(chosen), mx.stack(logits))


def _step(model: LoadedModel, caches: list[Any], tokens: Sequence[int]) -> mx.array:
    logits: mx.array = model.module(mx.array([list(tokens)]), cache=caches)[0, -1].astype(mx.float32)
    mx.eval(logits, [cache.state for cache in caches])
    return logits


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Record:
    kv: KvSlice
    state: StateSnapshot | None
    num_tokens: int


def _record(model: LoadedModel, layout: CacheLayout, seed: int, num_tokens: int) -> _Record:
    """What is kept of a prompt's first tokens; the row goes on, and nothing of it may move."""
    prompt, caches = prompt_of(model, seed), model.new_caches()
    _step(model, caches, prompt[: num_tokens // 2])
    _step(model, caches, prompt[num_tokens // 2 : num_tokens])
    record = _Record(layout.read_kv(caches, 0, num_tokens), layout.read_state(caches), num_tokens)
    _step(model, caches, prompt_of(model, 9)[:20])
    _step(model, caches, [5])
    return record


def _restored(layout: CacheLayout, record: _Record, num_tokens: int | None = None) -> list[Any]:
    return layout.restore([(record.kv, 0, num_tokens or record.num_tokens)], record.state, 40)


def _cut(model: LoadedModel, layout: CacheLayout) -> tuple[_Answer, list[_Answer]]:
    """A row from a record's first tokens; the same of another prompt, one token short, and with one wrong layer."""
    own, other = (_record(model, layout, seed, NUM_KEPT_TOKENS) for seed in (0, 1))
    rest = prompt_of(model)[NUM_CUT_TOKENS:]
    _answer(model, _restored(layout, own), prompt_of(model, 3)[:5])
    warm = _answer(model, _restored(layout, own, NUM_CUT_TOKENS), rest)
    mixed = replace(own, kv=replace(own.kv, leaves=(*other.kv.leaves[:1], *own.kv.leaves[1:])))
    faults = [
        _answer(model, _restored(layout, other, NUM_CUT_TOKENS), rest),
        _answer(model, _restored(layout, own, NUM_CUT_TOKENS - 1), rest),
        _answer(model, _restored(layout, mixed, NUM_CUT_TOKENS), rest),
    ]
    return warm, faults


def _checkpointed(model: LoadedModel, layout: CacheLayout) -> tuple[_Answer, list[_Answer]]:
    """A row from a checkpoint; the same of another prompt, of a token before, and with one wrong state."""
    own, other = (_record(model, layout, seed, NUM_KEPT_TOKENS) for seed in (0, 1))
    earlier = _record(model, layout, 0, NUM_KEPT_TOKENS - 1)
    rest = prompt_of(model)[NUM_KEPT_TOKENS:]
    assert own.state is not None and other.state is not None, "what cannot be cut has a state"
    _answer(model, _restored(layout, own), prompt_of(model, 3)[:5])
    warm = _answer(model, _restored(layout, own), rest)
    mixed = replace(own, state=replace(own.state, leaves=(*other.state.leaves[:1], *own.state.leaves[1:])))
    faults = [_answer(model, _restored(layout, record), rest) for record in (other, earlier, mixed)]
    return warm, faults
