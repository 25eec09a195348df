"""Claude Code, and PI over Anthropic's API, work with the server for five turns each and run the tools that its model
calls: on kvserve's own port and through LiteLLM. What the model writes is scripted, as in `test_real_agents.py`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clients import set_up_anthropic_pi, set_up_claude_code
from tests.e2e.conftest import Stage
from tests.e2e.scripted import Call, Say, ScriptedServer, Step, scripted_server
from tests.e2e.test_real_agents import (
    FIRST_JUDGED_TURN,
    MAX_TOKENS,
    MIN_REUSE,
    NUM_TURNS,
    SCALES,
    done,
    judge,
    make_project,
    work,
)
from tests.models import tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=SCALES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stage: Stage
) -> Iterator[ScriptedServer]:
    """A dense model, whose answers have no thinking, and a hybrid one that thinks before each answer."""
    stage.clear()
    model = tiny_model(request.param, scale=SCALES[request.param])
    with scripted_server(tmp_path_factory.mktemp("scripted"), model) as server:
        yield server


def port_of(server: ScriptedServer, front: str) -> int:
    return {"kvserve": server.app.port, "litellm": server.proxy_port}[front]


def test_pi_works_over_anthropics_api(server: ScriptedServer, front: str, tmp_path: Path) -> None:
    """Each call is run by PI, each result reaches the model, and from the third turn on next to nothing is computed."""
    pi = set_up_anthropic_pi(tmp_path, port_of(server, front), MAX_TOKENS)
    make_project(pi.project)

    def say(turn: int) -> None:
        events = pi.say(f"Do part {turn}.", *(["-c"] if turn > 1 else []))
        ends = [event["message"] for event in events if event["type"] == "message_end"]
        texts = [part["text"] for part in ends[-1]["content"] if part["type"] == "text"]
        assert "".join(texts).strip() == done(turn)

    judge(work(server, "bash", pi.project, say))


def test_claude_code_works_for_five_turns(server: ScriptedServer, front: str, tmp_path: Path) -> None:
    """Commands run, files are read, results reach the model; requests without tools beside them change nothing."""
    claude = set_up_claude_code(tmp_path, port_of(server, front))
    make_project(claude.project)
    (claude.project / "CLAUDE.md").write_text("# Project rules\nAnswer in English.\n", "utf-8")
    reuse: list[list[float]] = []
    for turn in range(1, NUM_TURNS + 1):
        num_before = len(server.turns())
        server.steps[:] = _steps(turn, claude.project)
        num_steps = len(server.steps)
        report = claude.say(f"Do part {turn}.", *(["-c"] if turn > 1 else []))
        assert not report["is_error"] and report["result"].strip() == done(turn)
        assert server.steps == []
        assert (claude.project / f"ran-{turn}.txt").read_text("utf-8") == f"ran-{turn}\n"
        requests = server.wait_for_turns(num_before + num_steps)[num_before:]
        main = [request for request in requests if f"Do part {turn}." in request.prompt and "Bash" in request.prompt]
        assert len(main) >= num_steps
        assert f"ran-{turn}" in main[-1].prompt and "Answer in English." in main[-1].prompt
        reuse.append([request.reuse for request in main])
        print(f"turn {turn}: {', '.join(f'{r.reuse:.1%} of {r.num_prompt_tokens:,}' for r in requests)}")
    assert min(min(of_turn) for of_turn in reuse[FIRST_JUDGED_TURN - 1 :]) >= MIN_REUSE


def _steps(turn: int, project: Path) -> list[Step]:
    """A command that leaves a file, in even turns a file that is read, and the answer."""
    steps: list[Step] = [
        Call("Bash", {"command": f"echo ran-{turn} | tee ran-{turn}.txt", "description": "Leaves a file"})
    ]
    if turn % 2 == 0:
        steps.append(Call("Read", {"file_path": str(project / "notes.txt")}))
    return [*steps, Say(done(turn))]
