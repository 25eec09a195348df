"""Why a raw prompt reused what it did: it is compared, as one text, with the raw prompt that begins most like it.

It knows texts and tokens, no messages; the causes are those of `explanation.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.core import RequestId, Reuse
from kvserve.sessions.difference import Difference, common_length, excerpt
from kvserve.sessions.explanation import TOLERANCE_TOKENS, Cause, Explanation, source_of
from kvserve.sessions.explanation_place import Decode
from kvserve.sessions.raw_prompts import RawRecord
from kvserve.sessions.seen import packed_common_length

SAMPLE_CHARACTERS = 64
MAX_SAMPLES = 32
"""If so many characters in a row stand behind a difference in both texts, they were read again because of it; fewer are
a phrase that many prompts have. So many places are looked at."""


@dataclass(frozen=True, slots=True)
class RawAsked:
    """A raw prompt: its text, its model tokens, the same ids packed (`pack_ids`), and what turns ids into text."""

    request_id: RequestId
    text: str
    ids: Sequence[int]
    packed_ids: bytes
    decode: Decode


def explain_raw(
    asked: RawAsked, before: RawRecord | None, num_cached_tokens: int, *, reuse: Reuse, can_keep: bool = True
) -> Explanation:
    """Compare a raw prompt with the one before it (None: none is remembered). `can_keep`: this model's KV can be."""
    num_shared = packed_common_length(before.packed_ids, asked.packed_ids) if before is not None else 0
    cause: Cause = "new prompt"
    difference: Difference | None = None
    if len(asked.ids) - 1 - num_cached_tokens <= TOLERANCE_TOKENS < num_cached_tokens:
        cause = "nothing lost"  # also where the record is forgotten, or the disk outlived it
    elif before is not None:
        gone = _gone(asked, before, num_shared, num_cached_tokens, reuse, can_keep=can_keep)
        cause, difference = (gone, None) if gone is not None else _parted(asked, before, num_shared)
    return Explanation(
        request_id=asked.request_id,
        num_prompt_tokens=len(asked.ids),
        num_cached_tokens=num_cached_tokens,
        num_shared_tokens=num_shared,
        source=source_of(before, num_cached_tokens, num_shared, reuse),
        reuse=reuse,
        cause=cause,
        rules=(),
        policies={},
        first_difference=difference,
        before=before.request_id if before is not None else None,
        is_rejection=False,
    )


def _gone(
    asked: RawAsked, before: RawRecord, num_shared: int, num_cached_tokens: int, reuse: Reuse, *, can_keep: bool
) -> Cause | None:
    """The cause where tokens that the model has read before, or would have, were not there to be reused."""
    last = len(asked.ids) - 1
    computed = num_shared if before.num_computed_tokens is None else min(num_shared, before.num_computed_tokens)
    if min(computed, last) - num_cached_tokens > TOLERANCE_TOKENS:
        if not can_keep:
            return "not kept"
        if min(computed, last) - reuse.num_matched_tokens > TOLERANCE_TOKENS:
            return "evicted"
        if reuse.is_trim_miss and num_shared >= min(before.num_prompt_tokens, last):
            return "no checkpoint"  # not where prompts part within: states are far apart there
    return "aborted" if min(num_shared, last) - max(computed, num_cached_tokens) > TOLERANCE_TOKENS else None


def _parted(asked: RawAsked, before: RawRecord, num_shared: int) -> tuple[Cause, Difference | None]:
    """The cause where what both begin with was there, and the place where they part."""
    was, now = before.text, asked.text
    char = common_length(was, now)
    if char == min(len(was), len(now)):
        if num_shared >= min(len(before.ids), len(asked.ids) - 1) - TOLERANCE_TOKENS:
            return "nothing lost", None
        char = max(0, len(now) - len(asked.decode(asked.ids[num_shared:])))
        cause: Cause = "tokenised differently"
    elif _is_read_again(was, now, char):
        cause = "prompt changed"
    else:
        return "new prompt", None
    return cause, Difference(None, "prompt", char, excerpt(was, char), excerpt(now, char))


def _is_read_again(was: str, now: str, char: int) -> bool:
    """Whether text that stands behind the character where they part stands there in both."""
    ends, rest = len(was) - SAMPLE_CHARACTERS + 1, now[char:]
    step = max(1, (ends - char) // MAX_SAMPLES)
    return any(was[start : start + SAMPLE_CHARACTERS] in rest for start in range(char, ends, step))
