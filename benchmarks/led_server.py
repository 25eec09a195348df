"""The real server in this process, on a tiny real model, whose draws are led: it writes the answers that it is told to.

Everything but the draw is real: sockets, prompts, prefill, states, KV, what is remembered. It judges nothing.
"""

import contextlib
import http.client
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
from rich.console import Console

from benchmarks.client import BenchmarkError
from benchmarks.given_ids import GivenIds
from benchmarks.model_free import Script, Told, script_of
from benchmarks.recordings import CHAT, MESSAGES, RESPONSES, Reply, Request
from kvserve.app.server import Server
from kvserve.config import Launch, Settings
from kvserve.engine import decode_group
from kvserve.observe.terminal import Terminal
from kvserve.requests.served_model import ServedModel

CACHE_PATH = "/v1/cache"
COUNT_PATH = "/v1/messages/count_tokens"
ANSWER_SECONDS = 600.0
WHOLE_ANSWER_TOKENS = 8_192
GUESS_SECONDS = 2.0
"""Within it a turn that is over has been guessed on; what was guessed is then waited for."""

LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
OWN_HEADERS = frozenset(
    {"host", "connection", "content-length", "content-type", "transfer-encoding", "accept-encoding", "authorization"}
)
"""What every sender of a request sets for itself."""

type Processor = Callable[[mx.array, mx.array], mx.array]
type Write = Callable[[ServedModel, Sequence[int], Reply], Script]


class LedServer:
    """A running server that answers one request at a time."""

    def __init__(self, app: Server, *, warms: bool = False, write: Write = script_of) -> None:
        """`write` makes what the model writes of an answer behind a prompt."""
        self._app = app
        self._warms = warms
        self._written_by = write
        self._lead: Callable[[Sequence[int]], Script] | None = None
        self._ids = GivenIds()

    @property
    def served(self) -> ServedModel:
        """The model as the server has it."""
        return self._app.resolve_model(None)

    def processors_for(self, _sampling: object, num_prompt_tokens: int) -> list[Processor]:
        """Stands in for the engine's: at each step of a led row one token is left to draw."""
        lead = self._lead
        script: list[int] = []

        def follow(tokens: mx.array, logits: mx.array) -> mx.array:
            if not script and lead is not None:
                script.extend(lead(tokens[:num_prompt_tokens].tolist()).tokens)  # type: ignore[arg-type]
            position = len(tokens) - num_prompt_tokens
            if position >= len(script):
                return logits
            return mx.where(mx.arange(logits.shape[-1]) == script[position], logits, -mx.inf)

        return [follow]

    def ask(self, request: Request, max_tokens: int | None) -> Told:
        """Send a client's request and have its answer written, `max_tokens` of it (None: whole): what its usage says.

        Calls of this server's answers are sent back with the ids that it gave them. Raises BenchmarkError for an error
        answer, ValueError for a request without a reply to write.
        """
        self._write(request.reply)
        limit = max_tokens or WHOLE_ANSWER_TOKENS
        dropped = {"stream", "stream_options", *LIMIT_FIELDS}
        body = self._ids.in_body({name: value for name, value in request.body.items() if name not in dropped})
        body["max_output_tokens" if request.path == RESPONSES else "max_tokens"] = limit
        answer = self._exchange("POST", request.path, body, _headers(request))
        self._settle()
        if request.reply is not None:
            self._ids.give(request.reply.call_ids, list(_call_ids(request.path, answer)))
        return _told(request.path, answer["usage"])

    def stream(self, request: Request, is_enough: Callable[[Mapping[str, Any]], bool]) -> list[Mapping[str, Any]]:
        """Send a streamed request as it is and have its answer written: the events of the answer, up to the first one
        that is enough, at which the client leaves.

        Raises BenchmarkError for an error answer, ValueError for a request without a reply to write.
        """
        self._write(request.reply)
        with self._asked("POST", request.path, request.body, _headers(request)) as response:
            events: list[Mapping[str, Any]] = []
            for line in response:
                if line.startswith(b"data: "):
                    events.append(json.loads(line.removeprefix(b"data: ")))
                    if is_enough(events[-1]):
                        break
        self._settle()
        return events

    def answer(self, body: Mapping[str, Any], lead: Callable[[Sequence[int]], Script]) -> dict[str, Any]:
        """Send a body of `/v1/chat/completions` and have written what `lead` makes of its prompt's ids: the answer."""
        self._lead = lead
        answer = self._exchange("POST", CHAT, body)
        self._settle()
        return answer

    def count(self, request: Request) -> int:
        """What count_tokens says of a request of `/v1/messages`."""
        body = {name: value for name, value in request.body.items() if name not in ("max_tokens", "stream")}
        return int(self._exchange("POST", COUNT_PATH, body, _headers(request))["input_tokens"])

    def totals(self) -> Mapping[str, Any]:
        """The body of GET /v1/cache."""
        return self._exchange("GET", CACHE_PATH)

    def forget(self) -> None:
        """Begin anew: DELETE /v1/cache."""
        self._ids = GivenIds()
        self._exchange("DELETE", CACHE_PATH)

    def _write(self, reply: Reply | None) -> None:
        """Have this written to the next request."""
        if reply is None:
            raise ValueError("There is nothing to write.")
        self._lead = lambda prompt: self._written_by(self.served, prompt, reply)

    def _settle(self) -> None:
        """Wait until the row is gone and what it computed is kept and, with `warms`, what comes next is computed."""
        while (health := self._app.health()[1])["num_running"] or health["num_waiting"]:
            time.sleep(0.001)
        if self._warms:
            time.sleep(GUESS_SECONDS)
            while self.totals()["warming"]["num_jobs_waiting"]:
                time.sleep(0.01)

    def _exchange(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        with self._asked(method, path, body, headers) as response:
            text = response.read()
        return dict(json.loads(text)) if text else {}

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, body: object, headers: Mapping[str, str] | None
    ) -> Iterator[http.client.HTTPResponse]:
        """The good answer to a request; the connection is closed behind it, whatever was read."""
        connection = http.client.HTTPConnection("127.0.0.1", self._app.port, timeout=ANSWER_SECONDS)
        try:
            sent = None if body is None else json.dumps(body).encode()
            given = {"Content-Type": "application/json"} if sent is not None else {}
            connection.request(method, path, sent, {**given, **(headers or {})})
            with connection.getresponse() as response:
                if response.status != 200:
                    raise BenchmarkError(f"{method} {path}: {response.status} {response.read()[:500]!r}")
                yield response
        finally:
            connection.close()


