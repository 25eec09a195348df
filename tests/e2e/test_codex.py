"""The Codex CLI works with the server for five turns, on both ports, and runs the tools that its model calls.

What the model writes is scripted by grammars, so that a tiny one calls tools; everything else is real: prompts, tokens,
KV, Codex and its tools. The reuse of each request is printed.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients import Codex, set_up_codex
from tests.e2e.five_turns import (
    NOTES,
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


def lead_turn(server: ScriptedServer, codex: Codex, turn: int) -> list[TracedTurn]:
    """One turn; shows that the tools ran, that the model saw what they printed, and what Codex told of it."""
    run, read = Call("exec_command", {"cmd": command_of(turn)}), Call("exec_command", {"cmd": "cat notes.txt"})
    steps = steps_of(turn, run, read)
    with turn_of(server, codex.project, turn, steps) as requests:
        events = codex.say(f"Do part {turn}.", goes_on=turn > 1)
    assert len(requests) == len(steps)
    assert f"ran-{turn}\n" in requests[-1].prompt
    assert requests[-1].prompt.count(NOTES) == turn // 2
    finished: list[Any] = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["text"] for item in finished if item["type"] == "agent_message"][-1].strip() == done(turn)
    return requests


@pytest.mark.parametrize("front", ["litellm", "kvserve"])
def test_codex_works_for_five_turns(scripted: ScriptedServer, tmp_path: Path, front: str) -> None:
    """Each call is run, each result reaches the model, and from the third turn on next to nothing is computed."""
    scripted.app.clear_cache()  # another folder's prompt parts from this one where no state was kept
    codex = set_up_codex(tmp_path, scripted.port_of(front))
    make_project(codex.project, SHORT_RULES)
    counters, num_unscripted = scripted.counters(), scripted.num_unscripted
    judge([lead_turn(scripted, codex, turn) for turn in range(1, NUM_TURNS + 1)])
    assert scripted.counters() == counters
    assert scripted.num_unscripted == num_unscripted
