"""Rows that decode beside one another and whose next tokens are guessed: mlx-lm's batch, which also puts the pending
tokens of all rows, each with its draft behind it, through the model in one pass. Each row draws as it does by itself
(`verified`), and its newest tokens leave the caches as far as they are not its own (`RightAligned.cut`), so that rows
become of unequal length and nothing is copied. It knows rows, their drafts and what such passes cost.

A row without a draft, or with a shorter one, has its pending token again in the places behind: their width is the same
for all. Where nothing is worth a wider pass a step is mlx-lm's own: the next pass is described before the pending
tokens are read. So the first token of a draft may be the pending one, as where a row decodes alone (`drafted.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch

from kvserve.core import Draft
from kvserve.engine.batch_costs import BatchCosts, Hope
from kvserve.engine.borders import guarded
from kvserve.engine.kv_buffers import RightAligned, flat_caches
from kvserve.engine.row_drafts import RowDrafts
from kvserve.engine.rows import Row
from kvserve.engine.verified import draw, drawn_in_order, right_of


@dataclass(frozen=True, slots=True)
class Guess:
    """A row's draft. The first `num_given` of its tokens is the pending one, or is taken for it where that has not been
    read; the others follow it."""

    drafts: RowDrafts
    draft: Draft
    num_given: int

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.draft.tokens[self.num_given :]

    def hope(self, *, is_read: bool) -> Hope:
        """How likely that is, with the pending token or without."""
        is_given = self.draft.chances[0] if self.num_given and not is_read else 1.0
        return Hope(self.draft.chances[self.num_given :], is_given)

    def judge(self, num_tried: int, num_accepted: int) -> None:
        """Note what became of the tokens behind the pending one."""
        if num := self.num_given + num_tried:
            self.drafts.judge(self.draft, num, self.num_given + num_accepted, num_given=self.num_given)


class DraftedBatch(GenerationBatch):
    """Belongs to its generator. `rows` are those of the batch by uid, and may be more; `stop_at`: no pass goes beyond
    so many tokens of a row's KV."""

    rows: Mapping[int, Row]
    costs: BatchCosts
    stop_at: int | None
    samplers: Any
    logits_processors: Any
    _next_tokens: Any
    _known: Mapping[int, int]
    """The pending tokens of the rows that have been read, by uid."""
    _even: Sequence[int] = ()
    """The rows of the last step where it was a plain one: the next one waits for its pass, which had all of them, and
    its time is that of one of as many rows only where none has left since."""

    _without: int | None = None
    """The row, by uid, that had no draft last where all rows needed one: it is asked before the others."""

    @classmethod
    def take_over(cls, generator: Any, rows: Mapping[int, Row], costs: BatchCosts, stop_at: int | None) -> None:
        """Let a `BatchGenerator` go on with such a batch. Nothing moves."""
        batch = cls.empty(generator.model, generator.sampler)
        batch.rows, batch.costs, batch.stop_at, batch._known = rows, costs, stop_at, {}
        batch.extend(generator._generation_batch)
        generator._generation_batch = batch

    @property
    def num_slots(self) -> int:
        """How many slots of each row's buffers are in use, or left free since other rows grew faster."""
        return max((leaf.size() for leaf in self._leaves()), default=0)

    def next(self) -> list[Any]:
        """The rows' next tokens: several of a row where drafts were right."""
        if not self.uids:
            return []
        num_room_tokens = self._make_room()  # also where none may draft any more: rows are to end at one slot again
        if not any(self._may_draft(uid) for uid in self.uids):
            return self._plain_step()
        guesses, num_worth = self._worth_trying(num_room_tokens)
        return self._verify(guesses, num_worth) if num_worth else self._plain_step()

    # --- a step -----------------------------------------------------------------------------------------------------

    def _plain_step(self) -> list[Any]:
        """What mlx-lm does: one token of each row."""
        started, was_known = perf_counter(), bool(self._known)
        uids, longest = list(self.uids), self._longest
        responses: list[Any] = super().next()
        if self._even == uids and not was_known:
            self.costs.of(len(uids)).note(1, longest, perf_counter() - started)
        self._known = {}
        self._even = [] if was_known else uids
        return responses

    def _verify(self, guesses: Sequence[Guess | None], num_worth: int) -> list[Any]:
        """Put the pending tokens and those that are drafted through the model; what is handed out for it."""
        started, longest = perf_counter(), self._longest
        drafts = [guess.tokens[:num_worth] if guess is not None else () for guess in guesses]
        width = 1 + max(len(draft) for draft in drafts)
        pending = [self._known[uid] for uid in self.uids]
        pairs = list(zip(pending, drafts, strict=True))
        inputs = [[token, *draft] + [token] * (width - 1 - len(draft)) for token, draft in pairs]
        logits = self.model(mx.array(inputs), cache=self.prompt_cache)
        self.costs.note_described(perf_counter() - started)
        drawn = self._drawn(logits, pending, drafts)
        seconds = perf_counter() - started  # with its draws, as a plain step has its own
        self.costs.of(len(self.uids)).note(width, longest, seconds)
        for leaf in self._leaves():
            leaf.cut([width - len(tokens) for tokens in drawn])
        self._judge(guesses, drafts, drawn, seconds)
        handed_out = [[token, *tokens[:-1]] for token, tokens in zip(pending, drawn, strict=True)]
        newest = [tokens[-1] for tokens in drawn]
        self._next_tokens = mx.array(newest, dtype=mx.uint32)
        self._next_logprobs = [mx.zeros(0) for _ in newest]  # nobody asks here: `LogprobReader` has a row's own
        self._known, self._even = dict(zip(self.uids, newest, strict=True)), []
        return self._responses(handed_out)

    def _drawn(self, logits: mx.array, pending: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What each row draws by logits (rows, tokens, vocabulary) at each place, for as long as that was drafted, and
        the token that is drawn instead, or behind all of it."""
        taken = [mx.array([token], dtype=mx.uint32) for token in pending]
        found = list[mx.array]()
        for place, draft in enumerate(drafts):
            own = logits[place, : 1 + len(draft)]
            found.append(own if self._draws_alone(place) else self._draw(place, taken[place], own))
        mx.eval(found)
        drawn = list[list[int]]()
        for place, draft in enumerate(drafts):
            if self._draws_alone(place):
                draw_next, has_failed = partial(self._draw, place), partial(self._has_failed, place)
                drawn.append(drawn_in_order(draw_next, taken[place], draft, found[place], has_failed))
            else:
                drawn.append(right_of(found[place].tolist(), draft))  # type: ignore[arg-type]
        return drawn

    def _draw(self, place: int, taken: mx.array, logits: mx.array) -> mx.array:
        context, processors, sampler = self._token_context[place], self.logits_processors[place], self.samplers[place]
        return draw(taken, logits, context, processors, sampler)

    def _draws_alone(self, place: int) -> bool:
        """Whether a row has to draw one token after the other: it has processors, or a sampler of its own."""
        is_private = self.rows[self.uids[place]].request.sampling.seed is not None
        return is_private or bool(self.logits_processors[place])

    def _has_failed(self, place: int) -> bool:
        return self.rows[self.uids[place]].failure is not None

    def _judge(
        self,
        guesses: Sequence[Guess | None],
        drafts: Sequence[Sequence[int]],
        drawn: Sequence[Sequence[int]],
        seconds: float,
    ) -> None:
        plain_seconds = self.costs.of(len(self.uids)).seconds(1, self._longest) or 0.0
        for uid, guess, draft, tokens in zip(self.uids, guesses, drafts, drawn, strict=True):
            if (drafts_of := self.rows[uid].drafts) is not None:
                drafts_of.seconds_saved += len(tokens) * plain_seconds - seconds
            if guess is not None:
                guess.judge(len(draft), len(tokens) - 1)

    def _responses(self, handed_out: Sequence[Sequence[int]]) -> list[Any]:
        """A response for each token, as mlx-lm has them; with its last one a row leaves."""
        keep, responses = list[int](), list[Any]()
        for place, tokens in enumerate(handed_out):
            self.tokens[place].extend(tokens)
            finish_reason = None
            for token in tokens:
                self._num_tokens[place] += 1
                is_last = self._num_tokens[place] >= self.max_tokens[place]
                is_stop = self._matchers[place].advance(token)
                finish_reason = "stop" if is_stop else "length" if is_last else None
                left = (self.extract_cache(place), self.tokens[place]) if finish_reason is not None else (None, None)
                told = self.uids[place], token, self._next_logprobs[place], finish_reason
                responses.append(self.Response(*told, *left))
            if finish_reason is None:
                keep.append(place)
        if len(keep) < len(self.uids):
            self.filter(keep)
        return responses

    # --- drafts -----------------------------------------------------------------------------------------------------

    def _worth_trying(self, num_room_tokens: int) -> tuple[list[Guess | None], int]:
        """What may follow each row's pending token, and how many tokens of it are worth a pass; 0 where a plain step is
        as good. Reads the pending tokens where it has to."""
        needs_all = not self.costs.may_leave_one_out(len(self.uids), self._longest)
        guesses: list[Guess | None] = [None] * len(self.uids)
        places = sorted(range(len(self.uids)), key=lambda place: self.uids[place] != self._without)
        for place in places:
            guesses[place] = self._guess(place, num_room_tokens)
            if needs_all and guesses[place] is None:
                self._without = self.uids[place]
                return [], 0  # whatever may follow the others: they are not asked
        if not any(guesses):
            return guesses, 0
        is_read = [uid in self._known for uid in self.uids]
        if not all(is_read):
            if not self.costs.is_worth_reading(_hopes(guesses, is_read), self._longest):
                return guesses, 0
            self._known = dict(zip(self.uids, self._next_tokens.tolist(), strict=True))
            guesses = [
                guesses[place] if is_read[place] else self._confirmed(place, guesses[place], num_room_tokens)
                for place in range(len(guesses))
            ]
        num_worth = self.costs.num_worth(_hopes(guesses, [True] * len(guesses)), self._longest)
        if not num_worth:
            for guess in guesses:
                if guess is not None:
                    guess.judge(0, 0)
        return guesses, num_worth

    def _guess(self, place: int, num_room_tokens: int) -> Guess | None:
        """What may follow a row's pending token, which may have been read; None where nothing is likely."""
        uid = self.uids[place]
        row, pending = self.rows[uid], self._known.get(uid)
        drafts, most = row.drafts, min(num_room_tokens, self._most_tokens(place))
        if drafts is None or not self._may_draft(uid) or most < 1 or pending in row.request.stop_tokens:
            return None

        def ask() -> Draft | None:
            drafts.follow(self.tokens[place], pending)
            return drafts.propose(pending, most + (pending is None), is_shared=True)

        num_given = int(pending is None)
        draft = guarded(row, ask, lambda: None)()  # its grammar is asked too
        return Guess(drafts, draft, num_given) if draft is not None and len(draft.tokens) > num_given else None

    def _confirmed(self, place: int, guess: Guess | None, num_room_tokens: int) -> Guess | None:
        """The guess of a row whose pending token has been read since; another one where it is not what was guessed."""
        if guess is not None and guess.draft.tokens[0] == self._known[self.uids[place]]:
            return guess
        if guess is not None:
            guess.drafts.judge(guess.draft, 1, 0, num_given=1)
        return self._guess(place, num_room_tokens)

    # --- what may be ------------------------------------------------------------------------------------------------

    def _make_room(self) -> int:
        """Let the buffers grow where they have no room for the pending tokens; how many more have room then."""
        leaves = self._leaves()
        if any(leaf.num_slots <= leaf.size() for leaf in leaves):
            for leaf in leaves:
                leaf.align()
        return min((leaf.num_slots - leaf.size() - 1 for leaf in leaves), default=0)

    def _may_draft(self, uid: int) -> bool:
        drafts = self.rows[uid].drafts
        return drafts is not None and not drafts.is_given_up

    def _most_tokens(self, place: int) -> int:
        """How many tokens of a row may be drafted: no more than the answer may have and than go through the model in
        one pass, and none beyond where the form of the KV changes."""
        widest = self.costs.of(len(self.uids)).max_width
        most = min(widest, self.max_tokens[place] - self._num_tokens[place]) - 1
        num_used = len(self.tokens[place]) + 1
        return min(most, self.stop_at - num_used) if self.stop_at is not None and num_used <= self.stop_at else most

    def _leaves(self) -> list[RightAligned]:
        """The caches that hold tokens; one that no pass writes has no room and needs none."""
        aligned = (leaf for leaf in flat_caches(self.prompt_cache) if isinstance(leaf, RightAligned))
        return [leaf for leaf in aligned if not leaf.empty()]

    @property
    def _longest(self) -> int:
        return max(map(len, self.tokens))


def _hopes(guesses: Sequence[Guess | None], is_read: Sequence[bool]) -> list[Hope]:
    return [
        guess.hope(is_read=read) if guess is not None else Hope() for guess, read in zip(guesses, is_read, strict=True)
    ]
