"""Twelve clients make two turns of a conversation each, on both ports: in the first the model calls a tool of theirs,
whose result it reads, and the second goes on. No request is refused, and what was read before is not computed again.

What the model writes is scripted by grammars; everything else is real: prompts, tokens, KV, the clients and their
tools. It is a hybrid that thinks before each answer. Between a client and the port a relay notes what it is answered
with. A line is printed for each request; `make clients` also writes them to benchmarks/results/clients.md.
"""

import http.client
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.clients import (
    set_up_aider,
    set_up_claude_code,
    set_up_codex,
    set_up_openclaw,
    set_up_opencode,
    set_up_pi,
)
from tests.e2e.conftest import Stage
from tests.e2e.five_turns import MAX_TOKENS, SCALES, SHORT_RULES, command_of, done, make_project
from tests.e2e.installing import wanted_version
from tests.e2e.more_clients import (
    set_up_cline,
    set_up_continue,
    set_up_kilo,
    set_up_llm,
    set_up_mini_swe_agent,
    set_up_qwen_code,
)
from tests.e2e.scripted import Call, Say, ScriptedServer, Step, TracedTurn, scripted_server
from tests.e2e.wiretap import Asked, tapped
from tests.models import tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FAMILY = "qwen3_5"
MIN_REUSE = 0.9
PORTS = {"kvserve": 8080, "litellm": 4000}
"""The ports as the documents call them."""
OPENAI_CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent is told that a task is done."""
NOTE = "notes.txt"

type Talk = Callable[[Path, int], list[str]]
"""Sets a client up in a HOME for a port, makes both turns and returns what was printed in each."""


def ask(turn: int) -> str:
    """What a client is asked."""
    return f"Do part {turn}."


def shell(tool: str, argument: str = "command", **others: str) -> list[Step]:
    """The model runs a command in the first turn and answers; in the second it answers."""
    return [Call(tool, {argument: command_of(1), **others}), Say(done(1)), Say(done(2))]


@dataclass(frozen=True)
class Trial:
    """A client, what its model does, one step for each request, and what shows in the end that it went well.

    `proof` is what the tool printed, as it stands in the last prompt. `min_reuse` is of each request but the first.
    """

    name: str
    folder: str
    path: str
    steps: Sequence[Step]
    talk: Talk
    proof: str = "ran-1\n"
    answers: Sequence[str] = (done(1), done(2))
    brings_tools: bool = True
    min_reuse: float = MIN_REUSE


def talk_claude_code(home: Path, port: int) -> list[str]:
    claude = set_up_claude_code(home, port)
    make_project(claude.project, SHORT_RULES)
    return [str(claude.say(ask(1))["result"]), str(claude.say(ask(2), "-c")["result"])]


def talk_codex(home: Path, port: int) -> list[str]:
    codex = set_up_codex(home, port)
    make_project(codex.project, SHORT_RULES)
    return [str(codex.say(ask(turn), goes_on=turn > 1)) for turn in (1, 2)]


def talk_opencode(home: Path, port: int) -> list[str]:
    opencode = set_up_opencode(home, port, "@ai-sdk/openai-compatible", MAX_TOKENS)
    make_project(opencode.project, SHORT_RULES)
    return [str(opencode.say(ask(1))), str(opencode.say(ask(2), "-c"))]


def talk_pi(home: Path, port: int) -> list[str]:
    pi = set_up_pi(home, port, MAX_TOKENS)
    make_project(pi.project, SHORT_RULES)
    return [str(pi.say(ask(1))), str(pi.say(ask(2), "-c"))]


def talk_openclaw(home: Path, port: int) -> list[str]:
    openclaw = set_up_openclaw(home, port, MAX_TOKENS)
    make_project(openclaw.project, SHORT_RULES)
    return [str(openclaw.say(ask(turn))["payloads"]) for turn in (1, 2)]


def talk_aider(home: Path, port: int) -> list[str]:
    aider = set_up_aider(home, port)
    make_project(aider.project, SHORT_RULES)
    return [aider.say(ask(1), NOTE), aider.say(ask(2), "--restore-chat-history", NOTE)]


def talk_qwen_code(home: Path, port: int) -> list[str]:
    qwen = set_up_qwen_code(home, port, MAX_TOKENS)
    make_project(qwen.project, SHORT_RULES)
    return [qwen.say(ask(1)), qwen.say(ask(2), "-c")]


def talk_kilo(home: Path, port: int) -> list[str]:
    kilo = set_up_kilo(home, port, MAX_TOKENS)
    make_project(kilo.project, SHORT_RULES)
    return [kilo.say(ask(1)), kilo.say(ask(2), "-c")]


def talk_continue(home: Path, port: int) -> list[str]:
    cn = set_up_continue(home, port)
    make_project(cn.project, SHORT_RULES)
    return [cn.say(ask(1)), cn.say(ask(2), "--resume")]


def talk_cline(home: Path, port: int) -> list[str]:
    cline = set_up_cline(home, port)
    make_project(cline.project, SHORT_RULES)
    return [cline.say(ask(1))]


def talk_llm(home: Path, port: int) -> list[str]:
    llm = set_up_llm(home, port)
    return [llm.say(ask(1)), llm.say(ask(2), "-c")]


def talk_mini_swe_agent(home: Path, port: int) -> list[str]:
    return [set_up_mini_swe_agent(home, port).work(ask(1), ask(2))]


AIDER_STEPS = [Say(f"{done(1)}\n\n{NOTE}\n```\nmarbles\nran-1\n```\n"), Say(done(2))]
QWEN_STEPS = [
    Call("run_shell_command", {"command": f"{command_of(1)}; sleep 0.5", "is_background": "false"}),
    *(Say(done(1)), Say(done(2))),
]
MINI_STEPS = [
    Call("bash", {"command": command_of(1)}),
    Call("bash", {"command": f"{SUBMIT}; echo {done(1)}"}),
    Call("bash", {"command": f"{SUBMIT}; echo {done(2)}"}),
]
TRIALS = (
    Trial("Claude Code", "claude", ANTHROPIC, shell("Bash", description="Leaves a file"), talk_claude_code),
    Trial("Codex", "codex", RESPONSES, shell("exec_command", "cmd"), talk_codex),
    Trial("opencode", "opencode", OPENAI_CHAT, shell("bash", description="Leaves a file."), talk_opencode),
    Trial("PI", "pi", OPENAI_CHAT, shell("bash"), talk_pi),
    Trial("OpenClaw", "openclaw", OPENAI_CHAT, shell("exec"), talk_openclaw),
    # aider has no tools, it writes what the model lists; in each turn it shows its files behind all that was said.
    Trial("aider", "aider", OPENAI_CHAT, AIDER_STEPS, talk_aider, brings_tools=False, min_reuse=0.4),
    # qwen-code 0.24.4 may lose what a command prints as it ends, and then tells the model "(empty)": it lasts a moment.
    Trial("qwen-code", "qwen", OPENAI_CHAT, QWEN_STEPS, talk_qwen_code),
    Trial("Kilo", "kilo", OPENAI_CHAT, shell("bash", description="Leaves a file."), talk_kilo),
    Trial("Continue", "continue", OPENAI_CHAT, shell("Bash"), talk_continue),
    # Cline goes on with a conversation at a terminal only: two requests of one turn.
    Trial(
        "Cline",
        "cline",
        OPENAI_CHAT,
        [Call("run_commands", {"commands": [command_of(1)]}), Say(done(1))],
        talk_cline,
        proof="ran-1\\n",
        answers=[done(1)],
    ),
    Trial("llm", "llm", OPENAI_CHAT, shell("shell"), talk_llm),
    Trial("mini-swe-agent", "mini", OPENAI_CHAT, MINI_STEPS, talk_mini_swe_agent, proof="ran-1\\n"),
)


@dataclass(frozen=True)
class Row:
    """What one request came to."""

    client: str
    version: str
    port: int
    number: int
    request: TracedTurn

    @property
    def cells(self) -> list[str]:
        """The columns of HEADINGS."""
        request = self.request
        counts = f"{request.num_prompt_tokens:,}", f"{request.num_cached_tokens:,}", f"{request.reuse:.1%}"
        return [self.client, self.version, str(self.port), request.protocol, str(self.number), *counts, request.cause]


HEADINGS = ("Client", "Version", "Port", "Protocol", "Request", "Prompt tokens", "Cached", "Reuse", "Cause")
TABLE = """\
# Twelve clients, two turns each

