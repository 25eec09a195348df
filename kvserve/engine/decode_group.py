"""The nouns of decoding: a generator with its rows, how a row draws its tokens, what a step brought, and recurrent
states as they were before it.

The token that a generator has drawn for a row and not handed out is one ahead of what clients hear. A row's states lie
behind every token that was handed out. They cannot be taken back, and the last token of a row that enters again is
always computed, so such a row takes the drawn one along.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from kvserve.engine.batch_costs import BatchCosts
from kvserve.engine.borders import guarded, is_helped_by_room
from kvserve.engine.drafted import DraftedGenerator
from kvserve.engine.drafted_batch import DraftedBatch
from kvserve.engine.kv_buffers import flat_caches, num_slots
from kvserve.engine.quantised import PackedCache
from kvserve.engine.rows import Row, admitted_tokens
from kvserve.engine.sampling import LogitsProcessor, Sampler, processors_for, sampler_for
from kvserve.engine.solo import Response, SoloGenerator


@dataclass(frozen=True, slots=True)
class Decoder:
    """How one row draws its tokens. Rows may share a sampler; one of a row's own (`is_private`) is seeded."""

    sampler: Sampler
    processors: Sequence[LogitsProcessor]
    is_private: bool

    def guarded(self, row: Row) -> tuple[Sampler, list[LogitsProcessor]]:
        """The same, where what the row's own ones raise is its own failure."""
        sampler = guarded(row, self.sampler, _likeliest) if self.is_private else self.sampler
        return sampler, [guarded(row, processor, _unchanged) for processor in self.processors]

    @classmethod
    def of(cls, row: Row, vocab_size: int) -> "Decoder":
        """What a row draws with that enters a batch, for the first time or again."""
        processors = processors_for(row.request.sampling, len(row.request.prompt))
        if row.logprobs is not None:
            processors.insert(0, row.logprobs)
        for constraint in row.constraints:
            constraint.reset()
            processors.append(constraint)
        sampler = sampler_for(row.request.sampling, vocab_size, len(row.generated))
        return cls(sampler, processors, row.request.sampling.seed is not None)


