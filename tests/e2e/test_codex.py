"""The Codex CLI works with the server for five turns, on both ports, and runs the tools that its model calls.

What the model writes is scripted by grammars, so that a tiny one calls tools; everything else is real: prompts, tokens,
KV, Codex and its tools. The reuse of each request is printed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvserve.demo.families import ModelScale
from tests.e2e.clients import Codex, set_up_codex
from tests.e2e.conftest import Stage
from tests.e2e.scripted import Call, Say, ScriptedServer, Step, TracedTurn, scripted_server
from tests.models import tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_TURNS = 5
FIRST_JUDGED_TURN = 3
MIN_REUSE = 0.97
SCALES = {
    "qwen3": ModelScale(num_layers=2, num_heads=1, num_kv_heads=1),
    "qwen3_5": ModelScale(num_heads=1, num_kv_heads=1),
}
"""As little attention as there can be: Codex's prompt has some 10,000 tokens, which a CPU has to prefill once."""


@pytest.fixture(scope="module", params=SCALES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stage: Stage
) -> Iterator[ScriptedServer]:
    """A dense model, whose answers have no thinking, and a hybrid one that thinks before each answer."""
    stage.clear()
    model = tiny_model(request.param, scale=SCALES[request.param])
    with scripted_server(tmp_path_factory.mktemp("scripted"), model) as server:
        yield server


def turn_steps(turn: int) -> list[Step]:
    """What the model does in one turn: it runs a command that leaves a file, in even turns reads one, and answers."""
    steps: list[Step] = [Call("exec_command", {"cmd": f"echo ran-{turn} | tee ran-{turn}.txt"})]
    if turn % 2 == 0:
        steps.append(Call("exec_command", {"cmd": "cat notes.txt"}))
    return [*steps, Say(f"Turn {turn} is done.")]


def lead_turn(server: ScriptedServer, codex: Codex, turn: int) -> list[TracedTurn]:
    """One turn; shows that the tools ran, that the model saw what they printed, and what Codex told of it."""
    num_before = len(server.turns())
    server.steps[:] = steps = turn_steps(turn)
    num_steps = len(steps)
    events = codex.say(f"Do part {turn}.", goes_on=turn > 1)
    assert server.steps == []
    requests = server.wait_for_turns(num_before + num_steps)[num_before:]
    print(f"turn {turn}: {', '.join(f'{r.reuse:.1%} of {r.num_prompt_tokens:,}' for r in requests)}")
    assert len(requests) == num_steps
    assert (codex.project / f"ran-{turn}.txt").read_text("utf-8") == f"ran-{turn}\n"
    assert f"ran-{turn}\n" in requests[-1].prompt
    assert requests[-1].prompt.count("marbles\nhail\n") == turn // 2
    finished: list[Any] = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["text"] for item in finished if item["type"] == "agent_message"][-1].strip() == f"Turn {turn} is done."
    return requests


@pytest.mark.parametrize("front", ["litellm", "kvserve"])
def test_codex_works_for_five_turns(server: ScriptedServer, tmp_path: Path, front: str) -> None:
    """Each call is run, each result reaches the model, and from the third turn on next to nothing is computed."""
    server.app.clear_cache()  # another folder's prompt parts from this one where no state was kept
    port = server.proxy_port if front == "litellm" else server.app.port
    codex = set_up_codex(tmp_path, port)
    (codex.project / "AGENTS.md").write_text("# Rules\n- Answer in English.\n", "utf-8")
    (codex.project / "notes.txt").write_text("marbles\nhail\n", "utf-8")
    counters, num_unscripted = server.counters(), server.num_unscripted
    made = [lead_turn(server, codex, turn) for turn in range(1, NUM_TURNS + 1)]
    assert min(request.reuse for requests in made[FIRST_JUDGED_TURN - 1 :] for request in requests) >= MIN_REUSE
    assert server.counters() == counters
    assert server.num_unscripted == num_unscripted
