"""Every cause in sentences: none is without words, and what would have mended it is said where something would."""

from dataclasses import replace
from typing import get_args

import pytest

from kvserve.core import RequestId, Reuse
from kvserve.explain.causes import NO_MISS, ROW_OF, Cause
from kvserve.explain.difference import Difference
from kvserve.explain.explanation import Explanation
from kvserve.explain.words import clause, remedy, summary

CAUSES: tuple[Cause, ...] = get_args(Cause.__value__)
PLACE = Difference(3, "tool", 7, "SECRET before", "SECRET after")
TOLD = Explanation(
    request_id=RequestId("r"),
    num_prompt_tokens=10,
    num_cached_tokens=5,
    num_shared_tokens=5,
    source="request q",
    reuse=Reuse("ram", 5),
    cause="nothing lost",
    rules=("current_time",),
    policies={"current_time": "never"},
    first_difference=None,
    before=RequestId("q"),
    is_rejection=False,
    decided_by="A_SETTING",
)


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_has_its_words(cause: Cause) -> None:
    """Filled in, without the prompt's own text; a cause that lies in the prompt says where."""
    told = replace(TOLD, cause=cause, first_difference=PLACE if ROW_OF[cause].place is not None else None)
    sentences = f"{summary(told)} {remedy(told)} {clause(told)}"
    assert "{" not in sentences and "SECRET" not in sentences
    assert ("message 3" in sentences) == (ROW_OF[cause].place is not None)
    has_remedy = cause not in NO_MISS
    assert (remedy(told) is not None) == has_remedy == (clause(told) is not None)


def test_places_are_named_as_they_are_known() -> None:
    """A tool by its name, a message by its index; where a template joins messages, by neither."""
    tools = replace(TOLD, cause="tools changed", first_difference=Difference(None, "tools", 9, "a", "b", "look"))
    joined = replace(TOLD, cause="thinking switched", first_difference=Difference(None, "template", 9, "a", "b"))
    assert "tool look, character 9" in (clause(tools) or "")
    later = replace(TOLD, cause="tools changed", first_difference=Difference(4, "tool", 9, "a", "b", "look"))
    assert "tool look in message 4, character 9" in (clause(later) or "")
    assert "character 9 of a message" in summary(joined)
    raw = replace(TOLD, cause="prompt changed", first_difference=Difference(None, "prompt", 9, "a", "b"))
    assert "(character 9)" in (clause(raw) or "") and "from character 9 on;" in summary(raw)
