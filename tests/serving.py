"""A whole server in this process, on a tiny real model and a free port, and what its tests ask of it.

`serving_app` starts `kvserve.app.server.Server` as `main` does, without the proxy. Everything goes over sockets; what a
test looks at besides (threads, forward passes, the terminal) is read from the running process.
"""

import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console

import kvserve.app.server
import kvserve.web.http_server
from kvserve.app.server import Server
from kvserve.cache.disk_tier import DiskTier
from kvserve.config import DiskMode, Launch, Settings
from kvserve.engine import decode_group, prefill_pool
from kvserve.engine.decode import DecodePool
from kvserve.engine.decode_group import DecodeResult
from kvserve.engine.prefill import Prefill
from kvserve.observe.terminal import Terminal
from kvserve.requests.served_model import ServedModel
from kvserve.settings.kinds import DraftLimit
from tests.models import tiny_model
from tests.starts import remembered_starts
from tests.web.fakes import PATIENCE_SECONDS, RawClient, Response, encode_request, eventually

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
SPECULATION: DraftLimit = "off"
"""Of servers that are told nothing else: a pass gives one token. `tests/with_drafts` sets it otherwise."""
SCRIPT_SEED = 4711
"""The seed of a request whose row writes the script of `writing`."""


@dataclass(frozen=True)
class Chat:
    """An answer put together from its chunks, or read from its one body: the same shape either way.

    `usage` is without the cached tokens and those of drafts, which depend on what was asked before and do not count in
    comparisons.
    """

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str | None
    usage: Mapping[str, Any] | None
    num_cached_tokens: int | None = field(default=None, compare=False)

    @property
    def num_completion_tokens(self) -> int:
        assert self.usage is not None
        return int(self.usage["completion_tokens"])


@dataclass
class AppUnderTest:
    """A running server. `screen` is what a person would have seen, `num_forward_calls` counts the model's work."""

    app: Server
    screen: io.StringIO
    log_root: Path
    num_forward_calls: int = 0

    @property
    def port(self) -> int:
        return self.app.port

    @property
    def served(self) -> ServedModel:
        return self.app.resolve_model(None)

    @property
    def model(self) -> Any:
        """The MLX module."""
        return self.served.engine.wait_until_ready(0).module

    def connect(self) -> RawClient:
        return RawClient(self.port)

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Response:
        """One request on a connection of its own."""
        with self.connect() as client:
            return client.request("POST", path, body, {"Connection": "close", **(headers or {})})

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Response:
        with self.connect() as client:
            return client.request("GET", path, None, {"Connection": "close", **(headers or {})})

    def clear_cache(self) -> None:
        """DELETE /v1/cache."""
        with self.connect() as client:
            assert client.request("DELETE", "/v1/cache", None, {"Connection": "close"}).status == 200

    def chat(self, said: object = "Hello there.", *, headers: Mapping[str, str] | None = None, **fields: Any) -> Chat:
        """Ask; `stream=True` puts the chunks together. Temperature 0 unless the fields say otherwise."""
        response = self.post(CHAT_PATH, chat_body(said, **fields), headers)
        assert response.status == 200, response.body
        return joined(chunks_of(response)) if fields.get("stream") else whole(response.json)

    def both(self, said: object = "Hello there.", **fields: Any) -> Chat:
        """The answer, after showing that it is the same streamed and not."""
        plain = self.chat(said, **fields)
        streamed = self.chat(said, stream=True, stream_options={"include_usage": True}, **fields)
        assert streamed == plain
        return plain

    def health(self) -> dict[str, Any]:
        return dict(self.get("/health").json)

    def is_idle(self) -> bool:
        """Whether nothing computes or waits, asked without a socket."""
        _, body = self.app.health()
        return body["num_running"] == 0 and body["num_waiting"] == 0

    def lines(self) -> list[str]:
        return self.screen.getvalue().splitlines()

    def line_of(self, response_id: str) -> str:
        """The request line of an answer (waits for it: it is written after the last byte)."""
        short = response_id.removeprefix("chatcmpl-").removeprefix("cmpl-")[:12]
        found: list[str] = []

        def look() -> bool:
            found[:] = [line for line in self.lines() if f" {short} " in line]
            return bool(found)

        assert eventually(look), f"no line for {short} in {self.lines()}"
        assert len(found) == 1, found
        return found[0]


