"""Writes calls as text, instructions for calls and whole conversations, for templates without a place for them, in the
template's own form.

It does not know where the text goes. Without a form of the template's own it uses that of Hermes models, which is
always read.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvserve.core import CallParts, CallRow, CallSlot, PairParts, ToolCallBlock, ToolSpec
from kvserve.prompt.call_arguments import parsed_arguments
from kvserve.prompt.steps import (
    ROLES,
    PromptStep,
    function_dict,
    hermes_call,
    hermes_result,
    named,
)

FUNCTION, ARGUMENT, VALUE = "FUNCTION", "ARGUMENT", "VALUE"
IDS = ("firstid01", "secondid2")
"""Placeholders for a function, an argument, its value and the ids of two calls in an example of a call."""

EXAMPLES = tuple(ToolCallBlock(call_id, FUNCTION, json.dumps({ARGUMENT: VALUE})) for call_id in IDS)


@dataclass(frozen=True, slots=True)
class CallWords:
    """One template's calls in words. `row`: the form of its calls, if known; else `example` is its rendering of the
    first of `EXAMPLES`, if it writes calls."""

    row: CallRow | None = None
    example: str | None = None

    def calls(self, calls: Sequence[ToolCallBlock]) -> str:
        """The calls of a message as text."""
        if self.row is None:
            return "\n".join(map(hermes_call, calls))
        if self.row.between is None:
            return "\n".join(_row_calls(self.row, [call]) for call in calls)
        return _row_calls(self.row, calls)

    def tools(self, tools: Sequence[ToolSpec]) -> str:
        """The tools described in words, and instructions for calls."""
        lines = "\n".join(json.dumps(function_dict(tool), ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nThe functions below can be called. "
            f"Each line between <tools> and </tools> describes one as JSON.\n<tools>\n{lines}\n</tools>\n\n"
            f"To call one, write it like this call of {FUNCTION}, which gives {ARGUMENT} the value {VALUE}"
            f"{self._on_ids()}:\n{self._examples()}\nIts result follows."
        )

    def _examples(self) -> str:
        if self.example is not None:
            return self.example
        one = self.calls(EXAMPLES[:1])
        if self.row is None or self.row.between is None:
            return one
        return f"{one}\nTwo calls at once are written like this:\n{self.calls(EXAMPLES)}"

    def _on_ids(self) -> str:
        has_ids = self.row is not None and any(CallSlot.ID in parts for parts in (self.row.middle, self.row.closing))
        return f" ({IDS[0]} stands for an id, which is another one in each call)" if has_ids else ""


HERMES = CallWords()


def transcript(steps: Iterable[PromptStep], say_calls: Callable[[Sequence[ToolCallBlock]], str]) -> str:
    """The steps as plain text, each part under a label; it needs no template."""
    parts: list[str] = []
    for step in steps:
        said = [named("", step.name).rstrip()] if step.name else []
        said += [f"[thinking]\n{step.reasoning}"] if step.reasoning else []
        if step.kind in ("result", "orphan"):
            said.append(hermes_result(step.text))
        elif step.text:
            said.append(step.text)
        said += [say_calls(step.calls)] if step.calls else []
        parts.append("\n".join([f"[{ROLES[step.kind]}]", *said]))
    return "\n\n".join(parts)


def _row_calls(row: CallRow, calls: Sequence[ToolCallBlock]) -> str:
    """The calls of one message, from their opening to their closing text."""
    said: list[str] = []
    for number, call in enumerate(calls):
        lead = row.opening if number == 0 else row.between or ()
        # an id behind the arguments belongs to the call before, one behind the name to this one
        before = calls[number - 1] if number else call
        said += [_said(lead, before, number), call.name, _said(row.middle, call, number), _arguments(row, call)]
    return "".join([*said, _said(row.closing, calls[-1], len(calls) - 1)])


def _said(parts: CallParts, call: ToolCallBlock, number: int) -> str:
    slots = {CallSlot.ID: call.call_id, CallSlot.NUMBER: str(number)}
    return "".join(part if isinstance(part, str) else slots[part] for part in parts)


def _arguments(row: CallRow, call: ToolCallBlock) -> str:
    arguments = parsed_arguments(call.arguments)
    if arguments is None:
        return call.arguments
    if row.pairs is not None:
        members = row.pairs.spelling.in_order(arguments).items()
        return row.pairs.between.join(_pair(row.pairs, key, value) for key, value in members)
    return json.dumps(arguments, ensure_ascii=False)


def _pair(pairs: PairParts, key: str, value: object) -> str:
    return f"{pairs.opening}{key}{pairs.lead_of(value)}{pairs.spelling.written(value)}{pairs.closing}"
