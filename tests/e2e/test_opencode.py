"""opencode works with the server for five turns, as a client of chat/completions and of responses, on both ports.

What the model writes is scripted by grammars, so that a tiny one calls tools; everything else is real: prompts, tokens,
KV, opencode and its tools. The reuse of each request is printed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvserve.demo.families import ModelScale
from tests.e2e.clients import Opencode, set_up_opencode
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
"""As little attention as there can be: opencode's prompt has some 10,000 tokens, which a CPU has to prefill once."""
PACKAGES = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai"}


@pytest.fixture(scope="module", params=SCALES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stage: Stage
) -> Iterator[ScriptedServer]:
    """A dense model, whose answers have no thinking, and a hybrid one that thinks before each answer."""
    stage.clear()
    model = tiny_model(request.param, scale=SCALES[request.param])
    with scripted_server(tmp_path_factory.mktemp("scripted"), model) as server:
        yield server


def turn_steps(turn: int, project: Path) -> list[Step]:
    """What the model does in one turn: it runs a command that leaves a file, in even turns reads one, and answers."""
    command = f"echo ran-{turn} | tee ran-{turn}.txt"
    steps: list[Step] = [Call("bash", {"command": command, "description": "Leaves a file."})]
    if turn % 2 == 0:
        steps.append(Call("read", {"filePath": str(project / "notes.txt")}))
    return [*steps, Say(f"Turn {turn} is done.")]


def lead_turn(server: ScriptedServer, opencode: Opencode, turn: int) -> list[TracedTurn]:
    """One turn; shows that the tools ran, that the model saw what they printed, and what opencode told of it.

    The requests for a title have no tools and are left out.
    """
    num_before = len(server.turns())
    server.steps[:] = steps = turn_steps(turn, opencode.project)
    num_steps = len(steps)
    events = opencode.say(f"Do part {turn}.", *(["-c"] if turn > 1 else []))
    assert server.steps == []
    made = server.wait_for_turns(num_before + num_steps)[num_before:]
    requests = [request for request in made if "<tools>" in request.prompt]
    print(f"turn {turn}: {', '.join(f'{r.reuse:.1%} of {r.num_prompt_tokens:,}' for r in requests)}")
    assert len(requests) == num_steps
    assert (opencode.project / f"ran-{turn}.txt").read_text("utf-8") == f"ran-{turn}\n"
    assert f"ran-{turn}\n" in requests[-1].prompt
    assert requests[-1].prompt.count("marbles") == turn // 2
    texts: list[Any] = [event["part"]["text"] for event in events if event["type"] == "text"]
    assert texts[-1].strip() == f"Turn {turn} is done."
    return requests


@pytest.mark.parametrize("front", ["litellm", "kvserve"])
@pytest.mark.parametrize("protocol", PACKAGES)
def test_opencode_works_for_five_turns(server: ScriptedServer, tmp_path: Path, protocol: str, front: str) -> None:
    """Each call is run, each result reaches the model, and from the third turn on next to nothing is computed."""
    server.app.clear_cache()
    port = server.proxy_port if front == "litellm" else server.app.port
    opencode = set_up_opencode(tmp_path, port, PACKAGES[protocol], MAX_TOKENS)
    (opencode.project / "AGENTS.md").write_text("# Rules\n- Answer in English.\n", "utf-8")
    (opencode.project / "notes.txt").write_text("marbles\nhail\n", "utf-8")
    made = [lead_turn(server, opencode, turn) for turn in range(1, NUM_TURNS + 1)]
    assert min(request.reuse for requests in made[FIRST_JUDGED_TURN - 1 :] for request in requests) >= MIN_REUSE
