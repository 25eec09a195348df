"""The column of the template matrix for closed loops: six turns over HTTP with a tiny real model whose draws are led.

The model writes the template's own form in odd tokens; its client sends back what it got. From the second turn on all
that was read and written before must be found again, as far as the template leaves it in the next prompt.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.led_server import LedServer, led_server
from benchmarks.model_free import Script, text_of
from benchmarks.recordings import Reply
from benchmarks.template_calls import TOOLS
from benchmarks.template_cases import call, result, user
from benchmarks.template_cell import Cell, Dropped, Judged, judged
from benchmarks.template_folders import (
    SHARED,
    WHOLE_VOCABULARIES,
    add_weights,
    control_tokens_of,
    source_of,
    whole_folder,
)
from benchmarks.template_model import Model, load_model
from benchmarks.template_reference import Conversation, NotRendered, Reference, Wire
from benchmarks.template_replay import as_the_model_writes, moved, num_common
from benchmarks.template_turns import odd_ids, opens_thinking, spoken
from kvserve.demo import build
from kvserve.demo.families import FAMILIES, Family, ModelScale

SMALLEST = ModelScale(num_layers=2, num_heads=1, num_kv_heads=1)
NUM_OPEN_TOKENS = 2
"""The last token that was drawn was not read, and the last of a prompt is read once more."""


def _look(number: int) -> Wire:
    return call(f"call{number}aaaa", "read_file", {"path": f"src/a  b{number}.py", "lines": 10 + number})


TURNS: tuple[tuple[str, Wire], ...] = (
    ("call", spoken(None, _look(1))),
    ("parallel calls", spoken(None, _look(2), _look(3))),
    ("text before a call", spoken("I look at it.", _look(4))),
    ("answer to a result", spoken("It has twelve lines.")),
    ("answer", spoken("# Title\n\n- one  two\n  - three")),
    ("another answer", spoken("It is fine, so far.")),
)
"""What the model says, by what it is; a template that cannot write several calls or words before one says one call."""


@dataclass
class Loop:
    """One conversation with a running server: what its client holds, what the model read and wrote."""

    server: LedServer
    model: Model
    reference: Reference
    messages: list[Wire] = field(default_factory=lambda: [user("Do it.")])
    prompt: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    failure: str | None = None
    instead: str | None = None
    """What the model says in the place of a turn that its template cannot write."""

    def turn(self, turn: Wire, number: int) -> tuple[Wire, int]:
        """The model says a turn: the message that its client gets, and how many tokens of the prompt were found."""
        body: dict[str, Any] = {"messages": self.messages, "tools": list(TOOLS[:1]), "max_tokens": 4_096}
        answer = self.server.answer(
            body | {"enable_thinking": False}, lambda prompt: self._script(prompt, turn, number)
        )
        message = answer["choices"][0]["message"]
        return message, answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def _script(self, prompt: Sequence[int], turn: Wire, number: int) -> Script:
        self.prompt = tuple(prompt)
        self.instead = None
        opens = opens_thinking(self.model, self.model.tokenizer.decode(self.prompt[-16:]))
        text = as_the_model_writes(self.model, self.reference, turn, TOOLS[:1], opens_reasoning=opens)
        if isinstance(text, NotRendered):
            plain = _plainer(turn)
            self.instead = f"one call alone is said: {text.reason}" if plain != turn else None
            text = as_the_model_writes(self.model, self.reference, plain, TOOLS[:1], opens_reasoning=opens)
        if isinstance(text, NotRendered) and turn.get("tool_calls"):  # no words for calls: the server's own
            self.instead = f"said in the server's own form of calls: {text.reason}"
            text = text_of(self.server.served, prompt, _reply(turn))
        if isinstance(text, NotRendered):
            self.failure, text = text.reason, "It is so."
        self.written = odd_ids(self.model, text, number)
        return Script(self.written, min(self.model.tokenizer.stop_token_ids))


def _plainer(turn: Wire) -> Wire:
    """One call and no words, where a template writes no more."""
    calls = turn.get("tool_calls") or ()
    return {**turn, "content": None, "tool_calls": list(calls[:1])} if calls else turn


def _reply(turn: Wire) -> Reply:
    calls = tuple((each["function"]["name"], each["function"]["arguments"]) for each in turn["tool_calls"])
    return Reply(content=turn["content"] or "", calls=calls)


def loop_cells(server: LedServer, model: Model, reference: Reference) -> Iterator[Cell]:
    """One cell for each turn but the first: whether all before it was found again."""
    loop, kept, num_said = Loop(server, model, reference), tuple[int, ...](), 0
    for number, (name, turn) in enumerate(TURNS):
        try:
            message, num_cached = loop.turn(turn, number)
        except Exception as error:  # noqa: BLE001  # the other templates go on
            yield Cell("loops", name, "miss", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            return
        if loop.failure is not None:
            yield Cell("loops", name, "not counted", loop.failure)
            return
        if loop.instead is not None:
            yield Cell("loops", f"{name}, as it is", "not counted", loop.instead)
        if number:
            before, said = kept, num_said
            yield judged("loops", name, lambda: _judge(loop, before, num_cached, said))  # noqa: B023  # judged at once
        kept, num_said = loop.prompt + loop.written, len(loop.messages)
        loop.messages.append({key: value for key, value in message.items() if value is not None})
        calls = message.get("tool_calls") or ()
        if bool(calls) != bool(turn.get("tool_calls")):
            yield Cell("loops", name, "miss", f"{len(calls)} calls are read of this turn: the loop ends")
            return
        loop.messages += [result(each["id"], f"result {number}") for each in calls] or [user(f"And then, {number}?")]


def _judge(loop: Loop, kept: Sequence[int], num_cached: int, num_said: int) -> Judged:
    """Whether what was kept of the turn before is found again, as far as the template leaves it where it was."""
    same = num_common(kept, loop.prompt)
    if num_cached < min(same, len(loop.prompt) - 1) - NUM_OPEN_TOKENS:
        return f"{num_cached} tokens are found of {same} that are the same"
    if same == len(kept):
        return None
    tools = TOOLS[:1]
    leaves = moved(loop.model, loop.reference, Conversation(tuple(loop.messages), tools), num_said)
    # by length: the ids of calls are the server's here, and as long as those of the reference
    if leaves is not None and len(loop.model.tokenizer.decode(loop.prompt[:same])) >= len(leaves):
        return Dropped("the template changes what stands before the turn")
    return f"{len(kept) - same} of {len(kept)} tokens that were read and written are not in the next prompt"


def cells_of(name: str) -> tuple[Cell, ...]:
    """The cells of a real template, on a model that is built for it."""
    with _looping_template(name) as (server, model, reference):
        return tuple(loop_cells(server, model, reference))


@contextlib.contextmanager
def _looping_template(name: str) -> Iterator[tuple[LedServer, Model, Reference]]:
    if name in WHOLE_VOCABULARIES:
        with tempfile.TemporaryDirectory(prefix="kvserve-loop-") as scratch, _whole(name, Path(scratch)) as served:
            yield served
        return
    control = control_tokens_of(name, source_of(name))
    assert SHARED is not None, "source_of raises before"
    family = replace(FAMILIES["qwen3"], name=name, control=control, template=str(SHARED / "templates" / name))
    with looping(family) as served:
        yield served


@contextlib.contextmanager
def looping(family: Family) -> Iterator[tuple[LedServer, Model, Reference]]:
    """A running server with the smallest model of a family, and what judges it."""
    with tempfile.TemporaryDirectory(prefix="kvserve-loop-") as scratch:
        with mock.patch.dict(build.ALL_FAMILIES, {family.name: family}):
            folder = build.build_model(family.name, Path(scratch) / "model", scale=SMALLEST, answer_tokens=None)
        with _served(folder, Path(scratch)) as served:
            yield served


def _whole(name: str, scratch: Path) -> AbstractContextManager[tuple[LedServer, Model, Reference]]:
    return _served(add_weights(whole_folder(name, scratch)), scratch)


@contextlib.contextmanager
def _served(folder: Path, scratch: Path) -> Iterator[tuple[LedServer, Model, Reference]]:
    model, reference = load_model(folder), Reference(folder)
    with led_server(folder, scratch) as server:
        yield server, model, reference
