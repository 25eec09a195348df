"""PI and OpenClaw work with the server for five turns each, through LiteLLM, and run the tools that its model calls.

What the model writes is scripted by grammars, so that a tiny one calls tools; everything else is real: prompts, tokens,
KV, the clients and their tools. The reuse of each request is printed.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvserve.demo.families import ModelScale
from tests.e2e.clients import set_up_openclaw, set_up_pi
from tests.e2e.conftest import Stage
from tests.e2e.scripted import Call, Say, ScriptedServer, Step, TracedTurn, scripted_server
from tests.models import tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_TURNS = 5
FIRST_JUDGED_TURN = 3
MIN_REUSE = 0.97
MAX_TOKENS = 512
SCALES = {
    "qwen3": ModelScale(num_layers=2, num_heads=1, num_kv_heads=1),
    "qwen3_5": ModelScale(num_heads=1, num_kv_heads=1),
}
"""As little attention as there can be: OpenClaw's prompt has 28,000 tokens, which a CPU has to prefill once."""
RULES = "# Rules of this project\n" + "".join(
    f"- Rule {number}: keep the notes of part {number} in notes/{number}.txt, one line for each thing that was found.\n"
    for number in range(40)
)


@pytest.fixture(scope="module", params=SCALES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stage: Stage
) -> Iterator[ScriptedServer]:
    """A dense model, whose answers have no thinking, and a hybrid one that thinks before each answer."""
    stage.clear()
    model = tiny_model(request.param, scale=SCALES[request.param])
    with scripted_server(tmp_path_factory.mktemp("scripted"), model) as server:
        yield server


def make_project(project: Path) -> None:
    """The files that the tools will find."""
    (project / "AGENTS.md").write_text(RULES, "utf-8")
    (project / "notes.txt").write_text("marbles\nhail\n", "utf-8")


def turn_steps(turn: int, shell: str) -> list[Step]:
    """What the model does in one turn: it runs a command that leaves a file, in even turns reads one, and answers."""
    steps: list[Step] = [Call(shell, {"command": f"echo ran-{turn} | tee ran-{turn}.txt"})]
    if turn % 2 == 0:
        steps.append(Call("read", {"path": "notes.txt"}))
    return [*steps, Say(done(turn))]


def done(turn: int) -> str:
    """The model's last words in a turn."""
    return f"Turn {turn} is done."


def work(server: ScriptedServer, shell: str, project: Path, say: Callable[[int], None]) -> list[list[TracedTurn]]:
    """Five turns; prints the reuse of each request and returns the requests.

    Shows that every tool ran, that the model saw what it printed, and that no correctness counter moved.
    """
    made: list[list[TracedTurn]] = []
    counters = server.counters()
    for turn in range(1, NUM_TURNS + 1):
        num_before = len(server.turns())
        server.steps[:] = steps = turn_steps(turn, shell)
        num_steps = len(steps)
        say(turn)
        assert server.steps == []
        requests = server.wait_for_turns(num_before + num_steps)[num_before:]
        made.append(requests)
        print(f"turn {turn}: {', '.join(f'{r.reuse:.1%} of {r.num_prompt_tokens:,}' for r in requests)}")
        assert len(requests) == num_steps
        assert (project / f"ran-{turn}.txt").read_text("utf-8") == f"ran-{turn}\n"
        assert f"<tool_response>\nran-{turn}\n" in requests[-1].prompt
        assert requests[-1].prompt.count("<tool_response>\nmarbles\nhail\n") == turn // 2
    assert server.num_unscripted == 0
    assert server.counters() == counters
    return made


def judge(made: Sequence[Sequence[TracedTurn]]) -> None:
    """From the third turn on next to nothing is computed."""
    late = [request.reuse for requests in made[FIRST_JUDGED_TURN - 1 :] for request in requests]
    assert min(late) >= MIN_REUSE


def test_pi_works_for_five_turns(server: ScriptedServer, tmp_path: Path) -> None:
    """Each call is run by PI, each result reaches the model, and from the third turn on next to nothing is computed."""
    pi = set_up_pi(tmp_path, server.proxy_port, MAX_TOKENS)
    make_project(pi.project)

    def say(turn: int) -> None:
        events = pi.say(f"Do part {turn}.", *(["-c"] if turn > 1 else []))
        ends = [event["message"] for event in events if event["type"] == "message_end"]
        assert [end["stopReason"] for end in ends if end["role"] == "assistant"][-1] == "stop"
        texts = [part["text"] for part in ends[-1]["content"] if part["type"] == "text"]
        assert "".join(texts).strip() == done(turn)

    judge(work(server, "bash", pi.project, say))


def test_openclaw_works_for_five_turns(server: ScriptedServer, tmp_path: Path) -> None:
    """The same with OpenClaw, whose every request ends with a message that the next one lacks."""
    openclaw = set_up_openclaw(tmp_path, server.proxy_port, MAX_TOKENS)
    make_project(openclaw.project)

    def say(turn: int) -> None:
        report = openclaw.say(f"Do part {turn}.")
        assert done(turn) in str(report["payloads"])

    judge(work(server, "exec", openclaw.project, say))
