"""Where a prefill stops to store what it has: a pure plan from message boundaries. It knows offsets, not arrays.

system + tools | user | call | result | call | result | user | ... | newest message | generation tail
               ^      ^      ^        ^      ^        ^      ^     ^                ^
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvserve.cache.records import BoundaryKind
from kvserve.cache.token_run import image_around
from kvserve.core import ImageSpan, Role

NUM_NEWEST_MESSAGES = 10
MAX_STRIDE_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """A message of the rendered prompt ends before model token `offset`.

    `is_genuine_user`: a person's message, not a tool result or a reminder that has the user's role.
    """

    offset: int
    role: Role
    is_genuine_user: bool = False


@dataclass(frozen=True, slots=True)
class PromptOutline:
    """A prompt's length, where its messages end (ascending), where system and tools end, and its images."""

    num_tokens: int
    message_ends: tuple[MessageEnd, ...] = ()
    system_end: int | None = None
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """The prefill stops after `offset` tokens, and why."""

    offset: int
    kind: BoundaryKind


def _system(outline: PromptOutline) -> Iterator[int]:
    if outline.system_end is not None:
        yield outline.system_end


def _users(outline: PromptOutline) -> Iterator[int]:
    return (end.offset for end in outline.message_ends if end.is_genuine_user)


def _tail(outline: PromptOutline) -> Iterator[int]:
    """Before what makes the model answer. A raw prompt has no messages: the next one continues at its end."""
    if not outline.message_ends:
        yield outline.num_tokens - 1
    yield from (end.offset for end in outline.message_ends[-1:])


def _newest(outline: PromptOutline) -> Iterator[int]:
    return (end.offset for end in outline.message_ends[-NUM_NEWEST_MESSAGES:])


def _before_images(outline: PromptOutline) -> Iterator[int]:
    """Before the first image of each message: clients add and drop the images of one message together."""
    if not outline.images:
        return
    ends = [0, *(end.offset for end in outline.message_ends), outline.num_tokens]
    for start, end in pairwise(ends):
        first = next((span.start for span in outline.images if start <= span.start < end), None)
        if first is not None:
            yield first


RULES: tuple[tuple[BoundaryKind, Callable[[PromptOutline], Iterator[int]]], ...] = (
    ("system", _system),
    ("user", _users),
    ("tail", _tail),
    ("message", _newest),
    ("image", _before_images),
)
"""Where several rules give one offset, the first gives its kind."""

CUTTABLE_KINDS: frozenset[BoundaryKind] = frozenset({"system"})
"""Where every layer can be cut, any offset can be restored: only the end of system and tools is marked, which outlives
its branches. These rules do not need the ends of messages."""


def plan_stops(
    outline: PromptOutline,
    *,
    num_usable_tokens: int,
    num_matched_tokens: int,
    needs_checkpoints: bool,
    max_stride: int = MAX_STRIDE_TOKENS,
    cut_tokens: int = 1,
) -> tuple[Stop, ...]:
    """The ascending offsets in `(num_usable_tokens, outline.num_tokens - 1]` where a prefill that starts at
    `num_usable_tokens` stops, no two of them further apart than `max_stride`.

    `num_matched_tokens` is where this prompt parts from what is stored: other prompts will part there too. With
    `needs_checkpoints` a state is stored at each stop, else the stops only end segments. The last token is never
    prefilled. A stop stands at the last multiple of `cut_tokens` before the place that it is for; gaps may be wider by
    so much. Raises ValueError for a stride below 1.
    """
    if max_stride < 1:
        raise ValueError(f"A stride has at least one token, not {max_stride}.")
    start, last = num_usable_tokens, outline.num_tokens - 1
    stops: dict[int, BoundaryKind] = {}
    for kind, rule in RULES:
        if needs_checkpoints or kind in CUTTABLE_KINDS:
            for offset in rule(outline):
                stops.setdefault(last_cut(offset, cut_tokens), kind)
    if needs_checkpoints:
        stops.setdefault(last_cut(num_matched_tokens, cut_tokens), "divergence")
    kept = {offset: kind for offset, kind in stops.items() if start < offset <= last and _is_whole(outline, offset)}
    for place in _strides([start, *sorted(kept), max(last, start)], max_stride):
        offset = last_cut(place, cut_tokens)
        if offset > start and _is_whole(outline, offset):
            kept.setdefault(offset, "stride")
    return tuple(Stop(offset, kept[offset]) for offset in sorted(kept))


def last_cut(offset: int, cut_tokens: int) -> int:
    """The last place up to `offset` where a prefill is cut, of a model for which these have a place."""
    return offset - offset % cut_tokens


def _is_whole(outline: PromptOutline, offset: int) -> bool:
    """An image's tokens attend to each other in some families: a state in the middle of one is of no use."""
    return image_around(outline.images, offset) is None


def _strides(offsets: Sequence[int], max_stride: int) -> Iterator[int]:
    """Evenly spaced offsets inside the gaps that are too wide: the parts are more than half of `max_stride` long."""
    for start, end in pairwise(offsets):
        num_parts = -(-(end - start) // max_stride)
        yield from (start + (end - start) * part // num_parts for part in range(1, num_parts))