@contextlib.contextmanager
def serving_app(
    folder: Path,
    family: str = "qwen3",
    *,
    web: Mapping[str, Any] | None = None,
    disk_cache: DiskMode = "on",
    **settings: Any,
) -> Iterator[AppUnderTest]:
    """A server on a tiny model; `web` changes WebSettings, `settings` the operator's (defaults, whatever the
    environment says). `folder` takes its files; what they hold is read, however slow a busy machine's disk was found to
    be. At the end it stops and must leave no thread."""
    threads = set(threading.enumerate())
    with (
        pytest.MonkeyPatch.context() as patch,
        unstarted_app(folder, family, web=web, disk_cache=disk_cache, **settings) as under_test,
    ):
        patch.setattr(DiskTier, "read_rate", None)
        under_test.app.start(threading.Event())
        with _counted(under_test):
            yield under_test
    # The stop of a busy machine may have given one of them up a moment before its end.
    assert eventually(lambda: set(threading.enumerate()) <= threads), set(threading.enumerate()) - threads


@classmethod  # type: ignore[misc]
def _what_is_given(_settings: Any, _kind: Any, init_settings: Any, **_others: Any) -> tuple[Any, ...]:
    """The one source of settings that have all their values."""
    return (init_settings,)


@contextlib.contextmanager
def unstarted_app(
    folder: Path,
    family: str = "qwen3",
    *,
    web: Mapping[str, Any] | None = None,
    disk_cache: DiskMode = "on",
    **settings: Any,
) -> Iterator[AppUnderTest]:
    """The same, not started yet."""
    values: dict[str, Any] = {name: field.default for name, field in Settings.model_fields.items()}
    values |= {
        "model_path": str(tiny_model(family)),
        "mlx_port": 0,
        "state_dir": folder / "state",
        "log_root": folder / "logs",
        "disk_cache_dir": folder / "kv",
        "prewarm_prefixes": 0,
        "warm_next_turn": False,  # reuse and forward passes are those of the requests alone
        "speculation": SPECULATION,
    }
    with pytest.MonkeyPatch.context() as patch:  # what the environment says would be read and not used
        patch.setattr(Settings, "settings_customise_sources", _what_is_given)
        launch = Launch(Settings(**(values | settings)), None, False, disk_cache, {})
    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        real = kvserve.app.server.web_settings
        changes = {"linger_seconds": 0.2, **(web or {})}
        patch.setattr(kvserve.app.server, "web_settings", lambda settings: replace(real(settings), **changes))
        app = Server(launch, Terminal(Console(file=screen, width=200)))
    under_test = AppUnderTest(app, screen, folder / "logs")
    with remembered_starts(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvserve.web.http_server, "_ACCEPT_POLL_SECONDS", 0.01)  # its end comes with a look
        for name in ("STREAMS_END_SECONDS", "ENGINE_STOP_SECONDS"):  # nobody waits for this one's end
            patch.setattr(kvserve.app.server, name, PATIENCE_SECONDS)
        try:
            yield under_test
        finally:
            app.stop()


@contextlib.contextmanager
def _counted(under_test: AppUnderTest) -> Iterator[None]:
    """Count the forward passes of the running model."""
    kind = type(under_test.model)
    real = kind.__call__

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        under_test.num_forward_calls += 1
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__call__", counting)
        yield


@contextlib.contextmanager
def writing(
    under_test: AppUnderTest, text: str, *, ends: bool = True, in_letters: bool = False
) -> Iterator[Mapping[str, Any]]:
    """Make the model write `text` (and its stop token) in requests that carry the yielded fields; `in_letters`: in
    other tokens than the tokenizer's.

    Everything is real but the draw: a logits processor leaves one token at each step.
    """
    tokenizer = under_test.served.tokenizer
    written = [token for part in (text if in_letters else (text,)) for token in tokenizer.encode(part)]
    script = [*written, *([min(tokenizer.stop_token_ids)] if ends else [])]
    real = decode_group.processors_for

    def processors_for(params: Any, num_prompt_tokens: int) -> list[Any]:
        if params.seed != SCRIPT_SEED:
            return real(params, num_prompt_tokens)

        def follow(tokens: mx.array, logits: mx.array) -> mx.array:
            position = len(tokens) - num_prompt_tokens
            if position >= len(script):
                return logits
            return mx.where(mx.arange(logits.shape[-1]) == script[position], logits, -mx.inf)

        return [follow]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_group, "processors_for", processors_for)
        yield {"seed": SCRIPT_SEED}


