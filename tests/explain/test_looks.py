"""What a value looks like that differs, and how a remedy names it."""

from dataclasses import replace

import pytest

from kvserve.core import RequestId, Reuse
from kvserve.explain.difference import Difference, common_length, excerpt
from kvserve.explain.explanation import Explanation
from kvserve.explain.looks import OTHER_ORDER, look_of
from kvserve.explain.words import remedy, summary

MISS = Explanation(
    *(RequestId("r1"), 100, 40, 40, "request r0", Reuse("ram", 40), "message changed", (), {}),
    *(Difference(0, "system", 53, "SECRET 1", "SECRET 2"), None, False),
)


@pytest.mark.parametrize(
    ("was", "now", "look"),
    [
        ("It is 14:58:01 here.", "It is 15:02:11 here.", "a time"),
        ("2026-11-27T14:58:01Z", "2026-11-27T14:58:09Z", "a time"),
        ("since 1795791481 s", "since 1795791492 s", "a time"),
        ("Today is 2026-11-27.", "Today is 2026-11-28.", "a date"),
        ("on Nov 27, 2026", "on Dec 1, 2026", "a date"),
        ("on Tuesday", "on Thursday", "a date"),
        ("id 9b2f6f0a-4b7e-4b0e-8b0a-0f3f1c2d4e5f.", "id 9b2f6f0a-4b7e-4b0e-8c0a-0f3f1c2d4e5f.", "an id"),
        ("call_a8f3kq09z ran", "call_a8f3kq17b ran", "an id"),
        ("cwd /home/me/one", "cwd /home/me/two", "a path"),
        ("7 files", "12 files", "a number"),
        ("Where is the drum?", "Where was the drum?", None),
        ("It is 14:58 here. Good.", "It is 14:58 here. Bad.", None),
        ("at 14:58", "at noon", None),
        ("It is 14:58. Good.", "It is 14:58! Good.", None),
        ("2026-11-27 is today", "2026-11-27, is today", None),
        ("ran call_a8f3kq09z well", "ran call_a8f3kq09z; well", None),
        ("in /home/me/one now", "in /home/me/one? now", None),
        ("7 files", "7; files", None),
        ("at 14:58 here", "at 14:58 15:00 here", None),
    ],
)
def test_a_value_is_known_by_its_form(was: str, now: str, look: str | None) -> None:
    """Where both prompts have one of that form at the very place; wherever the texts around it are cut."""
    char = common_length(was, now)
    assert look_of(Difference(0, "user", char, was, now)) == look
    whole = "Some words that stand before it. " + was, "Some words that stand before it. " + now
    char = common_length(*whole)
    assert look_of(Difference(0, "user", char, excerpt(whole[0], char), excerpt(whole[1], char))) == look
    assert look_of(None) is None


def test_the_remedy_names_the_place_and_what_it_looks_like() -> None:
    """Nothing of the text; what has no form that is known has the remedy of its cause."""
    told = remedy(replace(MISS, looks_like="a time")) or ""
    assert told.startswith("The system prompt has a time at character 53") and "SECRET" not in told
    assert summary(replace(MISS, looks_like="a time")).endswith("It looks like a time.")
    assert remedy(MISS) == "Append to the history instead of changing it."
    user = replace(MISS, looks_like="an id", first_difference=Difference(4, "tool", 7, "", ""))
    assert (remedy(user) or "").startswith("Message 4 (tool) has an id at character 7")
    moved = replace(MISS, looks_like="a date", cause="volatile value", rules=("date_line",))
    assert "CACHE_RULE_POLICIES" in (remedy(moved) or "")
    other = replace(MISS, cause="thinking dropped", looks_like="a number")
    assert "number" not in summary(other) + (remedy(other) or "")


def test_tools_in_another_order_are_named_so() -> None:
    """They have no first tool that differs."""
    tools = replace(MISS, cause="tools changed", looks_like=OTHER_ORDER, first_difference=None)
    assert summary(tools).endswith("They are the same tools in another order.")
    assert (remedy(tools) or "").startswith("Send the tools in one order")
