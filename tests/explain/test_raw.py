"""Why a raw prompt reused what it did: each cause from a pair of prompts. Here a token is a character."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvserve.core import RequestId, Reuse
from kvserve.explain.causes import Cause
from kvserve.explain.raw import RawAsked, explain_raw
from kvserve.explain.raw_prompts import RawRecord
from kvserve.sessions.seen import pack_ids

TEXT = "".join(f"Line {number} of a long text. " for number in range(20))
ANSWER = "".join(f"What was said, part {number}. " for number in range(5))
LENGTH = len(TEXT)
BEFORE = RawRecord(
    request_id=RequestId("one"),
    owner="",
    text=TEXT + ANSWER,
    num_prompt_characters=LENGTH,
    packed_ids=pack_ids(map(ord, TEXT + ANSWER)),
    num_prompt_tokens=LENGTH,
)


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def asked(text: str, ids: Sequence[int] | None = None) -> RawAsked:
    ids = tuple(map(ord, text)) if ids is None else ids
    return RawAsked(RequestId("two"), text, ids, pack_ids(ids), decode)


def known(num_cached: int) -> Reuse:
    """All that was reused was stored, and no more."""
    return Reuse("ram" if num_cached else "nothing", num_cached)


@pytest.mark.parametrize(
    ("text", "num_cached", "cause", "char"),
    [
        (TEXT, LENGTH - 1, "nothing lost", None),
        (TEXT[:300], 299, "nothing lost", None),
        (TEXT + ANSWER + "Go on.", len(TEXT + ANSWER), "nothing lost", None),
        (TEXT + ANSWER + "Go on.", 100, "evicted", None),
        (TEXT.replace("Line 3", "Lime 3"), TEXT.index("Line 3") + 2, "prompt changed", TEXT.index("Line 3") + 2),
        ("Today. " + TEXT, 0, "prompt changed", 0),
        (TEXT.replace("Line 3", "Lime 3") + ANSWER + "Go on.", 80, "prompt changed", TEXT.index("Line 3") + 2),
        (TEXT + "W" + ANSWER + "Go on.", LENGTH + 1, "prompt changed", LENGTH + 1),
        (TEXT[:-30] + "Another question. " * 9, LENGTH - 30, "new prompt", None),
        (TEXT[:-30] + "Another question.", LENGTH - 30, "nothing lost", None),
        (TEXT.replace("Line 3", "Lime 3")[:-70] + "An end. " * 40, 80, "prompt changed", TEXT.index("Line 3") + 2),
        ("Something else altogether. " * 20, 0, "new prompt", None),
        (TEXT.replace("Line 15", "Lime 15"), 100, "evicted", None),
    ],
)
def test_the_cause_and_its_character(text: str, num_cached: int, cause: Cause, char: int | None) -> None:
    """A text that goes on lost nothing; one whose end was read again lost it to the first character that differs."""
    told = explain_raw(asked(text), BEFORE, num_cached, reuse=known(num_cached))
    assert told.cause == cause
    place = told.first_difference
    assert (place.char if place is not None else None) == char
    if place is not None:
        assert (place.message_index, place.role) == (None, "prompt") and place.before != place.after
        assert len(place.before) <= 80 and len(place.after) <= 80


def test_equal_text_in_other_tokens_is_named() -> None:
    """The place is the character where the tokens part, not one where the text does."""
    text = TEXT + ANSWER + "Go on."
    pairs = [0x10FF00 + n for n in range(len(text[200:]) // 2)]

    def decode_pairs(ids: Sequence[int]) -> str:
        return "".join("xx" if token >= 0x10FF00 else chr(token) for token in ids)

    now = replace(asked(text, (*map(ord, text[:200]), *pairs)), decode=decode_pairs)
    told = explain_raw(now, BEFORE, 200, reuse=known(200))
    assert (told.cause, told.num_shared_tokens) == ("tokenised differently", 200)
    assert told.first_difference is not None and told.first_difference.char in (200, 201)
    assert told.first_difference.before == told.first_difference.after


def test_a_client_that_left_is_the_cause() -> None:
    """What it had computed is reused; if that is gone too, it was evicted."""
    part = replace(BEFORE, text=TEXT, packed_ids=pack_ids(map(ord, TEXT)), num_computed_tokens=200)
    assert explain_raw(asked(TEXT), part, 200, reuse=known(200)).cause == "aborted"
    assert explain_raw(asked(TEXT), part, LENGTH - 1, reuse=known(LENGTH - 1)).cause == "nothing lost"
    assert explain_raw(asked(TEXT), part, 0, reuse=known(0)).cause == "evicted"
    more = asked(TEXT + "And all of that was computed for somebody else. " * 3)
    assert explain_raw(more, part, LENGTH, reuse=known(LENGTH)).cause == "nothing lost"


def test_what_this_model_cannot_keep_and_a_missing_checkpoint() -> None:
    """Told apart from what has left: it is stored, or never was. Between two checkpoints nothing is missing."""
    assert explain_raw(asked(TEXT), BEFORE, 0, reuse=known(0), can_keep=False).cause == "not kept"
    missed = Reuse("nothing", LENGTH, is_trim_miss=True)
    assert explain_raw(asked(TEXT), BEFORE, 0, reuse=missed).cause == "no checkpoint"
    assert explain_raw(asked(TEXT + "Another question. " * 9), BEFORE, 0, reuse=missed).cause == "no checkpoint"
    assert explain_raw(
        asked(TEXT + ANSWER + "!"), BEFORE, 0, reuse=replace(missed, num_matched_tokens=10**4)
    ).cause == ("no checkpoint")
    assert explain_raw(asked(TEXT[:-30] + "Another."), BEFORE, 0, reuse=missed).cause == "new prompt"
    again = asked(TEXT + ANSWER)  # its last message is computed again, as it is meant to be
    assert explain_raw(again, BEFORE, 300, reuse=Reuse("ram", len(again.ids))).cause == "nothing lost"


def test_a_phrase_that_stands_in_the_new_prompt_is_no_change() -> None:
    """What is shorter than a sample says nothing, wherever it stands again."""
    phrase = replace(BEFORE, text="What is it?", packed_ids=pack_ids(map(ord, "What is it?")))
    assert explain_raw(asked("A lake. What is it? " * 9), phrase, 0, reuse=known(0)).cause == "new prompt"


def test_nothing_to_compare_with() -> None:
    """A first prompt is new, unless its KV is there all the same: from a disk, or longer than its record."""
    first = explain_raw(asked(TEXT), None, 0, reuse=known(0))
    assert (first.cause, first.before, first.source) == ("new prompt", None, "nothing")
    assert explain_raw(asked(TEXT), None, 100, reuse=known(100)).cause == "new prompt"
    assert explain_raw(asked(TEXT), None, LENGTH - 1, reuse=Reuse("disk", LENGTH)).cause == "nothing lost"
    other = replace(BEFORE, text="Other.", packed_ids=pack_ids(map(ord, "Other.")))
    assert explain_raw(asked(TEXT), other, LENGTH - 1, reuse=known(LENGTH - 1)).cause == "nothing lost"
