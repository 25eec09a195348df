"""What the prefix cache reads off a row: its tokens, whose entry it becomes, where its messages end and where it stops.
No arrays."""

import hashlib
from collections.abc import Sequence
from itertools import pairwise

from kvserve.cache.checkpoints import MessageEnd, PromptOutline, Stop
from kvserve.cache.token_run import pack
from kvserve.core import MessageStart, TokenSequence
from kvserve.engine.rows import Row

ANSWER_ALLOWANCE_TOKENS = 2048
"""An answer's share in a row's bytes at admission. Agents ask for 32,000 tokens and use a few hundred of them, so
reserving the whole `max_tokens` would leave most of the memory idle."""


def owner_of(row: Row) -> str:
    """Whose entry a row becomes: a branch of its owner's begins with its own system prompt and first user message."""
    prompt, starts = row.request.prompt, row.request.message_starts
    ends = (following.offset for start, following in pairwise(starts) if start.is_user)
    beginning = hashlib.sha256(pack(prompt, 0, next(ends, len(prompt))).ids).hexdigest()
    return f"{row.request.owner}/{beginning[:16]}"


def user_of(row: Row) -> str:
    """By whose name it is noted what a row used; "" where that owner was forgotten."""
    return "" if row.is_forgotten else row.request.owner


def request_owner(entry_owner: str) -> str:
    """The `owner` of the requests whose entry this is."""
    return entry_owner.rpartition("/")[0]


def tokens_of(row: Row) -> TokenSequence:
    """All tokens of a row: a row that enters a second time has generated some already."""
    prompt = row.request.prompt
    return TokenSequence((*prompt.ids, *row.generated), prompt.images) if row.generated else prompt


def admitted_tokens(row: Row) -> int:
    """How many tokens a row is admitted with, and has room for: its prompt and the usual share of an answer."""
    return len(row.request.prompt) + min(row.request.max_tokens, ANSWER_ALLOWANCE_TOKENS)


def expected_tokens(row: Row) -> int:
    """The same, or what it has already where that is more: a row that enters again has generated some."""
    return max(admitted_tokens(row), row.num_tokens + 1)


def outline(tokens: TokenSequence, starts: Sequence[MessageStart], *, needs_checkpoints: bool) -> PromptOutline:
    """What the plan needs to know of a prompt. A message ends where the next one begins; without checkpoints no stop
    depends on it, and a long history's ends are not put together."""
    ends = tuple(
        MessageEnd(following.offset, "user" if start.is_user else "assistant", start.is_user)
        for start, following in pairwise(starts if needs_checkpoints else ())
    )
    first_user = next((start.offset for start in starts if start.is_user), 0)
    is_led = bool(starts) and first_user > starts[0].offset
    return PromptOutline(len(tokens), ends, first_user if is_led else None, tokens.images)


def with_stop(stops: tuple[Stop, ...], packed_from: int | None, first: int, last: int) -> tuple[Stop, ...]:
    """The stops of a prefill from `first` to `last`, and the one where its KV is converted: no segment has both
    forms."""
    if packed_from is None or not first < packed_from <= last or any(stop.offset == packed_from for stop in stops):
        return stops
    return tuple(sorted((*stops, Stop(packed_from, "stride")), key=lambda stop: stop.offset))