def _likeliest(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def _unchanged(_tokens: mx.array, logits: mx.array) -> mx.array:
    return logits


@dataclass(slots=True, eq=False)
class Group:
    """One generator and its rows by uid. `used_seconds` is its decoding time divided by the rows that shared it."""

    generator: Any  # BatchGenerator, which is not typed, SoloGenerator or DraftedGenerator
    rows: dict[int, Row] = field(default_factory=dict)
    used_seconds: float = 0.0
    is_packed: bool = False
    """Whether its rows' KV is quantised: those in full precision decode in another one."""
    has_lost_rows: bool = False
    """Whether a row left since the batch was computed last."""

    @property
    def is_drafted(self) -> bool:
        """Whether its row's next tokens are guessed: it decodes by itself."""
        return isinstance(self.generator, DraftedGenerator)

    @property
    def is_drafted_together(self) -> bool:
        """Whether the next tokens of rows beside one another are guessed."""
        return isinstance(getattr(self.generator, "_generation_batch", None), DraftedBatch)

    def draft_together(self, costs: BatchCosts, stop_at: int | None) -> None:
        """Guess the next tokens of rows beside one another from now on, in passes up to `stop_at` tokens of a row."""
        if not self.is_drafted_together:
            DraftedBatch.take_over(self.generator, self.rows, costs, stop_at)

    def give_up_drafts(self) -> None:
        """Its rows, which enter another generator, go on without."""
        for row in self.rows.values():
            if row.drafts is not None:
                row.drafts.is_given_up = True

    def drop(self, uid: int) -> Row:
        """Forget a row that has left the generator."""
        self.has_lost_rows = True
        return self.rows.pop(uid)

    @property
    def longest(self) -> int:
        return max((row.num_tokens for row in self.rows.values()), default=0)

    @property
    def num_slots(self) -> int:
        """Tokens that each row's buffers have room for: a row by itself entered with room for its answer."""
        if len(self.rows) == 1:
            [row] = self.rows.values()
            admitted = admitted_tokens(row)
            return admitted if row.num_tokens <= admitted else num_slots(row.num_tokens)
        used: int = self.generator._generation_batch.num_slots if self.is_drafted_together else 0
        return max(self.longest, used)


@dataclass(frozen=True, slots=True)
class ExtractedRow:
    """A row that left its batch whole: plain caches that hold the KV of `tokens`, prompt included, and states behind
    exactly these. `rest`: for each leaf those of the batch that goes on, and of the rows that left with this one, which
    have its buffers too until they are computed; empty where it was alone, None where they cannot be given up."""

    row: Row
    caches: list[Any]
    tokens: list[int]
    rest: tuple[tuple[Any, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """What one decode step brought: rows that are finished, failed, or must enter again from their tokens.

    `is_short_of_memory`: an allocation failed, so that room must be made before rows enter again. `broken`: what failed
    rows held, where it was not their batch that failed.
    """

    finished: tuple[ExtractedRow, ...] = ()
    failed: tuple[Row, ...] = ()
    evicted: tuple[Row, ...] = ()
    is_short_of_memory: bool = False
    broken: tuple[ExtractedRow, ...] = ()

    @classmethod
    def of(cls, steps: "Sequence[DecodeResult]") -> "DecodeResult":
        """What several steps brought."""
        return cls(
            tuple(left for step in steps for left in step.finished),
            tuple(row for step in steps for row in step.failed),
            tuple(row for step in steps for row in step.evicted),
            any(step.is_short_of_memory for step in steps),
            tuple(left for step in steps for left in step.broken),
        )


def drawn_token(generator: Any, uid: int) -> mx.array | None:
    """A row's next token (), which may not be computed yet; None where its last prompt token has not gone through the
    model."""
    if isinstance(generator, SoloGenerator | DraftedGenerator):
        return generator.drawn_token(uid)
    batch = generator._generation_batch
    return batch._next_tokens[batch.uids.index(uid)] if uid in batch.uids else None


def hand_out(row: Row, token: int) -> None:
    """Pass a token on to the row's client as a step does, and end the row where it is its last one."""
    if token in row.request.stop_tokens:
        row.finish("stop", num_hidden_tokens=1)
        return
    row.deliver(token)
    if len(row.generated) >= row.request.max_tokens:
        row.finish("length")


def is_recurrent(leaf: Any) -> bool:
    """Whether a cache, of one row or of a batch, is a recurrent state."""
    return type(leaf) is ArraysCache


@dataclass(frozen=True, slots=True)
class StatesBefore:
    """The recurrent states of a batch's rows as they were before a step, by reference: where an answer ends whose stop
    token the next prompt may not repeat.

    A step hands a token out after the model has gone through it, and a recurrent state cannot be taken back. The step
    replaces these arrays and changes none, so those from before it exist for as long as they are held.

    `rows` are the places of uids in the batch; `states` has one entry per leaf, None for one that can be cut.
    """

    rows: Mapping[int, int]
    states: Sequence[Sequence[mx.array] | None]

    @classmethod
    def of(cls, generator: Any) -> "StatesBefore | None":
        """The states in a generator before its next step; None where no row has begun to decode."""
        if isinstance(generator, DraftedGenerator):
            uids, flat = generator.leaves_before()
        else:
            batch = generator._generation_batch
            uids, flat = batch.uids, flat_caches(batch.prompt_cache)
        if not uids:
            return None
        states = [tuple(leaf.cache) if is_recurrent(leaf) else None for leaf in flat]
        return cls({uid: row for row, uid in enumerate(uids)}, states)

    def put_back(self, uid: int, caches: Sequence[Any]) -> bool:
        """Give a row's own caches the states from before the step. Returns False, and changes nothing, where they have
        other layers that cannot be taken back, or no state yet."""
        row, flat = self.rows.get(uid), flat_caches(caches)
        can_go_back = all(type(leaf) in (KVCache, PackedCache, ArraysCache) for leaf in flat)
        has_states = all(array is not None for state in self.states for array in state or ())
        if row is None or not can_go_back or not has_states:
            return False
        for leaf, state in zip(flat, self.states, strict=True):
            if state is not None:
                leaf.cache = [array[row : row + 1] for array in state]
        return True


def left_row(row: Row, response: Any, before: StatesBefore | None) -> ExtractedRow:
    """A row that is finished. Of one that ended with another stop token than the next prompt will have behind its
    answer, a state behind that token would be of no use: it gets those from before it, where there are any."""
    caches, tokens = response.prompt_cache, response.all_tokens
    if isinstance(response, Response) and not response.holds_token:
        return ExtractedRow(row, caches, tokens)
    is_repeated = response.finish_reason != "stop" or response.token == row.request.turn_end
    if is_repeated or row.request.turn_end is None or before is None or not before.put_back(response.uid, caches):
        return ExtractedRow(row, caches, tokens)
    return ExtractedRow(row, caches, tokens[:-1])


def had_room(rows: Sequence[Row], error: Exception) -> bool:
    """Whether an allocation failed though room was made before, or though room is no help."""
    return any(row.num_memory_failures for row in rows) or not is_helped_by_room(error)
