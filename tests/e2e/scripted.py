"""A server in this process, with LiteLLM in front, whose model says what a script wants: a call of a tool with these
arguments, or this text. It changes the grammars of requests and nothing else.

The model is real and small, its tokens are drawn and its KV is computed as ever; a grammar leaves it one text to write,
in whatever tokens it likes. Where the prompt has opened a thinking block, the model first thinks freely for a while.
"""

import contextlib
import io
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import kvserve.requests.serve
from kvserve.app.server import Server
from kvserve.config import Launch, Settings
from kvserve.core import Grammar, ToolChoice, ToolSpec, Turn
from kvserve.observe.terminal import Terminal
from kvserve.output.grammar import Promise, build_grammar
from kvserve.output.lark import quote
from kvserve.requests.running_answer import RunningTurn
from kvserve.requests.served_model import ServedModel
from tests.e2e.servers import PROXY_START_SECONDS, wait_until
from tests.ports import free_port
from tests.trace_lines import parse_line

NUM_THINKING_TOKENS = 24
NEVER = -100.0


@dataclass(frozen=True, slots=True)
class Call:
    """The model calls this tool of the client, with exactly these arguments."""

    tool: str
    arguments: Mapping[str, Any]

    def promise(self, options: Mapping[str, Any]) -> Promise:
        """The grammar of a forced call whose arguments leave no choice."""
        properties = {key: {"enum": [value]} for key, value in self.arguments.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        only = ToolSpec(self.tool, None, {**schema, "additionalProperties": False})
        return build_grammar(**{**options, "tools": (only,), "tool_choice": ToolChoice("function", self.tool)})


@dataclass(frozen=True, slots=True)
class Say:
    """The model writes this text."""

    text: str

    def promise(self, options: Mapping[str, Any]) -> Promise:
        """The grammar of the text, behind the end of thinking where the prompt has begun it."""
        start = options["start"]
        if not start.opens_thinking:
            return Promise(Grammar(f"start: {quote(self.text)}"), is_whole=True)
        return Promise(Grammar(rf"start: /\n{{0,2}}/ {quote(self.text)}", start.closing_ids), is_whole=True)


type Step = Call | Say


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """What the server wrote into its trace about one request."""

    num_prompt_tokens: int
    num_cached_tokens: int
    prompt: str
    protocol: str
    cause: str

    @property
    def reuse(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens


@dataclass
class ScriptedServer:
    """A running server and the steps that it has yet to make, one for each request that brings tools; with
    `is_for_all` one for each request."""

    app: Server
    model: Path
    proxy_port: int
    log_root: Path
    screen: io.StringIO
    steps: list[Step] = field(default_factory=list)
    num_unscripted: int = 0
    is_for_all: bool = False

    def build_grammar(self, **options: Any) -> Promise:
        """Stands in for the pipeline's own: the next step's grammar. A thinking block that the prompt has not opened
        would be the model's to open; it never comes to that."""
        step: Step = Say("Nothing.")
        if (options["tools"] or self.is_for_all) and self.steps:
            step = self.steps.pop(0)
        else:
            self.num_unscripted += 1
        return step.promise({**options, "start": replace(options["start"], may_think=False)})

    def serve(self, turn: Turn, served: ServedModel) -> RunningTurn:
        """Stands in for the app's own: the model thinks for a while only, and an answer ends with the token that ends a
        turn, as with trained models. One with random weights would end half of its answers with the other token, which
        no template writes.
        """
        _, *others = json.loads((self.model / "generation_config.json").read_text("utf-8"))["eos_token_id"]
        bias = tuple((int(token), NEVER) for token in others)
        thinking = replace(turn.thinking, max_num_tokens=NUM_THINKING_TOKENS)
        sampling = replace(turn.sampling, logit_bias=bias)
        return Server.serve(self.app, replace(turn, sampling=sampling, thinking=thinking), served)

    def turns(self) -> list[TracedTurn]:
        """Every request so far, in the order in which they ended."""
        lines = [line for path in self.log_root.glob("*/*.log") for line in path.read_text("utf-8").splitlines()]
        events = [event for event in map(parse_line, lines) if event.name == "turn"]
        return [
            TracedTurn(
                num_prompt_tokens=int(f["num_prompt_tokens"]),
                num_cached_tokens=int(f["num_cached_tokens"]),
                prompt=str(f["prompt"]),
                protocol=str(f["protocol"]),
                cause=str(f.get("cause", "")),
            )
            for f in sorted((dict(event.fields) for event in events), key=lambda fields: str(fields["time"]))
        ]

    def wait_for_turns(self, first: int, number: int, counts: Callable[[TracedTurn], bool]) -> list[TracedTurn]:
        """From the `first` on the requests that count, once so many have their line; it is written just after the last
        byte of the answer."""

        def look() -> list[TracedTurn] | None:
            found = [turn for turn in self.turns()[first:] if counts(turn)]
            return found if len(found) >= number else None

        return wait_until(look, 60, self.screen.getvalue)

    def port_of(self, front: str) -> int:
        """The port of kvserve itself, or of LiteLLM in front of it."""
        return {"kvserve": self.app.port, "litellm": self.proxy_port}[front]

    def counters(self) -> dict[str, int]:
        """The correctness counters."""
        return dict(json.loads(json.dumps(self.app.cache_report()))["counters"])


@contextlib.contextmanager
def scripted_server(folder: Path, model: Path) -> Iterator[ScriptedServer]:
    """The server on a model's folder, ready on LiteLLM's port; all other settings are the defaults."""
    values: dict[str, Any] = {name: row.default for name, row in Settings.model_fields.items()}
    proxy_port = free_port()
    values |= {"model_path": str(model), "mlx_port": 0, "proxy_port": proxy_port, "proxy_startup_wait_seconds": 0}
    values |= {"state_dir": folder / "state", "log_root": folder / "logs", "disk_cache_dir": folder / "kv"}
    settings = Settings(_env_file=None, **values)  # type: ignore[call-arg]
    screen = io.StringIO()
    app = Server(Launch(settings, None, True, "on", dict(os.environ)), Terminal(Console(file=screen, width=200)))
    server = ScriptedServer(app, model, proxy_port, folder / "logs", screen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvserve.requests.serve, "build_grammar", server.build_grammar)
        patch.setattr(app, "serve", server.serve)
        try:
            app.start(threading.Event())
            wait_until(lambda: app.health()[1]["proxy"] == "ready", PROXY_START_SECONDS, screen.getvalue)
            yield server
        finally:
            app.stop()
