"""Drafts for one row by the draft model, one question at a time, and drafts of several drafters as one.

    begins    what is known of the row's tokens is restored, from RAM or disk, as far as it has come
    catches up  what is missing is computed, a chunk a question, while the target goes on by itself
    drafts    token by token, as long as one more is likely enough to pay

A question never waits: where there is nothing to say yet, nothing is said. It belongs to the engine thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

import mlx.core as mx

from kvserve.core.drafting import Draft, Drafter
from kvserve.engine.admission import Budget
from kvserve.engine.borders import costs_no_row
from kvserve.engine.cache_records import CacheLease
from kvserve.engine.draft_costs import DraftCosts
from kvserve.engine.draft_row import DraftRow, Guess
from kvserve.engine.model import LoadedModel
from kvserve.engine.pinned import PinnedPrefix
from kvserve.engine.prefill import ALIGNMENT_TOKENS, ChunkLength, Prefill
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.rows import RequestHandle, Row, expected_tokens
from kvserve.engine.token_dispatcher import Delivery

CATCH_UP_TOKENS = 2 * ALIGNMENT_TOKENS
"""So few missing tokens go through the model with the last one, before a draft."""

FIRST_CHUNK_SECONDS = 0.05
"""The longest chunk before a step of the target was measured."""

FEW_TOKENS = 4
"""A first pass of so many is taken for one of a single token."""

LIKELY = 0.5
"""A draft that costs nothing and whose first token is so likely is taken as it is."""

TROUBLE = "The draft model failed on a row, which goes on without it"


@dataclass(slots=True, eq=False)
class DraftSetting:
    """What the drafters of one draft model share. `num_vocab_tokens` are the target's. `has_room` says whether a row of
    so many tokens may be held besides, `account` is called when what is held has changed. `num_cached_tokens` of what
    rows needed was there, `num_computed_tokens` were computed, but for drafted ones."""

    model: LoadedModel
    cache: PrefixCache
    budget: Budget
    costs: DraftCosts
    chunk_length: ChunkLength
    num_vocab_tokens: int
    report: Callable[[str], None]
    has_room: Callable[[int], bool]
    account: Callable[[], None]
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Claimed:
    """A draft, and how likely the model held each of its tokens."""

    draft: Draft
    probabilities: tuple[float, ...]


class ModelDrafter:
    """Drafts for one row of the target, whose tokens it hears through `follow`."""

    def __init__(self, setting: DraftSetting, row: Row, clock: Callable[[], float] = perf_counter) -> None:
        self._setting = setting
        self._row = row
        self._clock = clock
        request = replace(row.request, drafter=None, grammar=None, thinking_limit=None, images=())
        self._shadow = Row(RequestHandle(request, _to_nobody), _nothing, is_forgotten=row.is_forgotten)
        self._shadow.generated.extend(row.generated)
        self._pinned: PinnedPrefix | None = None
        self._lease: CacheLease | None = None
        self._drafts: DraftRow | None = None
        self._is_given_up = bool(request.prompt.images)  # it sees none
        self._num_known: int | None = None
        self._last: _Claimed | None = None
        self._asked_at: float | None = None
        self._work: Literal["none", "prompt", "draft"] = "none"
        self._num_followed = 0

    # --- what the verification asks -----------------------------------------------------------------------------------

    def follow(self, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self._num_followed += len(tokens)
        self._shadow.generated.extend(tokens)
        if self._drafts is not None:
            self._drafts.follow(list(tokens))

    @property
    def wants_pending(self) -> bool:
        """See `CostlyDrafter`."""
        drafts, costs = self._drafts, self._setting.costs
        is_there = drafts is not None and drafts.num_missing <= CATCH_UP_TOKENS
        return is_there and costs.step_seconds is not None and costs.is_worth_it and not costs.is_resting

    def propose(self, max_num_tokens: int) -> Draft | None:
        """See `Drafter`."""
        self._note_cycle()
        self._asked_at, self._num_followed, self._work, self._last = self._clock(), 0, "none", None
        draft, is_done = None, False
        if not self._is_given_up:
            with costs_no_row(self._setting.report, TROUBLE):
                draft, is_done = self._proposed(max_num_tokens), True
            if not is_done:
                self.give_up()
        if draft is None:
            self._setting.costs.note_unused()
        return draft

    def judge(self, draft: Draft, num_tried: int, num_accepted: int) -> None:
        """See `Drafter`."""
        last = self._last
        if last is not None and num_tried and draft.tokens == last.draft.tokens[: len(draft.tokens)]:
            num_judged = min(num_tried, num_accepted + 1)
            self._setting.costs.note_judged(sum(last.probabilities[:num_judged]), num_judged, num_accepted)

    def pass_over(self) -> None:
        """Hear that this step is another drafter's: its time says nothing of this one."""
        self._note_cycle()
        self._asked_at = None

    def leave_to_others(self) -> None:
        """Hear that other rows are in this step: what the last question led to took part of their time."""
        self._asked_at = None

    def note_step(self, seconds: float) -> None:
        """See `CostlyDrafter`."""
        self._setting.costs.note_step(seconds)

    def _note_cycle(self) -> None:
        """Learn from what came between the last question and this one, where that was about a draft: what it led to,
        which is a plain step where no token was likely enough, or nobody tried it, and nothing before that is over."""
        if self._asked_at is not None and self._work == "draft":
            self._setting.costs.note_outcome(self._clock() - self._asked_at, self._num_followed)

    # --- answering ----------------------------------------------------------------------------------------------------

    def _proposed(self, max_num_tokens: int) -> Draft | None:
        setting, costs = self._setting, self._setting.costs
        if max_num_tokens < 1 or costs.rests():
            return None
        if (drafts := self._drafts) is None and (drafts := self._begun()) is None:
            return None
        drafts.settle()
        if self._shadow.num_tokens + max_num_tokens >= setting.model.context_limit:
            return None
        if drafts.num_missing > CATCH_UP_TOKENS:
            if costs.earns_back(drafts.num_missing, self._num_left_tokens()):
                self._catch_up(drafts)
            return None
        return self._drafted(drafts, max_num_tokens)

    def _begun(self) -> DraftRow | None:
        """The row in the draft model's caches, once what is known of it has come."""
        shadow, cache = self._shadow, self._setting.cache
        if self._pinned is None:
            if shadow.num_tokens >= self._setting.model.context_limit:
                self._is_given_up = True
                return None
            if self._num_known is None:  # it costs a walk
                self._num_known = cache.kept_tokens(shadow.request.prompt, [shadow.request.partition])[1]
            num_missing = shadow.num_tokens - self._num_known
            may_begin = self._setting.costs.earns_back(num_missing, self._num_left_tokens())
            if not may_begin or not self._setting.has_room(expected_tokens(shadow)):
                return None
            self._pinned = cache.pin(shadow)
        if cache.is_restoring(self._pinned):
            return None
        return self._entered(self._pinned)

    def _entered(self, pinned: PinnedPrefix) -> DraftRow:
        setting, shadow = self._setting, self._shadow
        self._work = "prompt"
        setting.cache.make_room(setting.budget.peak_bytes(expected_tokens(shadow)))
        self._lease, caches, num_done = setting.cache.enter(shadow)
        setting.cache.let_go(pinned)
        self._pinned = None
        shadow.num_cached_tokens = num_done
        self._drafts = DraftRow(setting.model, Prefill(shadow, self._lease, caches, num_done), setting.num_vocab_tokens)
        setting.num_cached_tokens += num_done
        setting.account()
        return self._drafts

    def _catch_up(self, drafts: DraftRow) -> None:
        """Compute a chunk that takes no longer than a step of the target, and keep it where the row stops."""
        setting, prefill = self._setting, drafts.prefill
        self._work = "prompt"
        seconds = setting.costs.step_seconds or FIRST_CHUNK_SECONDS
        setting.num_computed_tokens += drafts.compute_chunk(setting.chunk_length, seconds)
        if (rate := setting.chunk_length.slowest_tokens_per_second) is not None:
            setting.costs.prefill_seconds = 1 / rate
            setting.cache.measured_prefill(rate)
        setting.cache.keep(prefill.cache_lease, prefill.caches, prefill.num_done)

    def _drafted(self, drafts: DraftRow, max_num_tokens: int) -> Draft | None:
        costs, reached = self._setting.costs, 1.0
        num_new = len(drafts.prefill.tokens) - drafts.prefill.num_done
        if not costs.is_worth_it:
            return None

        def goes_on(probability: float) -> bool:
            nonlocal reached
            reached *= costs.chance(probability)
            return costs.pays(reached)

        self._work = "draft"
        mx.synchronize()  # the target's own step is computed by now or soon, and is none of the draft's time
        started = self._clock()
        guesses = drafts.guesses(max_num_tokens, goes_on)
        self._setting.num_computed_tokens += num_new
        if num_new <= FEW_TOKENS:
            costs.note_pass((self._clock() - started) / min(max_num_tokens, 1 + len(guesses)))
        return self._claimed(guesses)

    def _claimed(self, guesses: Sequence[Guess]) -> Draft | None:
        if not guesses:
            self._setting.costs.note_nothing()
            return None
        tokens, probabilities = zip(*guesses, strict=True)
        draft = Draft(tokens, tuple(map(self._setting.costs.chance, probabilities)), "draft model")
        self._last = _Claimed(draft, probabilities)
        return draft

    def _num_left_tokens(self) -> int:
        num_generated, request = len(self._shadow.generated), self._shadow.request
        return self._setting.costs.num_left_tokens(num_generated, request.max_tokens)

    # --- the row's end ------------------------------------------------------------------------------------------------

    @property
    def row(self) -> Row:
        """The drafter's own row: the same tokens, in the draft model's cache."""
        return self._shadow

    @property
    def num_held_tokens(self) -> int:
        """Tokens that its caches have room for; 0 where it has none."""
        return max(expected_tokens(self._shadow), self._shadow.num_tokens) if self._drafts is not None else 0

    @property
    def num_missing_tokens(self) -> int:
        """Tokens whose KV the draft model does not have, of a row that has begun to be drafted for."""
        return self._drafts.num_missing if self._drafts is not None else 0

    def note_forgotten(self) -> None:
        """Take over whether the row's owner was forgotten meanwhile."""
        self._shadow.is_forgotten |= self._row.is_forgotten

    def put_down(self, *, keeps_answer: bool) -> None:
        """Keep what was computed of the row's own tokens, of the answer only where it is kept, and let go of all else.
        It begins anew with the next question. Idempotent."""
        self.note_forgotten()
        drafts, lease, cache = self._drafts, self._lease, self._setting.cache
        self._let_go_of_pinned()
        self._drafts = self._lease = self._last = self._asked_at = None
        if drafts is None or lease is None:
            return
        with costs_no_row(self._setting.report, TROUBLE):
            drafts.settle()
            prefill, own = drafts.prefill, self._row.tokens()
            # A token that was drawn, and then lost with its generator, is none of the row's.
            pairs = enumerate(zip(prefill.tokens, own, strict=False))
            num_own = next((place for place, (told, kept) in pairs if told != kept), len(own))
            if drafts.cut(num_own if keeps_answer else self._shadow.answer_start):
                cache.finish(lease, prefill.caches, prefill.tokens[: prefill.num_done], ())
        cache.leave(lease)

    def give_up(self) -> None:
        """Draft no more for this row; nothing of what it has computed since is kept."""
        lease, self._is_given_up = self._lease, True
        self._let_go_of_pinned()
        self._drafts = self._lease = self._last = None
        if lease is not None:
            self._setting.cache.leave(lease)
        self._setting.account()

    def _let_go_of_pinned(self) -> None:
        if self._pinned is not None:
            self._setting.cache.let_go(self._pinned)
            self._pinned = None


