"""Who goes, who enters, and what is computed next: one function from facts to a plan, and its rules. Pure: facts of
rows, whatever these are to others; no arrays, no clock.

Places: the highest response ratio first, as long as no row is overtaken too often. Prompts: in the order in which a
machine that divides itself equally would end them, so that none is later than there; one that others wait for is as
urgent as the most urgent of them, up to where they part. Streams: their share of the time that prompts take.
"""

from collections.abc import Hashable, Sequence
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

    `num_left_tokens` are its own to compute, after the `num_computed_tokens` that were; before it may begin, `awaits`
    computes `num_awaited_tokens` that both have. `is_held`: something else keeps it, such as the disk.
    """

    row: R
    finish: float
    num_left_tokens: int
    awaits: R | None = None
    num_awaited_tokens: int = 0
    is_held: bool = False
    num_computed_tokens: int = 0


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
    prefill; None before anything was measured. `stream_share`: of the time beside prompts, below 1."""

    fair_now: float = 0.0
    owed_seconds: float = 0.0
    slice_seconds: float = 0.0
    tokens_per_second: float | None = None
    stream_share: float = 0.0


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


CHUNK_SECONDS_BESIDE_STREAMS = 0.25
"""The longest that a stream waits for a prompt. How much of the time prompts get is not decided by it."""

SHORTEST_CHUNK_SECONDS = CHUNK_SECONDS_BESIDE_STREAMS / 4
"""A shorter one is hardly worth a pass: streams step before the next."""

LONG_PROMPT_SECONDS = 1.0
"""A prompt that was computed for so long pays streams for its last chunk beforehand: behind it they are alone, and what
they were owed would never come. A shorter one, a warm turn say, would have its first token twice as late."""

CHUNK_SECONDS_ALONE = 1.0
PREFILL_SLICE_SECONDS = CHUNK_SECONDS_ALONE + CHUNK_SECONDS_BESIDE_STREAMS
"""How long prompts that come together may keep the first of them from its first token: a step with one row costs about
as much as one with all of them. A chunk that no other prompt shares may take no longer."""

LENIENT_TOKENS = 64
"""As much of an equal share more: of short prompts that come one behind the other the first is through at once."""

MAX_OVERTAKEN = 8
"""So many rows that came later may enter before one; then none does until it has a place."""

NUM_CANDIDATES = 8
"""Of so many that wait it is asked whether there is room for them."""

LEAST_WORK_TOKENS = 256
"""What a row costs besides its prompt, for the response ratio: else a row without work left would pass all others."""


def plan[R: Hashable](facts: Facts[R]) -> Plan[R]:
    """What is done next. The rows stay what they are to the caller."""
    ended = tuple(ending for life in facts.lives if (ending := _ending(life, facts.watchdog_seconds)) is not None)
    return Plan(ended, None if ended else _admitted(facts.waiting_prompts), _work(facts))


def candidates[R: Hashable](waiting_prompts: Sequence[WaitingPrompt[R]]) -> list[WaitingPrompt[R]]:
    """Those that are considered for a place, the first to enter first. `fits` is not looked at."""
    return sorted(waiting_prompts, key=_rank)[:NUM_CANDIDATES]


def urgency[R: Hashable](prompts: Sequence[PromptFacts[R]]) -> dict[R, float]:
    """When each prompt, or the most urgent of those that wait for it, is through with equal shares."""
    urgent = {prompt.row: prompt.finish for prompt in prompts}
    for prompt in prompts:
        if prompt.awaits in urgent:
            urgent[prompt.awaits] = min(urgent[prompt.awaits], prompt.finish)
    return urgent


def first_token_seconds[R: Hashable](facts: Facts[R]) -> dict[R, float]:
    """How long each prompt takes to its first token if no other row comes; nothing where no rate is known."""
    if not (rate := facts.machine.tokens_per_second):
        return {}
    if facts.streams:
        rate *= 1 - facts.machine.stream_share
    num_tokens, found, done_for_others = 0, dict[R, float](), dict[R, int]()
    for prompt in sorted(facts.prompts, key=lambda prompt: prompt.finish):
        if prompt.awaits is not None:
            others = done_for_others.get(prompt.awaits, 0)
            num_tokens += max(0, prompt.num_awaited_tokens - others)
            done_for_others[prompt.awaits] = max(others, prompt.num_awaited_tokens)
        num_tokens += max(0, prompt.num_left_tokens - done_for_others.get(prompt.row, 0))
        found[prompt.row] = num_tokens / rate
    return found


def _ending[R: Hashable](life: Life[R], watchdog_seconds: float) -> Ending[R] | None:
    if life.is_cancelled:
        return Ending(life.row, "cancelled")
    if not watchdog_seconds:
        return None
    if life.decoding_seconds > watchdog_seconds:
        return Ending(life.row, "watchdog")
    if life.idle_seconds > watchdog_seconds and not life.is_passed:
        return Ending(life.row, "stuck")
    return None


