"""Why a raw prompt reused what it did: it is compared, as one text, with the raw prompt that begins most like it.

It knows texts and tokens, no messages; which cause its facts are `causes.py` says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvserve.core import RequestId, Reuse
from kvserve.explain.difference import Decode, Difference, common_length, excerpt
from kvserve.explain.explanation import Explanation, explained
from kvserve.explain.facts import TOLERANCE_TOKENS, PromptChanges, ReuseFacts, no_model
from kvserve.explain.raw_prompts import RawRecord
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
    asked: RawAsked,
    before: RawRecord | None,
    num_cached_tokens: int,
    *,
    reuse: Reuse,
    can_keep: bool = True,
    other_model: Callable[[], str | None] = no_model,
) -> Explanation:
    """Compare a raw prompt with the one before it (None: none is remembered). `can_keep`: this model's KV can be.
    `other_model` names another model that has read the prompt or its beginning."""
    num_usable = len(asked.ids) - 1
    facts = ReuseFacts(
        request_id=asked.request_id,
        num_prompt_tokens=len(asked.ids),
        num_cached_tokens=num_cached_tokens,
        reuse=reuse,
        can_keep=can_keep,
        is_raw=True,
        num_history_tokens=num_usable,
        find_other_model=other_model,
        # also where the record is forgotten, or the disk outlived it
        is_reused=num_usable - num_cached_tokens <= TOLERANCE_TOKENS < num_cached_tokens,
    )
    return explained(facts if before is None else _with_record(facts, asked, before))


def _with_record(facts: ReuseFacts, asked: RawAsked, before: RawRecord) -> ReuseFacts:
    """The facts beside the prompt before: what of it, and of its answer, was there to be reused."""
    last, num_cached_tokens = len(asked.ids) - 1, facts.num_cached_tokens
    shared = packed_common_length(before.packed_ids, asked.packed_ids)
    computed = shared if before.num_computed_tokens is None else min(shared, before.num_computed_tokens)
    has_left = min(computed, last) - facts.reuse.num_matched_tokens > TOLERANCE_TOKENS
    # not where prompts part within: states are far apart there
    is_at_a_state = shared >= min(before.num_prompt_tokens, last)
    char = common_length(before.text, asked.text)
    goes_on = char == min(len(before.text), len(asked.text))
    return replace(
        facts,
        before=before,
        num_shared_tokens=shared,
        num_missing_tokens=max(0, min(computed, last) - num_cached_tokens),
        has_left=has_left,
        lacks_checkpoint=facts.reuse.is_trim_miss and is_at_a_state and not has_left,
        was_aborted=min(shared, last) - max(computed, num_cached_tokens) > TOLERANCE_TOKENS,
        is_reused=facts.is_reused or (goes_on and shared >= min(len(before.ids), last) - TOLERANCE_TOKENS),
        find_changes=partial(_changes, asked, before, shared, char),
    )


def _changes(asked: RawAsked, before: RawRecord, num_shared: int, char: int) -> PromptChanges:
    """What differs: the tokens of one text, or the text from this character on."""
    was, now = before.text, asked.text
    if char == min(len(was), len(now)):
        char = max(0, len(now) - len(asked.decode(asked.ids[num_shared:])))
        return PromptChanges(is_tokenised_differently=True, place=partial(_place, was, now, char))
    return PromptChanges(is_read_again=_is_read_again(was, now, char), place=partial(_place, was, now, char))


def _place(was: str, now: str, char: int) -> Difference:
    return Difference(None, "prompt", char, excerpt(was, char), excerpt(now, char))


def _is_read_again(was: str, now: str, char: int) -> bool:
    """Whether text that stands behind the character where they part stands there in both."""
    ends, rest = len(was) - SAMPLE_CHARACTERS + 1, now[char:]
    step = max(1, (ends - char) // MAX_SAMPLES)
    return any(was[start : start + SAMPLE_CHARACTERS] in rest for start in range(char, ends, step))
