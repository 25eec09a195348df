"""What may be the next tokens of an answer before the model has drawn them (speculative decoding), and what became of
it. Whoever drafts knows tokens only; the model draws every token itself, so a draft changes how fast an answer comes
and never what it says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

DraftSource = Literal["prediction", "conversation", "records", "grammar", "draft model"]
"""`prediction`: the client's own; `conversation`: what the prompt and the answer so far say; `records`: what else the
same principal's models read and wrote."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next; `chances[i]` is how likely `tokens[i]` is, where all before it were right."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    source: DraftSource


class Drafter(Protocol):
    """Drafts for one answer. It is made on any thread and then belongs to the engine's; its methods neither block nor
    raise."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Take these in as the answer's next tokens."""

    def propose(self, max_num_tokens: int) -> Draft | None:
        """What may follow the tokens so far, at most so many; None where nothing is known that is likely enough."""

    def judge(self, draft: Draft, num_tried: int, num_accepted: int) -> None:
        """Hear that the first `num_tried` tokens of a draft went through the model, which drew `num_accepted` of them
        itself."""


@runtime_checkable
class CostlyDrafter(Drafter, Protocol):
    """One that may compute for its drafts, on the device that the model's passes wait for: a step that rows share does
    not wait for it."""

    @property
    def wants_pending(self) -> bool:
        """Whether it would compute a draft now. It does that behind the model's pass, so that it costs nothing to read
        first what that has drawn, and the draft begins behind it."""

    def peek(self, max_num_tokens: int) -> Draft | None:
        """What costs nothing and is so likely that nothing is to be computed; None where it is to be asked."""

    def note_step(self, seconds: float) -> None:
        """Hear what a plain step takes, with nothing drafted."""

    def propose_free(self, max_num_tokens: int) -> Draft | None:
        """The same as `propose`, by what costs nothing alone; what computes hears that this step is none of its own."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens of one source that went through the model as a draft, and those of them that it drew itself."""

    num_tokens: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Drafting:
    """What drafts did for one answer: `num_steps` passes of the model gave its tokens. `seconds_saved` is measured:
    what its tokens would have taken one by one, less what they took. `failure`: what its drafter raised, from when on
    nothing was drafted; empty where it went well."""

    by_source: Mapping[DraftSource, Drafted] = field(default_factory=dict)
    num_steps: int = 0
    seconds_saved: float = 0.0
    failure: str = ""

    @property
    def num_drafted_tokens(self) -> int:
        return sum(each.num_tokens for each in self.by_source.values())

    @property
    def num_accepted_tokens(self) -> int:
        return sum(each.num_accepted for each in self.by_source.values())