Written by `make clients`: each client in its own configuration, on both ports, with a tiny hybrid model ({family})
whose writing is scripted and whose tokenizer makes more tokens of a text than those of larger models. The cache is
empty before each client. Request 1 is the first of a conversation, 2 brings the result of a tool, 3 the next turn: of
aider, which has no tools, 2 is the next turn; Cline goes on with a conversation at a terminal only; of mini-swe-agent
2 ends the first task.

{rows}
"""


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """What the requests came to; at the end written to CLIENTS_TABLE, if that is set."""
    rows: list[Row] = []
    yield rows
    if file := os.environ.get("CLIENTS_TABLE"):
        lines = [HEADINGS, ["---"] * len(HEADINGS), *(row.cells for row in rows)]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        Path(file).write_text(TABLE.format(family=FAMILY, rows=table), "utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, stage: Stage) -> Iterator[ScriptedServer]:
    """One for all of them."""
    stage.clear()
    with scripted_server(tmp_path_factory.mktemp("twelve"), tiny_model(FAMILY, scale=SCALES[FAMILY])) as server:
        yield server


@pytest.fixture(params=TRIALS, ids=lambda trial: trial.folder)
def trial(request: pytest.FixtureRequest) -> Trial:
    assert isinstance(request.param, Trial)
    return request.param


def counters_of(server: ScriptedServer) -> dict[str, int]:
    """The correctness counters but one: no checkpoint is inside a message, and qwen-code lists its folder anew in its
    first one. What that costs is in `min_reuse`."""
    return {name: value for name, value in server.counters().items() if name != "hybrid_trim_miss"}


def test_what_is_refused_is_noted(server: ScriptedServer, front: str) -> None:
    """Each request with its status, also several on one connection."""
    good = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    with tapped(server.port_of(front)) as tap:
        connection = http.client.HTTPConnection("127.0.0.1", tap.port, timeout=60)
        for body in (good, {**good, "messages": "none"}, good):
            connection.request("POST", OPENAI_CHAT, json.dumps(body), {"content-type": "application/json"})
            connection.getresponse().read()
        connection.close()
        asked = tap.asked()
    assert asked == [Asked("POST", OPENAI_CHAT, status) for status in (200, 400, 200)]


def test_a_client_makes_two_turns_with_a_tool(
    server: ScriptedServer, rows: list[Row], trial: Trial, front: str, tmp_path: Path
) -> None:
    """Its tool runs, the model reads what it printed, both answers arrive, nothing is refused, and all but the first
    request reuse what was read before."""
    server.app.clear_cache()
    server.steps[:], server.is_for_all = trial.steps, not trial.brings_tools
    num_before, counters = len(server.turns()), counters_of(server)
    try:
        with tapped(server.port_of(front)) as tap:
            printed = trial.talk(tmp_path, tap.port)
            asked = tap.asked()
    finally:
        left, server.steps[:], server.is_for_all = list(server.steps), [], False
    assert left == [], printed

    def is_of_conversation(request: TracedTurn) -> bool:
        return ask(1) in request.prompt and ("<tools>" in request.prompt or not trial.brings_tools)

    # Beside it opencode and Kilo ask for a title, and qwen-code what of it should be remembered.
    requests = server.wait_for_turns(num_before, len(trial.steps), is_of_conversation)[: len(trial.steps)]
    for number, request in enumerate(requests, 1):
        row = Row(trial.name, wanted_version(trial.folder), PORTS[front], number, request)
        rows.append(row)
        print(" ".join(row.cells))
    assert [one for one in asked if one.status is not None and one.status >= 400] == []
    answered = [one for one in asked if one.path.partition("?")[0] == trial.path and one.status == 200]
    assert len(answered) >= len(trial.steps)
    assert all(answer in "".join(printed) for answer in trial.answers)
    last = requests[-1].prompt
    assert trial.proof in last, last[last.rfind("<tool_response>") :]
    assert min(request.reuse for request in requests[1:]) >= trial.min_reuse
    assert counters_of(server) == counters