def _rank[R: Hashable](waiting_prompt: WaitingPrompt[R]) -> tuple[bool, bool, float]:
    """Rows that had a place come first, then those that no other may pass any more, then the highest response ratio."""
    is_next = waiting_prompt.is_back or waiting_prompt.num_overtaken >= MAX_OVERTAKEN
    ratio = waiting_prompt.waited_seconds / (waiting_prompt.num_left_tokens + LEAST_WORK_TOKENS)
    return not waiting_prompt.is_back, not is_next, -waiting_prompt.waited_seconds if is_next else -ratio


def _admitted[R: Hashable](waiting_prompts: Sequence[WaitingPrompt[R]]) -> R | None:
    """The first that fits, but none behind one that may not be passed."""
    for waiting_prompt in candidates(waiting_prompts):
        if waiting_prompt.fits:
            return waiting_prompt.row
        if waiting_prompt.is_back or waiting_prompt.num_overtaken >= MAX_OVERTAKEN:
            return None
    return None


def _work[R: Hashable](facts: Facts[R]) -> PrefillChunk[R] | DecodeStep | Pause:
    prompt = _most_urgent(facts.prompts)
    if prompt is None:
        return DecodeStep(is_for_all=facts.machine.slice_seconds > 0) if facts.streams else Pause()
    if not prompt.num_left_tokens:
        return PrefillChunk(prompt.row, 0.0)
    if not facts.streams:
        return PrefillChunk(prompt.row, CHUNK_SECONDS_ALONE)
    if any(stream.has_begun for stream in facts.streams):
        return _beside_streams(facts, prompt)
    return _before_first_tokens(facts, prompt)


def _beside_streams[R: Hashable](facts: Facts[R], prompt: PromptFacts[R]) -> PrefillChunk[R] | DecodeStep:
    """A chunk when streams have had what they are owed; and what is left of its time, if that ends a prompt, so that
    short ones that come together enter together."""
    machine = facts.machine
    left_seconds = CHUNK_SECONDS_BESIDE_STREAMS - machine.slice_seconds
    last_share = _share_of_last_chunk(facts, prompt)
    if last_share and machine.owed_seconds + last_share > 0:
        return DecodeStep(is_for_all=machine.slice_seconds > 0)
    longest = max(left_seconds, -machine.owed_seconds)  # a long step was more than they were owed
    if machine.owed_seconds <= 0 and longest >= SHORTEST_CHUNK_SECONDS:
        return PrefillChunk(prompt.row, longest)
    if machine.slice_seconds > 0 and _ends_within(facts, prompt, left_seconds):
        return PrefillChunk(prompt.row, left_seconds)
    return DecodeStep(is_for_all=machine.slice_seconds > 0)


def _share_of_last_chunk[R: Hashable](facts: Facts[R], prompt: PromptFacts[R]) -> float:
    """Seconds that streams step for a long prompt's last chunk; 0 for another chunk or prompt."""
    rate, share = facts.machine.tokens_per_second, facts.machine.stream_share
    if rate is None or prompt.num_computed_tokens < rate * LONG_PROMPT_SECONDS:
        return 0.0
    if not _ends_within(facts, prompt, CHUNK_SECONDS_BESIDE_STREAMS):
        return 0.0
    return prompt.num_left_tokens / rate * share / (1 - share)


def _before_first_tokens[R: Hashable](facts: Facts[R], prompt: PromptFacts[R]) -> PrefillChunk[R] | DecodeStep:
    """No client reads yet: rows whose prompts are computed wait for others that end soon, as long as equal shares would
    not have ended them either."""
    left_seconds = PREFILL_SLICE_SECONDS - facts.machine.slice_seconds
    is_due = facts.machine.fair_now >= min(stream.finish for stream in facts.streams) + LENIENT_TOKENS
    if is_due or not _ends_within(facts, prompt, left_seconds):
        return DecodeStep(is_for_all=True)
    return PrefillChunk(prompt.row, min(left_seconds, CHUNK_SECONDS_ALONE))


def _most_urgent[R: Hashable](prompts: Sequence[PromptFacts[R]]) -> PromptFacts[R] | None:
    """Of those that can compute; first who has nothing left, and only enters."""
    urgent = urgency(prompts)
    ready = (prompt for prompt in prompts if prompt.awaits is None and not prompt.is_held)
    return min(ready, key=lambda prompt: (prompt.num_left_tokens > 0, urgent[prompt.row]), default=None)


def _ends_within[R: Hashable](facts: Facts[R], prompt: PromptFacts[R], seconds: float) -> bool:
    rate = facts.machine.tokens_per_second
    return rate is not None and prompt.num_left_tokens <= rate * seconds
