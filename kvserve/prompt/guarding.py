"""Makes a client's text safe for a chat template: marks control tokens that it spells out, wherever they are.

It knows which parts of steps, calls and tools are a client's; `control.py` knows the marks.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kvserve.core import ToolCallBlock, ToolSpec
from kvserve.prompt.call_arguments import parsed_arguments, plain_data
from kvserve.prompt.control import ControlTokens
from kvserve.prompt.steps import PromptStep, WireForm


def guarded_steps(steps: Sequence[PromptStep], form: WireForm, control: ControlTokens) -> Iterator[PromptStep]:
    """The steps of one or more messages with a client's spellings marked; the same objects where there are none."""
    for step in steps:
        text = _guarded_text(step, control)
        reasoning = control.marked(step.reasoning)
        calls = tuple(_guarded_call(call, form, control) for call in step.calls)
        ids_are_written = form.call_ids == "given"  # other ids are made anew, as digests of those sent
        call_id = control.marked(step.call_id) if ids_are_written else step.call_id
        call_name = control.marked(step.call_name)
        name = control.marked(step.name) if step.name is not None else None
        said = (text, reasoning, calls, call_id, call_name, name)
        if not step.own and said == (step.text, step.reasoning, step.calls, step.call_id, step.call_name, step.name):
            yield step
        else:
            text, reasoning, calls, call_id, call_name, name = said
            yield replace(
                step,
                text=text,
                reasoning=reasoning,
                calls=calls,
                call_id=call_id,
                call_name=call_name,
                name=name,
                own=(),
            )


def _guarded_text(step: PromptStep, control: ControlTokens) -> str:
    """The text of a step; the template's own words in it stay unmarked."""
    if step.kind in ("assistant", "calls"):
        return control.marked_answer(step.text)
    if not step.own:
        return control.marked_content(step.text)
    pieces, end = [], 0
    for start, stop in step.own:
        pieces += [control.marked_around_images(step.text[end:start]), step.text[start:stop]]
        end = stop
    return "".join([*pieces, control.marked_around_images(step.text[end:])])


def guarded_tools(tools: Sequence[ToolSpec], control: ControlTokens) -> tuple[ToolSpec, ...]:
    """The tools with all text guarded. They are searched as one JSON text first: that takes a third of the time, and
    most tools spell no token."""
    said = [(tool.name, tool.description, tool.parameters) for tool in tools]
    if not control.is_spelt_in_json(json.dumps(said, ensure_ascii=False, default=plain_data)):
        return tuple(tools)
    return tuple(
        replace(
            tool,
            name=control.marked(tool.name),
            description=control.marked(tool.description) if tool.description is not None else None,
            parameters=_guarded_object(tool.parameters, control),
        )
        for tool in tools
    )


def guarded_data(value: object, control: ControlTokens) -> object:
    """A JSON value with each of its strings and keys guarded."""
    if isinstance(value, str):
        return control.marked(value)
    if isinstance(value, Mapping):
        return _guarded_object(value, control)
    if isinstance(value, list | tuple):
        return [guarded_data(item, control) for item in value]
    return value


def _guarded_object(value: Mapping[str, object], control: ControlTokens) -> dict[str, object]:
    return {control.marked(str(key)): guarded_data(item, control) for key, item in value.items()}


def _guarded_call(call: ToolCallBlock, form: WireForm, control: ControlTokens) -> ToolCallBlock:
    """A guarded call: its arguments as text if the template takes text, else the values of their JSON."""
    call_id = control.marked(call.call_id) if form.call_ids == "given" else call.call_id
    arguments = control.marked(call.arguments)
    if not form.arguments_as_text and (arguments != call.arguments or "\\" in arguments):
        parsed = parsed_arguments(call.arguments)
        if parsed is not None:
            guarded = _guarded_object(parsed, control)
            arguments = call.arguments if guarded == parsed else json.dumps(guarded, ensure_ascii=False)
    name = control.marked(call.name)
    if (call_id, name, arguments) == (call.call_id, call.name, call.arguments):
        return call
    return ToolCallBlock(call_id, name, arguments)
