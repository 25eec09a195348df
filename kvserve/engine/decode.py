"""Decoding: which rows share a batch, whose turn it is, and what happens when a batch breaks.

A batch pads every row to its longest, so a row joins the running generator where it adds the least padding, and gets a
generator of its own when that padding would cost more memory traffic per step than reading the weights once more.
Generators take turns by the time they used per row (stride scheduling: Waldspurger and Weihl, 1995), so that one
100k-token row cannot slow three short ones down. mlx-lm's `BatchGenerator` does the batching and sampling itself; where
a model's caches cannot be batched, each row has a generator of its own.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences

from kvserve.engine.borders import described, is_out_of_memory
from kvserve.engine.broken_batches import sent_back
from kvserve.engine.decode_group import (
    Decoder,
    DecodeResult,
    ExtractedRow,
    Group,
    StatesBefore,
    drawn_token,
    had_room,
    hand_out,
    is_recurrent,
    left_row,
)
from kvserve.engine.draft_nouns import DEFAULT_DRAFTS, DraftSettings, DraftSupport
from kvserve.engine.draft_support import find_draft_support
from kvserve.engine.drafted import DraftedGenerator, DraftedRow
from kvserve.engine.kv_buffers import BatchKv, entering, flat_caches, leaving, settle
from kvserve.engine.model import LoadedModel
from kvserve.engine.ranks.agreed import AgreedModule, FollowedBatch
from kvserve.engine.ranks.decisions import DRAWN, FAILED, PLACE, TURN
from kvserve.engine.ranks.place import ALONE, Ranks
from kvserve.engine.rows import Row, admitted_tokens
from kvserve.engine.solo import SoloGenerator
from kvserve.engine.token_dispatcher import SendingModule
from kvserve.engine.wired import batch_generator


def extra_padding_tokens(lengths: Sequence[int], joining: int) -> int:
    """Padding, in tokens, that a row of `joining` tokens adds to a batch of these lengths: its own or the others'."""
    if not lengths:
        return 0
    longest = max(lengths)
    return longest - joining if joining <= longest else (joining - longest) * len(lengths)


