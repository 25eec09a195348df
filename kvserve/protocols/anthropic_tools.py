"""Tools, which of them must be called, and the form of the content, as Anthropic spells it -> nouns."""

import json

from kvserve.core import ResponseFormat, ToolChoice, ToolSpec
from kvserve.errors import BadRequest
from kvserve.protocols.fields import Fields, filled_text, flag, list_of, mapping, mistyped, single_keys, text, word
from kvserve.protocols.json_schema import read_schema
from kvserve.protocols.openai_tools import read_parameters, tool_name
from kvserve.protocols.renaming import FieldNames


def read_tools(fields: Fields) -> tuple[ToolSpec, ...]:
    """`tools`, in the client's order. Raises BadRequest, also for tools that would run on the server."""
    return tuple(fields.optional("tools", list_of(_read_tool)) or ())


def _read_tool(value: object, path: str) -> ToolSpec:
    tool = mapping(value, path)
    kind = tool.optional("type", text) or "custom"
    if kind != "custom":
        raise mistyped(f"{path}.type", '"custom" (tools of the server are not offered here)', kind)
    return ToolSpec(
        name=tool.required("name", tool_name),
        description=_description(tool),
        parameters=tool.required("input_schema", read_parameters),
        strict=tool.optional("strict", flag) or False,
    )


def _description(tool: Fields) -> str | None:
    """The description, and behind it the examples of input: no chat template has a place of its own for them."""
    described = tool.optional("description", text)
    examples = [example.values for example in tool.optional("input_examples", list_of(single_keys)) or ()]
    if not examples:
        return described
    lines = "\n".join(json.dumps(example, ensure_ascii=False) for example in examples)
    return "\n\n".join(part for part in (described, f"Examples of input:\n{lines}") if part)


def read_tool_choice(fields: Fields, tools: tuple[ToolSpec, ...]) -> tuple[ToolChoice, bool]:
    """`tool_choice`, and whether several calls at once are allowed.

    Raises BadRequest, also for a choice that `tools` cannot meet.
    """
    choice = fields.optional("tool_choice", mapping)
    if choice is None:
        return ToolChoice(), True
    is_parallel = not (choice.optional("disable_parallel_tool_use", flag) or False)
    match choice.required("type", word("auto", "any", "tool", "none")):
        case "any":
            if not tools:
                raise BadRequest(f'{choice.path} is "any", but the request has no tools.', param=choice.path)
            return ToolChoice("required"), is_parallel
        case "tool":
            name = choice.required("name", filled_text)
            if name not in [tool.name for tool in tools]:
                raise BadRequest(f"{choice.path}.name is not among the request's tools.", param=f"{choice.path}.name")
            return ToolChoice("function", name), is_parallel
        case "none":
            return ToolChoice("none"), is_parallel
    return ToolChoice(), is_parallel


def read_response_format(fields: Fields) -> ResponseFormat:
    """`output_config.format`, or the older `output_format`: JSON that obeys a schema, strictly: this API promises no
    less. Raises BadRequest."""
    said = _format(fields)
    if said is None:
        return ResponseFormat()
    said.required("type", word("json_schema"))
    return ResponseFormat("json_schema", said.required("schema", read_schema), strict=True)


def _format(fields: Fields) -> Fields | None:
    config = fields.optional("output_config", mapping)
    return (config and config.optional("format", mapping)) or fields.optional("output_format", mapping)


def field_names(fields: Fields) -> FieldNames:
    """What the schemas are called in a body that was read without an error."""
    said, tools = _format(fields), fields.optional("tools", list_of(mapping)) or []
    parameters = tuple(f"{tool.path}.input_schema" for tool in tools)
    if said is None:
        return FieldNames(parameters=parameters)
    return FieldNames(schema=f"{said.path}.schema", parameters=parameters)
