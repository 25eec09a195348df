"""opencode works with the server for five turns, as a client of chat/completions and of responses, on both ports.

What the model writes is scripted by grammars, so that a tiny one calls tools; everything else is real: prompts, tokens,
KV, opencode and its tools. The reuse of each request is printed.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients import Opencode, set_up_opencode
from tests.e2e.five_turns import (
    MAX_TOKENS,
    NUM_TURNS,
    SHORT_RULES,
    command_of,
    done,
    judge,
    make_project,
    steps_of,
    turn_of,
)
from tests.e2e.scripted import Call, ScriptedServer, TracedTurn

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PACKAGES = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai"}


def lead_turn(server: ScriptedServer, opencode: Opencode, turn: int) -> list[TracedTurn]:
    """One turn; shows that the tools ran, that the model saw what they printed, and what opencode told of it.

    The requests for a title have no tools and are left out.
    """
    run = Call("bash", {"command": command_of(turn), "description": "Leaves a file."})
    steps = steps_of(turn, run, Call("read", {"filePath": str(opencode.project / "notes.txt")}))
    with turn_of(server, opencode.project, turn, steps, lambda request: "<tools>" in request.prompt) as requests:
        events = opencode.say(f"Do part {turn}.", *(["-c"] if turn > 1 else []))
    assert len(requests) == len(steps)
    assert f"ran-{turn}\n" in requests[-1].prompt
    assert requests[-1].prompt.count("marbles") == turn // 2
    texts: list[Any] = [event["part"]["text"] for event in events if event["type"] == "text"]
    assert texts[-1].strip() == done(turn)
    return requests


@pytest.mark.parametrize("front", ["litellm", "kvserve"])
@pytest.mark.parametrize("protocol", PACKAGES)
def test_opencode_works_for_five_turns(scripted: ScriptedServer, tmp_path: Path, protocol: str, front: str) -> None:
    """Each call is run, each result reaches the model, and from the third turn on next to nothing is computed."""
    scripted.app.clear_cache()
    opencode = set_up_opencode(tmp_path, scripted.port_of(front), PACKAGES[protocol], MAX_TOKENS)
    make_project(opencode.project, SHORT_RULES)
    judge([lead_turn(scripted, opencode, turn) for turn in range(1, NUM_TURNS + 1)])
