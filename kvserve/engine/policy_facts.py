"""What the policy is given and what it answers: plain facts of rows, whatever these are to others, and a plan of what
is done with them next. No arrays, no clock, no rules.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Life[R: Hashable]:
    """Whether a row continues. `decoding_seconds`: since its prompt was computed, without what it waited again.

    `idle_seconds`: since it, or the row that it waits for, computed anything, or the disk gave it something, without
    what streams had that they were owed; 0 for one that has no place yet.
    `is_passed`: others computed meanwhile that equal shares put before it.
    """

    row: R
    is_cancelled: bool = False
    decoding_seconds: float = 0.0
    idle_seconds: float = 0.0
    is_passed: bool = False


@dataclass(frozen=True, slots=True)
class WaitingPrompt[R: Hashable]:
    """A row that waits for a place. `num_left_tokens` of its prompt are not known; `fits`: there is room for it now.

    `num_overtaken`: how many rows that came later were let in before it. None passes one that `is_back`: it has had a
    place already.
    """

    row: R
    waited_seconds: float
    num_left_tokens: int
    fits: bool
    num_overtaken: int = 0
    is_back: bool = False


@dataclass(frozen=True, slots=True)
class PromptFacts[R: Hashable]:
    """A row whose prompt is not computed yet. `finish`: where the fair clock stands when equal shares end it.

    `num_left_tokens` are its own to compute; before it may begin, `awaits` computes `num_awaited_tokens` that both
    have. `is_held`: something else keeps it, such as the disk.
    """

    row: R
    finish: float
    num_left_tokens: int
    awaits: R | None = None
    num_awaited_tokens: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class Stream[R: Hashable]:
    """A row that decodes. `finish` as of its prompt; `has_begun`: its client has the first token."""

    row: R
    finish: float
    has_begun: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """What was computed so far. `fair_now`: where the fair clock stands. `owed_seconds`: so long streams are to step
    before a prompt continues. `slice_seconds`: how long prompts compute since the last step. `tokens_per_second`: of
    prefill; None before anything was measured."""

    fair_now: float = 0.0
    owed_seconds: float = 0.0
    slice_seconds: float = 0.0
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Facts[R: Hashable]:
    """All that a plan is made of. Both kinds of prompts are in the order in which they came."""

    lives: tuple[Life[R], ...] = ()
    waiting_prompts: tuple[WaitingPrompt[R], ...] = ()
    prompts: tuple[PromptFacts[R], ...] = ()
    streams: tuple[Stream[R], ...] = ()
    machine: Machine = Machine()
    watchdog_seconds: float = 0.0
    """0: no limit."""


type EndReason = Literal["cancelled", "watchdog", "stuck"]


@dataclass(frozen=True, slots=True)
class Ending[R: Hashable]:
    """A row that goes: its client left, it has decoded for as long as it may, or nothing was computed for it."""

    row: R
    reason: EndReason


@dataclass(frozen=True, slots=True)
class PrefillChunk[R: Hashable]:
    """Compute a chunk of this row's prompt, of about so many seconds at most."""

    row: R
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A token for every stream (`is_for_all`), or for those whose turn it is."""

    is_for_all: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing can be computed before something comes from elsewhere."""


@dataclass(frozen=True, slots=True)
class Plan[R: Hashable]:
    """What is done next: rows go, one enters, then one piece of work. A row that goes or enters changes the facts, so
    that the work is planned again."""

    ended: tuple[Ending[R], ...]
    admitted: R | None
    work: PrefillChunk[R] | DecodeStep | Pause
