"""The real PI coding agent holds a conversation with the demo model through LiteLLM, whatever the model writes."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients import Pi, set_up_pi
from tests.e2e.servers import ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_ANSWER_TOKENS = 96


@pytest.fixture
def pi(open_server: ServerProcess, tmp_path: Path) -> Pi:
    """PI, configured for LiteLLM's port."""
    return set_up_pi(tmp_path, open_server.port_of("litellm"), NUM_ANSWER_TOKENS)


def assistant_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The last assistant message that PI reports as complete."""
    ends = [event["message"] for event in events if event["type"] == "message_end"]
    return next(message for message in reversed(ends) if message["role"] == "assistant")


def text_of(message: dict[str, Any]) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def test_pi_holds_a_session_of_two_turns(pi: Pi, open_server: ServerProcess) -> None:
    """Both turns are answered without an error, and the model sees the first turn again in the second."""
    first = assistant_message(pi.say("Tell me about marbles."))
    assert first["stopReason"] in ("stop", "length")
    assert text_of(first)
    assert first["usage"]["output"] > 0
    second = assistant_message(pi.say("And about hail?", "-c"))
    assert second["stopReason"] in ("stop", "length")
    assert text_of(second)
    seen = open_server.prompts()[-1]
    positions = [seen.find(text) for text in ("Tell me about marbles.", text_of(first).strip(), "And about hail?")]
    assert -1 not in positions
    assert positions == sorted(positions)