class ComposedDrafter:
    """Several drafters of one answer as one: what costs nothing is asked first, the draft model where that has nothing
    likely. `model` comes with the row, on the engine thread; heads of the target itself would be a third."""

    def __init__(self, free: Drafter) -> None:
        self._free = free
        self.model: ModelDrafter | None = None

    def follow(self, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self._free.follow(tokens)
        if self.model is not None:
            self.model.follow(tokens)

    def propose(self, max_num_tokens: int) -> Draft | None:
        """See `Drafter`."""
        draft, model = self._free.propose(max_num_tokens), self.model
        if model is None:
            return draft
        if _is_likely(draft):
            model.pass_over()
            return draft
        best = max(model.propose(max_num_tokens), draft, key=_expected_tokens)
        if best is not None and best is draft:
            model.pass_over()
        return best

    @property
    def wants_pending(self) -> bool:
        """See `CostlyDrafter`."""
        return self.model is not None and self.model.wants_pending

    def peek(self, max_num_tokens: int) -> Draft | None:
        """See `CostlyDrafter`."""
        draft = self._free.propose(max_num_tokens)
        if not _is_likely(draft):
            return None
        if self.model is not None:
            self.model.pass_over()
        return draft

    def note_step(self, seconds: float) -> None:
        """See `CostlyDrafter`."""
        if self.model is not None:
            self.model.note_step(seconds)

    def propose_free(self, max_num_tokens: int) -> Draft | None:
        """See `CostlyDrafter`."""
        if self.model is not None:
            self.model.leave_to_others()
        return self._free.propose(max_num_tokens)

    def judge(self, draft: Draft, num_tried: int, num_accepted: int) -> None:
        """See `Drafter`."""
        judged = self.model if draft.source == "draft model" else self._free
        if judged is not None:
            judged.judge(draft, num_tried, num_accepted)


def _is_likely(draft: Draft | None) -> bool:
    """Whether a draft that costs nothing is taken as it is."""
    return draft is not None and bool(draft.tokens) and draft.chances[0] >= LIKELY


def _expected_tokens(draft: Draft | None) -> float:
    """How many of its tokens are likely to be drawn."""
    reached, expected = 1.0, 0.0
    for chance in draft.chances if draft is not None else ():
        reached *= chance
        expected += reached
    return expected


def _to_nobody(deliver: Delivery, *, may_wait: bool) -> None:
    """The draft model's own row has no reader."""


def _nothing() -> None:
    """Its rows are not counted."""
