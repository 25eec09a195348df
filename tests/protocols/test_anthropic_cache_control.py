"""Cache marks: the last place counts, the longest time counts, wherever they stand."""

from typing import Any

import pytest

from kvserve.core import SessionHint
from kvserve.errors import BadRequest
from tests.protocols.anthropic_wire import parse

MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
TOOL = {"name": "look", "input_schema": {"type": "object"}}


def text(mark: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": "a", **({"cache_control": mark} if mark is not None else {})}


def talk(first: Any = None, result: Any = None, inner: Any = None, last: Any = None) -> list[Any]:
    """Three messages of the wire, five of ours behind the system's: user, assistant, two results, user."""
    called = [{"type": "tool_use", "id": name, "name": "look", "input": {}} for name in "cd"]
    answered = [
        {"type": "tool_result", "tool_use_id": "c", "content": [text(inner)]},
        {"type": "tool_result", "tool_use_id": "d", "content": "x", **({"cache_control": result} if result else {})},
    ]
    return [
        {"role": "user", "content": [text(first)]},
        {"role": "assistant", "content": called},
        {"role": "user", "content": [*answered, text(last)]},
    ]


@pytest.mark.parametrize(
    ("fields", "num_messages", "seconds"),
    [
        ({"messages": talk()}, None, None),
        ({"messages": talk(last=MARK)}, 6, 300),
        ({"messages": talk(result=MARK)}, 6, 300),
        ({"messages": talk(inner=HOUR)}, 6, 3600),
        ({"messages": talk(first=MARK)}, 2, 300),
        ({"messages": talk(first=HOUR, last=MARK)}, 6, 3600),
        ({"messages": talk(), "system": [text(MARK)]}, 1, 300),
        ({"messages": talk(), "tools": [{**TOOL, "cache_control": HOUR}]}, 1, 3600),
        ({"messages": talk(), "cache_control": MARK}, 6, 300),
        ({"messages": talk(), "system": [text({**MARK, "ttl": "5m", "scope": "global"})]}, 1, 300),
    ],
)
def test_marks(fields: dict[str, Any], num_messages: int | None, seconds: float | None) -> None:
    """Up to which message, and for how long; a lifetime of the request's own is another thing."""
    for ttl, expected in ((None, None), ("24h", 86_400), (0, 0)):
        session = parse(**{"system": "s", "ttl": ttl, **fields}).turn.session
        assert session == SessionHint(ttl_seconds=expected, num_marked_messages=num_messages, marked_seconds=seconds)


def test_a_mark_on_tools_alone_reaches_up_to_the_first_message() -> None:
    """Without a system text nothing of the conversation is marked."""
    session = parse(tools=[{**TOOL, "cache_control": MARK}]).turn.session
    assert session.num_marked_messages == 0


@pytest.mark.parametrize("mark", [5, "x", {}, {"type": "forever"}, {"type": "ephemeral", "ttl": []}])
def test_a_mistyped_mark_is_refused(mark: Any) -> None:
    """Wherever it stands."""
    for fields in (
        {"messages": talk(last=mark)},
        {"system": [text(mark)]},
        {"tools": [{**TOOL, "cache_control": mark}]},
    ):
        with pytest.raises(BadRequest) as caught:
            parse(**fields)
        assert "cache_control" in str(caught.value.param)
