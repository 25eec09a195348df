"""PI and OpenClaw work with the server for five turns each, through LiteLLM, and run the tools that its model calls.

What the model writes is scripted by grammars, so that a tiny one calls tools; everything else is real: prompts, tokens,
KV, the clients and their tools. The reuse of each request is printed.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.clients import set_up_openclaw, set_up_pi
from tests.e2e.five_turns import MAX_TOKENS, NUM_TURNS, command_of, done, judge, make_project, steps_of, turn_of
from tests.e2e.scripted import Call, ScriptedServer, TracedTurn

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def work(server: ScriptedServer, shell: str, project: Path, say: Callable[[int], None]) -> list[list[TracedTurn]]:
    """Five turns; prints the reuse of each request and returns the requests.

    It begins with an empty cache: where the same client has asked from another folder before, its first prompt parts
    from that one inside the system message, where a hybrid keeps no state, and that counts as `hybrid_trim_miss`.
    Shows that every tool ran, that the model saw what it printed, and that no correctness counter moved.
    """
    made: list[list[TracedTurn]] = []
    server.app.clear_cache()
    counters = server.counters()
    for turn in range(1, NUM_TURNS + 1):
        steps = steps_of(turn, Call(shell, {"command": command_of(turn)}), Call("read", {"path": "notes.txt"}))
        with turn_of(server, project, turn, steps) as requests:
            say(turn)
        made.append(requests)
        assert len(requests) == len(steps)
        assert f"<tool_response>\nran-{turn}\n" in requests[-1].prompt
        assert requests[-1].prompt.count("<tool_response>\nmarbles\nhail\n") == turn // 2
    assert server.num_unscripted == 0
    assert server.counters() == counters
    return made


def test_pi_works_for_five_turns(scripted: ScriptedServer, tmp_path: Path) -> None:
    """Each call is run by PI, each result reaches the model, and from the third turn on next to nothing is computed."""
    pi = set_up_pi(tmp_path, scripted.proxy_port, MAX_TOKENS)
    make_project(pi.project)

    def say(turn: int) -> None:
        events = pi.say(f"Do part {turn}.", *(["-c"] if turn > 1 else []))
        ends = [event["message"] for event in events if event["type"] == "message_end"]
        assert [end["stopReason"] for end in ends if end["role"] == "assistant"][-1] == "stop"
        texts = [part["text"] for part in ends[-1]["content"] if part["type"] == "text"]
        assert "".join(texts).strip() == done(turn)

    judge(work(scripted, "bash", pi.project, say))


def test_openclaw_works_for_five_turns(scripted: ScriptedServer, tmp_path: Path) -> None:
    """The same with OpenClaw, whose every request ends with a message that the next one lacks."""
    openclaw = set_up_openclaw(tmp_path, scripted.proxy_port, MAX_TOKENS)
    make_project(openclaw.project)

    def say(turn: int) -> None:
        report = openclaw.say(f"Do part {turn}.")
        assert done(turn) in str(report["payloads"])

    judge(work(scripted, "exec", openclaw.project, say))
