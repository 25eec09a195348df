"""What a warm turn costs before the model begins: body parsed, recognised, rendered, stitched, hashed and looked up.

A tool loop of 338 messages and about 100k tokens is led turn by turn through the server's own path without a model; the
measure is rendering and tokenising that history whole, which a server without records does each time.
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

from benchmarks.client import BenchmarkError
from benchmarks.figure import Bound, Figure
from benchmarks.model_free import ModelFree
from benchmarks.recordings import REPOSITORY, Reply, Request, Wire
from benchmarks.reuse_oracle import CONVENTIONS
from benchmarks.rig import rounds
from kvserve.core import RequestId
from kvserve.demo.build import build_model
from kvserve.protocols.openai_chat import parse_chat

NUM_MESSAGES = 338
HISTORY_BYTES = 198_000
SYSTEM_BYTES = 20_000
REPLY_BYTES = 300
FAMILIES = ("qwen3", "qwen3_5")
TOOL: Wire = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}},
    },
}


class Loop:
    """A tool loop whose requests grow by a call and its result until the history is complete."""

    def __init__(self) -> None:
        text = "\n".join(file.read_text("utf-8") for file in sorted(REPOSITORY.glob("kvserve/**/*.py")))
        self._text = text.replace("<", "(")  # no tags and no special tokens
        self._at = 0
        self._messages: list[Wire] = [
            {"role": "system", "content": self._words(SYSTEM_BYTES)},
            {"role": "user", "content": "Read all of it."},
        ]

    def requests(self) -> Iterator[Request]:
        """Every request up to the history, each with its answer."""
        num_turns = (NUM_MESSAGES - len(self._messages)) // 2
        result_bytes = (HISTORY_BYTES - SYSTEM_BYTES) // num_turns - REPLY_BYTES
        for number in range(num_turns):
            arguments = {"path": f"part/{number}.py", "limit": number}
            reply = Reply(self._words(200), self._words(60).strip(), (("read", json.dumps(arguments)),))
            yield Request(self.body(), reply)
            self._messages.append(_echo(reply, f"call{number}"))
            result = self._words(result_bytes)
            self._messages.append({"role": "tool", "tool_call_id": f"call{number}", "content": result})

    def body(self, newest: str | None = None) -> Wire:
        """The request as it stands, or with another text in its newest result."""
        messages = list(self._messages)
        if newest is not None:
            messages[-1] = messages[-1] | {"content": newest}
        return {"model": "loop", "messages": messages, "tools": [TOOL], "stream": True, "session_id": "loop"}

    def _words(self, num_bytes: int) -> str:
        self._at += num_bytes
        return (self._text * 2)[self._at - num_bytes : self._at]


class Turns:
    """A conversation that a server knows, and its next turn, again and again with other words."""

    def __init__(self, family: str, folder: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._model = ModelFree(folder, is_cuttable=CONVENTIONS[family].is_cuttable)
        self._loop = Loop()
        self._numbers = count(NUM_MESSAGES)
        for number, request in enumerate(self._loop.requests()):
            self.num_tokens = self._model.serve(request, number).num_prompt_tokens
        gc.freeze()

    def own_seconds(self) -> float:
        """From the bytes of a body to the row that knows where its prefill begins."""
        number = next(self._numbers)
        request = Request(self._loop.body(f"part {number} is as long as the one before\n" * 20), None)
        body = json.dumps(request.body).encode()
        started = self._clock()
        running = self._model.start(body, request, number)
        seconds = self._clock() - started
        told = self._model.end(running)
        if told.num_cached_tokens < 0.99 * self.num_tokens:
            raise BenchmarkError(f"only {told.num_cached_tokens} of {told.num_prompt_tokens} tokens were known")
        if told.num_replayed_turns < NUM_MESSAGES // 2 - 1:
            raise BenchmarkError(f"only {told.num_replayed_turns} of the model's turns were its own")
        return seconds

    def whole_seconds(self) -> float:
        """The same history from messages to text and ids, all of it."""
        served = self._model.served
        turn = parse_chat(self._loop.body(), {}, served.defaults, RequestId("whole")).turn
        started = time.perf_counter()
        text = served.template.write(turn.messages, turn.tools, thinking=True, preserve_thinking=True).text
        served.tokenizer.encode(text)
        return time.perf_counter() - started


def run(num_rounds: int) -> list[Figure]:
    """Own time of a warm turn : rendering and tokenising its history whole."""
    return [_figure(family, num_rounds) for family in FAMILIES]


def _figure(family: str, num_rounds: int) -> Figure:
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        turns = Turns(family, build_model(family, Path(scratch) / "model"))
        own, whole = rounds(num_rounds, turns.own_seconds, turns.whole_seconds)
    return Figure(
        "own_turn",
        f"a warm turn's own time : rendering and tokenising {turns.num_tokens:,} tokens, {family}",
        "",
        tuple(mine / theirs for mine, theirs in zip(own, whole, strict=True)),
        Bound("at most", 0.25),
        f"{_ms(own)} : {_ms(whole)}",
    )


def _ms(seconds: Sequence[float]) -> str:
    return f"{sorted(seconds)[len(seconds) // 2] * 1e3:.1f} ms"


def _echo(reply: Reply, call_id: str) -> Wire:
    """An answer as PI sends it back: compact arguments, the thinking kept."""
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(json.loads(arguments), separators=(",", ":"))},
        }
        for name, arguments in reply.calls
    ]
    return {"role": "assistant", "content": reply.content, "reasoning_content": reply.reasoning, "tool_calls": calls}
