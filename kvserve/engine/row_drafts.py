"""What may come next in one row's answer, and what became of it: its drafter and its grammar are asked, and what a pass
cannot use is left out before it. No arrays.

A draft begins behind the tokens that are known. The pending token, which the model has drawn and nobody has read, may
be the first of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvserve.core import CostlyDrafter, Draft, Drafted, Drafter, Drafting, DraftSource, GenerationRequest
from kvserve.engine.logits_processors import GrammarProcessor


@dataclass(slots=True, eq=False)
class RowDrafts:
    """Belongs to its row as long as that lives, whichever generator has it."""

    request: GenerationRequest
    drafter: Drafter
    grammar: GrammarProcessor | None = None
    num_followed: int = 0
    """Tokens of the answer that the drafter was told: one that was drawn and then lost with its generator too."""
    totals: dict[DraftSource, Drafted] | None = None
    seconds_saved: float = 0.0
    is_given_up: bool = False
    """Whether its drafter broke, or its generator while it had drafts, whoever was to blame: it goes on without."""
    failure: str = ""
    """What its drafter raised."""
    _costly: CostlyDrafter | None = field(init=False)
    """The drafter, where it may compute."""

    def __post_init__(self) -> None:
        self._costly = self.drafter if isinstance(self.drafter, CostlyDrafter) else None

    def follow(self, tokens: Sequence[int], pending: int | None = None) -> None:
        """Tell the drafter what is new of prompt and answer, and of the token behind them."""
        start = len(self.request.prompt) + self.num_followed
        num_tokens = len(tokens) + (pending is not None)
        if num_tokens > start:
            new = [*tokens[start:], *(() if pending is None else (pending,))]
            self._asked(lambda: self.drafter.follow(new))
            self.num_followed = num_tokens - len(self.request.prompt)

    def end(self, answer: Sequence[int]) -> None:
        """Tell the drafter what it has not heard of an answer that is over: nobody may have asked for drafts lately."""
        if not self.failure and len(answer) > self.num_followed:
            self._asked(lambda: self.drafter.follow(answer[self.num_followed :]))
            self.num_followed = len(answer)

    def propose(self, pending: int | None, max_num_tokens: int, *, is_shared: bool = False) -> Draft | None:
        """What may follow the tokens that the drafter was told, the last of which is the `pending` one where that is
        known; where it is not and is wanted (`wants_pending`), only what is likely enough without it. It ends with the
        first stop token, and before one that the grammar forbids. In a step that is shared with other rows nothing is
        computed for it: they would wait. Raises what the grammar raises."""
        if self.is_given_up:
            return None
        begun = () if pending is None else (pending,)
        if self.grammar is not None and (forced := self.grammar.forced(begun, max_num_tokens)):
            return self._to_stop(Draft(tuple(forced), (1.0,) * len(forced), "grammar"))
        draft = self._asked(lambda: self._chosen(pending, is_shared=is_shared)(max_num_tokens))
        if draft is None or not draft.tokens:
            return None
        if self.grammar is not None:
            draft = _first(draft, self.grammar.num_allowed((*begun, *draft.tokens)) - len(begun))
        return self._to_stop(_first(draft, max_num_tokens)) if draft.tokens else None

    def _chosen(self, pending: int | None, *, is_shared: bool) -> Callable[[int], Draft | None]:
        """How the drafter is asked."""
        costly = self._costly
        if costly is None:
            return self.drafter.propose
        if is_shared:
            return costly.propose_free
        return costly.peek if pending is None and costly.wants_pending else costly.propose

    @property
    def wants_pending(self) -> bool:
        """Whether more can be drafted once the pending token is read, which is waited for in any case."""
        return not self.is_given_up and self._costly is not None and self._costly.wants_pending

    def note_step(self, seconds: float) -> None:
        """Hear what a plain step takes."""
        if self._costly is not None:
            self._costly.note_step(seconds)

    def judge(self, draft: Draft, num_tried: int, num_accepted: int, *, num_given: int = 0) -> None:
        """Note what became of a draft. The first `num_given` of its tokens had been drawn before they were tried."""
        if draft.source != "grammar" and not self.is_given_up:
            self._asked(lambda: self.drafter.judge(draft, num_tried, num_accepted))
        if num_tried > num_given:
            totals = self.totals = self.totals if self.totals is not None else {}
            so_far = totals.get(draft.source, Drafted())
            num_tokens, num_right = num_tried - num_given, max(0, num_accepted - num_given)
            totals[draft.source] = Drafted(so_far.num_tokens + num_tokens, so_far.num_accepted + num_right)

    def drafting(self, num_generated_tokens: int) -> Drafting:
        """What drafts did for an answer of so many tokens."""
        found = Drafting(dict(self.totals or {}), seconds_saved=self.seconds_saved, failure=self.failure)
        return replace(found, num_steps=max(0, num_generated_tokens - found.num_accepted_tokens))

    def is_other_stop(self, token: int) -> bool:
        """Whether an answer ends with this token, and later prompts have another one behind it."""
        return token in self.request.stop_tokens and self.request.turn_end not in (None, token)

    def _asked[T](self, question: Callable[[], T]) -> T | None:
        """What the drafter says; where it breaks its row goes on without it, which is told at the answer's end."""
        try:
            return question()
        except Exception as error:  # noqa: BLE001 - an answer is as right without drafts: they must not be its end
            self.is_given_up, self.failure = True, f"{type(error).__name__}: {error}"
            return None

    def _to_stop(self, draft: Draft) -> Draft | None:
        """Up to the first stop token: what the model draws behind it is no part of the answer. One that later prompts
        do not have is left out too, as states would stand behind it."""
        for place, token in enumerate(draft.tokens):
            if token in self.request.stop_tokens:
                draft = _first(draft, place + (not self.is_other_stop(token)))
                break
        return draft if draft.tokens else None


def _first(draft: Draft, num_tokens: int) -> Draft:
    if num_tokens >= len(draft.tokens):
        return draft
    count = max(0, num_tokens)
    return Draft(draft.tokens[:count], draft.chances[:count], draft.source)