@contextlib.contextmanager
def no_tokens() -> Iterator[None]:
    """Running answers stand still behind their first token meanwhile, and everything else goes on: they are not over
    before what a test does beside them, however long its threads slept. Prompts may wait for first tokens."""

    def standing(step: Callable[[DecodePool], DecodeResult]) -> Callable[[DecodePool], DecodeResult]:
        def wait(pool: DecodePool) -> DecodeResult:
            if not all(row.generated for row in pool.rows()):
                return step(pool)
            time.sleep(0.002)
            return DecodeResult()

        return wait

    with pytest.MonkeyPatch.context() as patch:
        for name in ("step", "step_all"):
            patch.setattr(DecodePool, name, standing(getattr(DecodePool, name)))
        yield


@contextlib.contextmanager
def slow_prefill() -> Iterator[None]:
    """A chunk of prefill takes a moment: a prompt of many is not through before a test has seen that it has begun."""
    step, step_together = Prefill.step, prefill_pool.step_together

    def slow(prefill: Prefill, *arguments: Any) -> int:
        time.sleep(0.03)
        return step(prefill, *arguments)

    def slow_together(*arguments: Any) -> int:
        time.sleep(0.03)
        return step_together(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefill, "step", slow)
        patch.setattr(prefill_pool, "step_together", slow_together)
        yield


def chat_body(said: object = "Hello there.", **fields: Any) -> dict[str, Any]:
    """A greedy request of 16 tokens; `said` is the user's text or whole messages."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    plain = {"temperature": 0, "repetition_penalty": 1, "max_tokens": 16}
    return {"messages": messages, **plain, **fields}


def plain_body(path: str, **fields: Any) -> dict[str, Any]:
    """The shortest good body of an endpoint: greedy, one token."""
    plain = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT_PATH else {"prompt": "x"}
    return {**plain, "max_tokens": 1, "temperature": 0, **fields}


def serves(app: AppUnderTest) -> None:
    """A good request is answered: one step of prefill at most, one of decode."""
    assert app.post(CHAT_PATH, plain_body(CHAT_PATH)).status == 200


def is_error_form(response: Response) -> bool:
    """Whether an answer is an error as OpenAI writes it, of the type that goes with its status (400s and 500s)."""
    error = response.error
    assert set(error) == {"message", "type", "param", "code"} and set(response.json) == {"error"}
    assert isinstance(error["message"], str) and error["message"]
    assert error["type"] == ("invalid_request_error" if response.status < 500 else "server_error")
    return True


def chunks_of(response: Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended as it should."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.events
    assert events[-1] == "[DONE]", events[-1]
    return [json.loads(event) for event in events[:-1]]


def joined(chunks: Sequence[dict[str, Any]]) -> Chat:
    """What the chunks of a chat say together; checks their common form."""
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    finish_reason = usage = None
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            assert finish_reason is None, "a chunk after the end"
            reasoning += delta.get("reasoning_content", "")
            content += delta.get("content", "")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(calls) and call["id"].isalnum() and call["type"] == "function"
                    calls.append((call["function"]["name"], call["function"]["arguments"]))
                else:
                    assert call["index"] == len(calls) - 1
                    name, so_far = calls[-1]
                    calls[-1] = (name, so_far + call["function"]["arguments"])
            finish_reason = choice["finish_reason"]
    return Chat(reasoning, content, tuple(calls), finish_reason, *split_usage(usage))


def whole(body: Mapping[str, Any]) -> Chat:
    """What a chat answer that was not streamed says."""
    [choice] = body["choices"]
    message = choice["message"]
    assert message["role"] == "assistant"
    return Chat(
        message.get("reasoning_content") or "",
        message["content"] or "",
        tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])),
        choice["finish_reason"],
        *split_usage(body["usage"]),
    )


def split_usage(usage: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, int | None]:
    """Usage without its cached and its drafted tokens, and the cached ones."""
    if usage is None:
        return None, None
    rest = {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
    if (details := usage.get("completion_tokens_details")) is not None:
        said = {name: value for name, value in details.items() if not name.endswith("_prediction_tokens")}
        rest["completion_tokens_details"] = said
    return rest, int(usage["prompt_tokens_details"]["cached_tokens"])


def num_open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


__all__ = [
    "CHAT_PATH",
    "COMPLETION_PATH",
    "AppUnderTest",
    "Chat",
    "RawClient",
    "Response",
    "chat_body",
    "chunks_of",
    "encode_request",
    "eventually",
    "is_error_form",
    "joined",
    "no_tokens",
    "num_open_files",
    "plain_body",
    "serves",
    "serving_app",
    "slow_prefill",
    "unstarted_app",
    "whole",
    "writing",
]