def _headers(request: Request) -> dict[str, str]:
    """What a client sent besides what every sender sets for itself."""
    return {name: value for name, value in request.headers.items() if name not in OWN_HEADERS}


def _call_ids(path: str, answer: Mapping[str, Any]) -> Iterator[str]:
    """What the server calls the calls of its answer."""
    if path == MESSAGES:
        yield from (block["id"] for block in answer["content"] if block["type"] == "tool_use")
    elif path == RESPONSES:
        yield from (item["call_id"] for item in answer["output"] if item["type"] == "function_call")
    else:
        yield from (call["id"] for call in answer["choices"][0]["message"].get("tool_calls") or ())


def _told(path: str, usage: Mapping[str, Any]) -> Told:
    """Prompt and cached tokens, by the names of the endpoint."""
    if path == MESSAGES:
        cached = usage["cache_read_input_tokens"]
        return Told(usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached, None)
    kind = "input" if path == RESPONSES else "prompt"
    return Told(usage[f"{kind}_tokens"], usage[f"{kind}_tokens_details"]["cached_tokens"], None)


@contextlib.contextmanager
def led_server(folder: Path, scratch: Path, *, warms: bool = False, write: Write = script_of) -> Iterator[LedServer]:
    """Serve the model in `folder` on a free port with default settings, without LiteLLM or a disk. With `warms` the
    next turn is computed ahead, and no request is sent before that is done."""
    values: dict[str, Any] = {name: field.default for name, field in Settings.model_fields.items()}
    values |= {"model_path": str(folder), "mlx_port": 0, "state_dir": scratch / "state", "log_root": scratch / "logs"}
    values |= {"disk_cache_dir": scratch / "kv", "enable_request_logging": False}
    values |= {"warm_next_turn": warms}  # else what an idle engine does between two requests is nobody's answer
    settings = Settings(_env_file=None, **values)  # type: ignore[call-arg]  # pydantic-settings reads it from kwargs
    app = Server(Launch(settings, None, False, "off", {}), Terminal(Console(file=io.StringIO())))
    server = LedServer(app, warms=warms, write=write)
    with mock.patch.object(decode_group, "processors_for", server.processors_for):
        try:
            app.start(threading.Event())
            yield server
        finally:
            app.stop()
