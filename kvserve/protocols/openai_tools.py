"""Parses the tools, tool choice and response format of OpenAI chat.

The legacy pair `functions` / `function_call` equals `tools` / `tool_choice`, with one call at a time.
"""

import re
from dataclasses import replace

from kvserve.core import JsonObject, ResponseFormat, ToolChoice, ToolSpec
from kvserve.errors import BadRequest
from kvserve.protocols.fields import FieldNames, Fields, filled_text, flag, list_of, mapping, mistyped, text, word
from kvserve.protocols.json_schema import read_schema

_TOOL_NAME = re.compile(r"""[^\s<>{}"'`]{1,128}""")
_NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}}


def read_tools(fields: Fields) -> tuple[ToolSpec, ...]:
    """`tools` or the legacy `functions`, in the client's order. Raises BadRequest."""
    tools = fields.optional("tools", list_of(_read_tool))
    functions = fields.optional("functions", list_of(read_function))
    if tools and functions:
        raise BadRequest("functions and tools are both given: give one of them.", param="functions")
    return tuple(tools or functions or ())


def gives_functions(fields: Fields) -> bool:
    """Whether the request's tools are the legacy `functions`."""
    return bool(fields.optional("functions", list_of(mapping))) and not fields.optional("tools", list_of(mapping))


def _read_tool(value: object, path: str) -> ToolSpec:
    tool = mapping(value, path)
    kind = tool.optional("type", text) or "function"
    if kind != "function":
        raise mistyped(f"{path}.type", '"function" (no other kind of tool is supported)', kind)
    return tool.required("function", read_function)


def read_function(value: object, path: str) -> ToolSpec:
    """Name, description, parameters and strictness of one function. Raises BadRequest."""
    function = mapping(value, path)
    parameters = function.optional("parameters", read_parameters)
    return ToolSpec(
        name=function.required("name", tool_name),
        description=function.optional("description", text),
        parameters=_NO_PARAMETERS if parameters is None else parameters,
        strict=function.optional("strict", flag),
    )


def tool_name(value: object, path: str) -> str:
    """A name that every call form can write: no white space, quotes, braces, < or >."""
    name = filled_text(value, path)
    if not _TOOL_NAME.fullmatch(name):
        raise mistyped(path, "a name of at most 128 characters without white space, quotes, braces, < and >", name)
    return name


def read_parameters(value: object, path: str) -> JsonObject:
    """The JSON schema of a function's arguments, which are an object. Raises BadRequest."""
    schema = read_schema(value, path)
    kinds = schema.get("type")
    if kinds is not None and kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise mistyped(f"{path}.type", '"object"', kinds)
    return schema


def read_tool_choice(fields: Fields, tools: tuple[ToolSpec, ...]) -> ToolChoice:
    """`tool_choice` or the legacy `function_call`. Raises BadRequest, also if `tools` cannot meet the choice."""
    choice = fields.optional("tool_choice", _read_choice)
    legacy = fields.optional("function_call", _read_legacy_choice)
    if choice and legacy:
        raise BadRequest("function_call and tool_choice are both given: give one of them.", param="function_call")
    param = "function_call" if legacy else "tool_choice"
    choice = choice or legacy or ToolChoice()
    if choice.mode == "required" and not tools:
        raise BadRequest(f'{param} is "required", but the request has no tools.', param=param)
    if choice.mode == "function" and choice.name not in [tool.name for tool in tools]:
        raise BadRequest(f"{param} names a function that is not among the request's tools.", param=param)
    return choice


def _read_choice(value: object, path: str) -> ToolChoice:
    match value:
        case "auto" | "none" | "required":
            return ToolChoice(value)
    choice = mapping(value, path) if not isinstance(value, str) else None
    if choice is None:
        raise mistyped(path, '"auto", "none", "required" or {"type": "function", ...}', value)
    kind = choice.required("type", text)
    if kind != "function":
        raise mistyped(f"{path}.type", '"function" (no other kind of choice is supported)', kind)
    return ToolChoice("function", choice.required("function", mapping).required("name", filled_text))


def _read_legacy_choice(value: object, path: str) -> ToolChoice:
    match value:
        case "auto" | "none":
            return ToolChoice(value)
    return ToolChoice("function", mapping(value, path).required("name", filled_text))


def field_names(fields: Fields) -> FieldNames:
    """The paths of the schemas in a parsed body."""
    tools = [f"{tool.path}.function.parameters" for tool in fields.optional("tools", list_of(mapping)) or ()]
    functions = [f"{function.path}.parameters" for function in fields.optional("functions", list_of(mapping)) or ()]
    return replace(content_names(fields), parameters=tuple(tools or functions))


def content_names(fields: Fields) -> FieldNames:
    """The same for a body without tools."""
    said = fields.optional("response_format", mapping)
    return FieldNames() if said is None else FieldNames(schema=f"{said.path}.json_schema.schema")


def read_response_format(fields: Fields) -> ResponseFormat:
    """`response_format`: text, json_object or json_schema. Raises BadRequest."""
    return read_format(fields.optional("response_format", mapping))


def read_format(said: Fields | None, *, is_flat: bool = False) -> ResponseFormat:
    """An object that names a format; its schema is in the object `json_schema` of it or, where it `is_flat`, beside its
    type. Raises BadRequest."""
    kind = said.required("type", word("text", "json_object", "json_schema")) if said is not None else "text"
    if said is None or kind != "json_schema":
        return ResponseFormat("json_object" if kind == "json_object" else "text")
    form = said if is_flat else said.required("json_schema", mapping)
    strict = form.optional("strict", flag) or False
    return ResponseFormat("json_schema", form.required("schema", read_schema), strict)
