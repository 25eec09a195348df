"""Recorded answers as the model of a real template writes them: its own form of thinking and calls, in odd tokens.

Where a template cannot write all of an answer, its model says what it can write of it; where it has no words for calls,
it is told the server's own. It judges nothing.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.model_free import ModelFree, Script, stop_token, text_of
from benchmarks.recordings import Reply
from benchmarks.template_cases import call, tool
from benchmarks.template_model import Model
from benchmarks.template_reference import NotRendered, Reference, Wire
from benchmarks.template_replay import as_the_model_writes
from benchmarks.template_turns import odd_ids, opens_thinking, spoken
from kvserve.requests.served_model import ServedModel

TAIL_TOKENS = 16

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def write_natively(model: ModelFree, folder: Path) -> "NativeScripts":
    """Have a served model write all of its answers so."""
    scripts = NativeScripts(model.model, Reference(folder))
    model.write = scripts
    return scripts


class NativeScripts:
    """What one model writes, answer by answer."""

    def __init__(self, model: Model, reference: Reference) -> None:
        self._model = model
        self._reference = reference
        self._num_written = 0

    def __call__(self, served: ServedModel, prompt: Sequence[int], reply: Reply) -> Script:
        """The ids of an answer behind this prompt, no two of them cut alike."""
        decode = self._model.tokenizer.decode
        said = self.sayable(reply)
        text = self._text(said, opens_reasoning=opens_thinking(self._model, decode(prompt[-TAIL_TOKENS:])))
        if isinstance(text, NotRendered):  # no words for calls
            text = text_of(served, prompt, said)
        self._num_written += 1
        ids = odd_ids(self._model, text, self._num_written)
        return Script(ids, stop_token(served.tokenizer, bool(said.calls)))

    def sayable(self, reply: Reply) -> Reply:
        """As much of an answer as the template can write; all but the thinking where it has no words for calls."""
        thoughtless = replace(reply, reasoning="")
        for said in (reply, *_less_of(thoughtless)):
            if not isinstance(self._text(said, opens_reasoning=False), NotRendered):
                return said
        return thoughtless

    def _text(self, reply: Reply, *, opens_reasoning: bool) -> str | NotRendered:
        calls = [(name, json.loads(arguments or "{}")) for name, arguments in reply.calls]
        said = spoken(
            reply.content or None,
            *(call(f"call{place}aaaa", name, arguments) for place, (name, arguments) in enumerate(calls)),
            reasoning=reply.reasoning or None,
        )
        tools = tools_of(reply)
        return as_the_model_writes(self._model, self._reference, said, tools, opens_reasoning=opens_reasoning)


def _less_of(reply: Reply) -> Iterator[Reply]:
    """An answer, without the words beside its calls, and with one of them alone."""
    yield reply
    if reply.calls:
        yield replace(reply, content="")
        yield replace(reply, content="", calls=reply.calls[:1], call_ids=reply.call_ids[:1])


def tools_of(reply: Reply) -> tuple[Wire, ...]:
    """Tools that an answer's calls can call."""
    called = {name: json.loads(arguments or "{}") for name, arguments in reply.calls}
    return tuple(_tool(name, arguments) for name, arguments in called.items())


def _tool(name: str, arguments: dict[str, Any]) -> Wire:
    """A tool that takes these arguments."""
    types = {key: _TYPES.get(type(value), "string") for key, value in arguments.items()}
    return tool(name, f"It is {name}.", {key: {"type": kind, "description": key} for key, kind in types.items()})
