"""Claude Code, and PI over Anthropic's API, work with the server for five turns each and run the tools that its model
calls: on kvserve's own port and through LiteLLM. What the model writes is scripted, as in `test_real_agents.py`.
"""

from pathlib import Path

import pytest

from tests.e2e.clients import set_up_anthropic_pi, set_up_claude_code
from tests.e2e.five_turns import MAX_TOKENS, NUM_TURNS, command_of, done, judge, make_project, steps_of, turn_of
from tests.e2e.scripted import Call, ScriptedServer, TracedTurn
from tests.e2e.test_real_agents import work

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def test_pi_works_over_anthropics_api(scripted: ScriptedServer, front: str, tmp_path: Path) -> None:
    """Each call is run by PI, each result reaches the model, and from the third turn on next to nothing is computed."""
    pi = set_up_anthropic_pi(tmp_path, scripted.port_of(front), MAX_TOKENS)
    make_project(pi.project)

    def say(turn: int) -> None:
        events = pi.say(f"Do part {turn}.", *(["-c"] if turn > 1 else []))
        ends = [event["message"] for event in events if event["type"] == "message_end"]
        texts = [part["text"] for part in ends[-1]["content"] if part["type"] == "text"]
        assert "".join(texts).strip() == done(turn)

    judge(work(scripted, "bash", pi.project, say))


def test_claude_code_works_for_five_turns(scripted: ScriptedServer, front: str, tmp_path: Path) -> None:
    """Commands run, files are read, results reach the model; requests without tools beside them change nothing."""
    claude = set_up_claude_code(tmp_path, scripted.port_of(front))
    make_project(claude.project)
    (claude.project / "CLAUDE.md").write_text("# Project rules\nAnswer in English.\n", "utf-8")
    made: list[list[TracedTurn]] = []
    for turn in range(1, NUM_TURNS + 1):
        run = Call("Bash", {"command": command_of(turn), "description": "Leaves a file"})
        steps = steps_of(turn, run, Call("Read", {"file_path": str(claude.project / "notes.txt")}))

        def is_main(request: TracedTurn, turn: int = turn) -> bool:
            return f"Do part {turn}." in request.prompt and "Bash" in request.prompt

        with turn_of(scripted, claude.project, turn, steps, is_main) as main:
            report = claude.say(f"Do part {turn}.", *(["-c"] if turn > 1 else []))
            assert not report["is_error"] and report["result"].strip() == done(turn)
        assert len(main) >= len(steps)
        # What the command printed, not the command: that has no line of its own.
        assert f"ran-{turn}\n" in main[-1].prompt and "Answer in English." in main[-1].prompt
        made.append(main)
    judge(made)