class DecodePool:
    """All decoding rows. Owned by the engine thread; every method but `num_rows` may run the model."""

    def __init__(
        self,
        model: LoadedModel,
        max_batch_size: int,
        send_tokens: Callable[[], None] = lambda: None,
        draft_settings: DraftSettings = DEFAULT_DRAFTS,
        ranks: Ranks = ALONE,
    ) -> None:
        """`send_tokens` is called in the middle of a step, when the rest of it is the device's."""
        self._model = model
        self._send_tokens = send_tokens
        self._ranks = ranks
        is_alone, module = ranks.is_alone, model.module
        self._module = SendingModule(module, send_tokens) if is_alone else AgreedModule(module, send_tokens, ranks)
        self._max_batch_size = max_batch_size
        self._groups: list[Group] = []
        has_states = model.has_states_elsewhere or any(map(is_recurrent, flat_caches(model.new_caches())))
        self._holds_states = model.cache_support.can_batch and has_states
        self._draft_settings = draft_settings
        self._draft_support = model.drafts

    @property
    def num_rows(self) -> int:
        return sum(len(group.rows) for group in self._groups)

    def rows(self) -> list[Row]:
        """The decoding rows, in no particular order."""
        return [row for group in self._groups for row in group.rows.values()]

    def held_bytes(self) -> float:
        """Bytes of KV that the batches hold, padding and room for the answer included."""
        return sum(map(self._held_bytes, self._groups))

    def _held_bytes(self, group: Group) -> float:
        live_bytes = self._model.sizes.live(group.num_slots)  # asked once: it looks at all of the rows
        return sum(live_bytes + self.bytes_besides(row) for row in group.rows.values())

    def bytes_besides(self, row: Row) -> int:
        """Bytes that a row has besides its KV while it decodes: its states from before a step, and what a draft takes.
        In a batch, too, so that one that comes again counts as what it will be."""
        held = self._model.sizes.fixed if self._holds_states else 0
        return max(held, self.draft_support.row_bytes) if row.drafts is not None else held

    @property
    def draft_support(self) -> DraftSupport:
        """What the model's caches allow of drafts; tried at the first call where the load has not."""
        self._draft_support = self._draft_support or find_draft_support(self._model, self._draft_settings)
        return self._draft_support

    def padding_bytes(self) -> float:
        """Bytes of what is held beyond the rows' own KV and the room that they were admitted with: padding, the room
        of a row by itself that has outgrown it, and the states from before a step."""
        live, own = self._model.sizes.live, 0.0
        for group in self._groups:
            for row in group.rows.values():
                own += live(max(admitted_tokens(row), row.num_tokens) if len(group.rows) == 1 else row.num_tokens)
        return self.held_bytes() - own

    def enter(self, row: Row, caches: list[Any], padding_bytes: float = math.inf) -> None:
        """Let a prefilled row decode. `caches` hold the KV of all its tokens but the last, and are consumed. It joins
        no batch where it would add more than `padding_bytes` of padding."""
        most_bytes = min(padding_bytes, self._model.active_weight_bytes)
        is_packed = self._model.is_packed(row.num_tokens - 1)
        place = self._ranks.decided(PLACE, lambda: self._place(self._joined(row.num_tokens, is_packed, most_bytes)))
        group = self._groups[place] if place is not None else None
        group = group or self._empty_group(is_packed, is_drafted=self._may_draft(row))
        self._ranks.together(lambda: self._insert(row, caches, group))

    def make_way(self, row: Row, padding_bytes: float = math.inf) -> DecodeResult:
        """Let a row whose tokens are guessed, and which this one is about to join, go on in a batch. Its next token is
        handed out; what happens to it meanwhile touches no other row."""
        most_bytes = min(padding_bytes, self._model.active_weight_bytes)
        is_packed = self._model.is_packed(row.num_tokens - 1)
        group = self._joined(row.num_tokens, is_packed, most_bytes, is_moved=True)
        if group is None or not group.is_drafted:
            return DecodeResult()
        return self._moved(group, is_drafted=False)

    def _insert(self, row: Row, caches: list[Any], group: Group) -> None:
        """Let a row into a generator: `caches` hold all its tokens but the last."""
        tokens, decoder = row.tokens(), Decoder.of(row, self._model.vocab_size)
        caches = self._model.ready(caches, len(tokens) - 1)
        self._model.place(caches, row.request, len(tokens) - 1)
        num_left = row.request.max_tokens - len(row.generated)
        sampler, processors = decoder.guarded(row)
        if group.is_drafted and row.drafts is not None:
            uid = group.generator.insert(
                DraftedRow(
                    caches,
                    tokens[:-1],
                    mx.array(tokens[-1:], dtype=mx.uint32),
                    num_left,
                    sampler,
                    processors,
                    row.drafts,
                    is_private=decoder.is_private,
                    stop_at=self._model.sizes.packed_from,
                    has_failed=lambda: row.failure is not None,
                )
            )
        else:
            if self._may_draft(row) and (costs := self.draft_support.together) is not None:
                group.draft_together(costs, self._model.sizes.packed_from)
            [uid] = group.generator.insert(
                [tokens[-1:]],
                max_tokens=[num_left],
                caches=[entering(caches) if self._model.cache_support.can_batch else caches],
                all_tokens=[tokens[:-1]],
                samplers=[sampler],
                logits_processors=[processors],
                stop_sequences=[StopSequences([[token] for token in row.request.stop_tokens])],
            )
        group.rows[uid] = row

    def _may_draft(self, row: Row) -> bool:
        drafts = row.drafts
        return drafts is not None and not drafts.is_given_up and self.draft_support.ways is not None

    def _moved(self, group: Group, *, is_drafted: bool) -> DecodeResult:
        """Let a group's only row go on in a generator of the other kind: it takes its caches along, and is handed its
        next token, as it enters with all that are known."""
        [(uid, row)] = group.rows.items()
        result = self.hand_out_drawn(row)
        if uid not in group.rows or group not in self._groups:
            return result

        def move() -> None:
            caches = self._taken_out(group, uid)
            self._insert(row, caches, self._empty_group(group.is_packed, is_drafted=is_drafted))
            group.drop(uid)

        broken = self._asked(group, move)
        return result if broken is None else broken

    def _taken_out(self, group: Group, uid: int) -> list[Any]:
        """A group's only row, out of its generator, with the buffers that it has there."""
        if group.is_drafted or not self._model.cache_support.can_batch:
            caches: list[Any] = group.generator.remove([uid], return_prompt_caches=True)[uid][0]
            return caches
        caches = leaving(group.generator._generation_batch.prompt_cache)
        group.generator.remove([uid])
        return caches

    def _guess_for_lone_rows(self) -> list[DecodeResult]:
        """Rows that others have left to themselves go on where their next tokens are guessed."""
        lone = [group for group in self._groups if len(group.rows) == 1 and not group.is_drafted]
        results = []
        for group in lone:
            [(uid, row)] = group.rows.items()
            if self._may_draft(row) and drawn_token(group.generator, uid) is not None:
                results.append(self._moved(group, is_drafted=True))
        return results

    def look_at(self, row: Row) -> ExtractedRow | None:
        """What a row that continues decoding holds between two steps, not evaluated yet; None if it does not decode."""
        for group, uid in self._place_of(row):
            caches, tokens = group.generator.extract_cache([uid])[uid]
            return ExtractedRow(row, caches, list(tokens))
        return None

    def remove(self, row: Row) -> ExtractedRow | None:
        """Take a row out between two steps, with the KV of all its tokens; None if it does not decode."""
        for group, uid in self._place_of(row):
            caches, tokens = group.generator.remove([uid], return_prompt_caches=True)[uid]
            group.drop(uid)
            return ExtractedRow(row, caches, tokens, self._rest(group))
        return None

    def hand_out_drawn(self, row: Row) -> DecodeResult:
        """Hand out the token that the last step has drawn for a row that is about to leave and enter again: what its
        caches hold is all its tokens but this one. Where that is its last one the row is finished, and has left."""
        for group, uid in self._place_of(row):
            token = self._asked(group, partial(self._ranks.decided, DRAWN, partial(_drawn_id, group, uid)))
            if isinstance(token, DecodeResult):
                return token
            if token is not None:
                hand_out(row, token)
        left = self.remove(row) if row.is_over else None
        return DecodeResult(finished=(left,) if left is not None else ())

    def at_quantise_start(self) -> list[Row]:
        """The rows whose next token, which is drawn already, is the first that quantised KV must compute."""
        start = self._model.sizes.packed_from
        plain = [(group, uid, row) for group in self._groups if not group.is_packed for uid, row in group.rows.items()]
        due = [each for each in plain if each[2].num_tokens == start]
        return [row for group, uid, row in due if drawn_token(group.generator, uid) is not None]

    def _place_of(self, row: Row) -> list[tuple[Group, int]]:
        """The generator that has a row, and by which uid; empty if it does not decode."""
        return [(group, uid) for group in self._groups for uid, each in group.rows.items() if each is row]

    def _rest(self, group: Group, others: Sequence[ExtractedRow] = ()) -> tuple[tuple[Any, ...], ...]:
        """For each leaf those of the rows that a group still has, and of others that have left it."""
        held = [flat_caches(group.generator._generation_batch.prompt_cache)] if group.rows else []
        return tuple(zip(*held, *(flat_caches(left.caches) for left in others), strict=True))

    def _with_rest(
        self, group: Group, lefts: Sequence[ExtractedRow], all_left: Sequence[ExtractedRow]
    ) -> list[ExtractedRow]:
        """Rows that leave a group in one step, each with the others who have its buffers."""
        return [
            replace(left, rest=self._rest(group, [other for other in all_left if other is not left])) for left in lefts
        ]

    def settle(self) -> None:
        """Compute batches that rows have left, large layers one after the other: as long as that is only described,
        what they were before is there as well. Rows that have left are let go of first."""
        for group in self._groups:
            if group.has_lost_rows and group.rows and self._model.cache_support.can_batch and not group.is_drafted:
                for leaf in flat_caches(group.generator._generation_batch.prompt_cache):
                    if isinstance(leaf, BatchKv):
                        settle(*leaf.rows)
            group.has_lost_rows = False

    def step(self) -> DecodeResult:
        """A step of the generator whose turn it is: each of its rows gets a token, or several where drafts were
        right."""
        moved = self._guess_for_lone_rows()
        running = [group for group in self._groups if group.rows]
        if not running:
            return DecodeResult.of(moved)
        turn = self._ranks.decided(TURN, lambda: _first(running))
        return DecodeResult.of([*moved, self._step_group(running[turn])])

    def step_all(self) -> DecodeResult:
        """A step of each generator: what running streams get between two prefill chunks."""
        moved = self._guess_for_lone_rows()
        return DecodeResult.of([*moved, *(self._step_group(group) for group in list(self._groups) if group.rows)])

    def discard(self) -> list[Row]:
        """Throw every generator away; returns their rows."""
        rows = self.rows()
        for group in self._groups:
            group.generator.close()
        self._groups = []
        return rows

    def _step_group(self, group: Group) -> DecodeResult:
        started = time.perf_counter()
        num_rows = len(group.rows)
        begun = self._asked(group, partial(self._next, group))
        if isinstance(begun, DecodeResult):
            return begun
        before, responses = begun
        finished = []
        for response in responses:
            row = group.rows[response.uid]
            if response.finish_reason is not None:
                group.drop(response.uid)
                finished.append(left_row(row, response, before))
            if response.finish_reason == "stop":
                row.finish("stop", num_hidden_tokens=1)
                continue
            row.deliver(response.token)
            if response.finish_reason == "length":
                row.finish("length")
        failed = self._ranks.decided(FAILED, lambda: [row for row in group.rows.values() if row.failure is not None])
        broken = [left for row in failed if (left := self.remove(row)) is not None]
        finished, broken = (self._with_rest(group, lefts, (*finished, *broken)) for lefts in (finished, broken))
        group.used_seconds += (time.perf_counter() - started) / num_rows
        return DecodeResult(tuple(finished), tuple(failed), broken=tuple(broken))

    def _next(self, group: Group) -> tuple[StatesBefore | None, list[Any]]:
        """The states from before a step where they are held, and the generator's responses."""
        before = StatesBefore.of(group.generator) if self._holds_states else None
        return before, group.generator.next()[1]

    def _asked[T](self, group: Group, question: Callable[[], T]) -> T | DecodeResult:
        """What a generator gives; where it raises, what breaking it up leaves to do."""
        try:
            return self._ranks.together(question)
        except Exception as error:  # noqa: BLE001 - whatever broke inside a generator, its state is unknown
            return self._break_up(group, error)

    def _break_up(self, group: Group, error: Exception) -> DecodeResult:
        """Discard a generator that raised: its rows enter again from their tokens, without drafts where these may be to
        blame. A second failure is the row's own, but none is blamed for what drafts may have done to several rows, or
        taken of the memory."""
        self._groups.remove(group)
        group.generator.close()
        rows, is_short = list(group.rows.values()), is_out_of_memory(error)
        is_drafts = (group.is_drafted or group.is_drafted_together) and (not is_short or had_room(rows, error))
        if is_drafts:
            group.give_up_drafts()
        is_excused = is_drafts and (is_short or group.is_drafted_together)
        if is_excused and not is_short:
            why_not = f"a pass of several rows raised {described(error)}"
            self._draft_support = replace(self.draft_support, together=None, why_not_together=why_not)
        return sent_back(rows, error, self._model.sizes, is_excused=is_excused)

    def _joined(self, num_tokens: int, is_packed: bool, most_bytes: float, *, is_moved: bool = False) -> Group | None:
        """The generator that a row joins: the least padding, where there is memory for it and it is cheaper than one
        more pass over the weights (`most_bytes`); `is_moved`: one whose row would go on in a batch for it, too."""
        if not self._model.cache_support.can_batch:
            return None
        candidates = []
        for group in self._groups:
            is_open = 0 < len(group.rows) < self._max_batch_size and (is_moved or not group.is_drafted)
            if is_open and group.is_packed == is_packed:
                padding = extra_padding_tokens([row.num_tokens for row in group.rows.values()], num_tokens)
                if padding * self._model.sizes.token_bytes(num_tokens) <= most_bytes:
                    candidates.append((padding, id(group), group))
        return min(candidates)[2] if candidates else None

    def _place(self, group: Group | None) -> int | None:
        return self._groups.index(group) if group is not None else None

    def _empty_group(self, is_packed: bool, *, is_drafted: bool = False) -> Group:
        """A generator without rows, an idle one if there is one. It starts level with the others, without a lead."""
        group = next((group for group in self._groups if not group.rows and group.is_drafted == is_drafted), None)
        if group is None:
            group = Group(self._new_generator(is_drafted=is_drafted))
            self._groups.append(group)
        group.is_packed = is_packed
        busy = [other.used_seconds for other in self._groups if other.rows]
        group.used_seconds = min(busy, default=0.0)
        return group

    def _new_generator(self, *, is_drafted: bool) -> Any:
        support = self.draft_support if is_drafted else None
        if support is not None and support.ways is not None:
            return DraftedGenerator(self._module, support.ways, support.costs, self._module.send)
        if not self._model.cache_support.can_batch:
            return SoloGenerator(self._module, self._module.taken)
        generator = batch_generator(self._module, completion_batch_size=self._max_batch_size)
        if self._ranks.is_following:
            FollowedBatch.take_over(generator)
        return generator


def _first(running: Sequence[Group]) -> int:
    """Whose turn it is."""
    return min(range(len(running)), key=lambda place: running[place].used_seconds)


def _drawn_id(group: Group, uid: int) -> int | None:
    """The token that is drawn for a row, whose caches then hold all that were handed out before it."""
    if group.is_drafted:
        group.generator.catch_up()
    token = drawn_token(group.generator, uid)
    return int(token.item()) if token is not None else None  # type: ignore[arg-type]
