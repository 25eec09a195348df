"""What a warm turn costs before the model begins: body parsed, recognised, rendered, stitched, hashed and looked up.

A tool loop of 338 messages and about 100k tokens is led turn by turn through the server's own path without a model; the
measure is rendering and tokenising that history whole, which a server without records does each time. Both in processor
time. Two demo families, and real vocabularies with their templates, whose models write their own form in odd tokens.
"""

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from benchmarks.client import BenchmarkError
from benchmarks.figure import Bound, Figure
from benchmarks.model_free import ModelFree
from benchmarks.recordings import REPOSITORY, Reply, Request, Wire
from benchmarks.reuse_oracle import CONVENTIONS
from benchmarks.rig import rounds
from benchmarks.template_folders import SHARED, WHOLE_VOCABULARIES, whole_folder
from benchmarks.template_scripts import write_natively
from kvserve.core import RequestId, Turn
from kvserve.demo.build import build_model
from kvserve.output.said import MessageReader
from kvserve.protocols.openai_chat import parse_chat
from kvserve.requests.prompt_of_turn import stitch

NUM_MESSAGES = 338
HISTORY_BYTES = 198_000
WHOLE_HISTORY_BYTES = 390_000
"""A whole vocabulary has a token for more of it."""

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
    """A tool loop whose requests grow by a call and its result until the history is complete. `sayable` is what of an
    answer its model can write."""

    def __init__(
        self, history_bytes: int = HISTORY_BYTES, sayable: Callable[[Reply], Reply] = lambda reply: reply
    ) -> None:
        self._history_bytes = history_bytes
        self._sayable = sayable
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
        result_bytes = (self._history_bytes - SYSTEM_BYTES) // num_turns - REPLY_BYTES
        for number in range(num_turns):
            arguments = {"path": f"part/{number}.py", "limit": number}
            thought, said = self._words(200), self._words(60).strip()
            reply = self._sayable(Reply(thought, said, (("read", json.dumps(arguments)),)))
            yield Request(self.body(), reply)
            self._messages.append(_echo(reply, f"call{number}"))
            result = self._words(result_bytes)
            self._messages.append({"role": "tool", "tool_call_id": f"call{number}", "content": result})

    def turn(self, number: int) -> tuple[Request, Request]:
        """A turn behind the history: a request with a newest result of its own and the answer to it, and the next one,
        which gives that answer back with another result. It leaves no trace in the history."""
        newest = f"part {number} is as long as the one before\n" * 20
        arguments = {"path": f"later/{number}.py", "limit": number}
        said = Reply(f"A thought on {number}. " * 10, f"So I read {number}.", (("read", json.dumps(arguments)),))
        reply, asked = self._sayable(said), self.body(newest)
        echoed = [_echo(reply, f"call{number}"), {"role": "tool", "tool_call_id": f"call{number}", "content": newest}]
        return Request(asked, reply), Request(asked | {"messages": [*asked["messages"], *echoed]}, None)

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
    """A conversation that a server knows, and its next turn, again and again with other words: the answer before it has
    just been written, and comes back for the first time."""

    def __init__(self, model: ModelFree, loop: Loop) -> None:
        self._model = model
        self._loop = loop
        self._numbers = count(NUM_MESSAGES)
        for number, request in enumerate(self._loop.requests()):
            self.num_tokens = self._model.serve(request, number).num_prompt_tokens
        gc.freeze()

    @classmethod
    def of(cls, family: str, root: Path) -> "Turns":
        """Of a demo family, or of a real vocabulary. Harmony's models say no words beside a call here: its template
        writes these as a last answer, and leaves out all thinking before one."""
        if family not in WHOLE_VOCABULARIES:
            folder = build_model(family, root / "model")
            return cls(ModelFree(folder, is_cuttable=CONVENTIONS[family].is_cuttable), Loop())
        folder = whole_folder(family, root)
        model = ModelFree(folder, is_cuttable=True)
        scripts = write_natively(model, folder)
        is_wordless = model.served.output_format.channels == "harmony"

        def sayable(reply: Reply) -> Reply:
            return scripts.sayable(replace(reply, content="") if is_wordless else reply)

        return cls(model, Loop(WHOLE_HISTORY_BYTES, sayable))

    def own_seconds(self) -> float:
        """From the bytes of a body to the row that knows where its prefill begins."""
        number = next(self._numbers)
        before, request = self._loop.turn(number)
        self._model.serve(before, number)
        body = json.dumps(request.body).encode()
        started = time.thread_time()
        running = self._model.start(body, request, number)
        seconds = time.thread_time() - started
        told = self._model.end(running)
        if told.num_cached_tokens < 0.99 * self.num_tokens:
            raise BenchmarkError(f"only {told.num_cached_tokens} of {told.num_prompt_tokens} tokens were known")
        if told.num_replayed_turns < NUM_MESSAGES // 2:
            raise BenchmarkError(f"only {told.num_replayed_turns} of the model's turns were its own")
        return seconds

    def whole_seconds(self) -> float:
        """The same history from messages to text and ids, all of it."""
        served, turn = self._model.served, self._turn()
        started = time.thread_time()
        text = served.template.write(turn.messages, turn.tools, thinking=True, preserve_thinking=True).text
        served.tokenizer.encode(text)
        return time.thread_time() - started

    def stitch_seconds(self) -> float:
        """The ids of the known history's text, the model's own turns in it as they were written."""
        served, turn = self._model.served, self._turn()
        reading = served.conversations.read(turn)
        text, _ = stitch(turn, reading, served)
        says = MessageReader.under(served.output_format, turn.tools)
        started = time.thread_time()
        served.stitcher.tokens(text, reading.written_messages, says)
        return time.thread_time() - started

    def tokenise_seconds(self) -> float:
        """The ids of the same text, with nothing known of it."""
        served, turn = self._model.served, self._turn()
        text = stitch(turn, served.conversations.read(turn), served)[0].shown
        started = time.thread_time()
        served.tokenizer.encode(text)
        return time.thread_time() - started

    def _turn(self) -> Turn:
        return parse_chat(self._loop.body(), {}, self._model.served.defaults, RequestId("whole")).turn


def run(num_rounds: int) -> list[Figure]:
    """Own time of a warm turn : rendering and tokenising its history whole; stitching that history : tokenising it."""
    if SHARED is None:
        print("own_turn: there are no real vocabularies here, only demo families are measured", file=sys.stderr)
    families = (*FAMILIES, *(WHOLE_VOCABULARIES if SHARED is not None else ()))
    return [figure for family in families for figure in _figures(family, num_rounds)]


def _figures(family: str, num_rounds: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        turns = Turns.of(family, Path(scratch))
        own, whole, stitching, tokenising = rounds(
            num_rounds, turns.own_seconds, turns.whole_seconds, turns.stitch_seconds, turns.tokenise_seconds
        )
    known = f"{turns.num_tokens:,} tokens, {family}"
    yield _figure(f"a warm turn's own time : rendering and tokenising {known}", own, whole, Bound("at most", 0.25))
    yield _figure(f"stitching a known history : tokenising {known}", stitching, tokenising, None)


def _figure(name: str, own: Sequence[float], whole: Sequence[float], bound: Bound | None) -> Figure:
    shares = tuple(mine / theirs for mine, theirs in zip(own, whole, strict=True))
    return Figure("own_turn", name, "", shares, bound, f"{_ms(own)} : {_ms(whole)}")


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
