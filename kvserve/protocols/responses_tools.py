"""Parses the tools, tool choice and text format of `/v1/responses`, and encodes calls.

The model knows functions only. A custom tool becomes a function with one text parameter; a function of a namespace gets
the namespace before its name. `WireTool` turns a call back into the item that the client expects.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from kvserve.core import JsonObject, ResponseFormat, ToolCallBlock, ToolChoice, ToolSpec
from kvserve.errors import BadRequest
from kvserve.protocols.fields import Fields, filled_text, list_of, mapping, mistyped, text, word
from kvserve.protocols.openai_tools import read_format, read_function, tool_name

CUSTOM_INPUT = "input"
"""The one parameter of a custom tool."""

_NAMESPACE_SEPARATOR = "__"
_CUSTOM_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "The tool's whole input, as plain text."}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}

# Clients offer these in case the server has them; without them the model uses its other tools.
_LEFT_OUT = frozenset(
    ("web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11", "image_generation")
)
_OF_THE_SERVER = _LEFT_OUT | {"file_search", "code_interpreter", "mcp"}
"""Tools that the provider's servers run."""


@dataclass(frozen=True, slots=True)
class WireTool:
    """The client's form of a model's tool: a function or a custom tool, with its name and namespace."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """A request's tools: those that the model gets, the client's form of each, the client's definitions of the offered
    ones, the path of each one's parameters in the body, and the kinds that are not run here."""

    specs: tuple[ToolSpec, ...] = ()
    wire: Mapping[str, WireTool] = field(default_factory=dict)
    shown: tuple[JsonObject, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    unserved: tuple[str, ...] = ()

    @property
    def missed(self) -> tuple[str, ...]:
        """The unserved kinds that the client needs, unlike those that it offers in case the server has them."""
        return tuple(kind for kind in self.unserved if kind not in _LEFT_OUT)

    def name_of(self, wire: WireTool) -> str | None:
        """The model's name of a tool; None for an unknown tool."""
        return next((name for name, known in self.wire.items() if known == wire), None)


def model_name(name: str, namespace: str | None) -> str:
    """The model's name of a tool: its namespace and its name in one."""
    return name if namespace is None else f"{namespace}{_NAMESPACE_SEPARATOR}{name}"


# --- tools -----------------------------------------------------------------------------------------------------------

type _Tools = list[_ReadTool]


@dataclass(frozen=True, slots=True)
class _ReadTool:
    """A tool of the body: as the model gets it, in the client's form, and its path."""

    spec: ToolSpec
    wire: WireTool
    path: str


def read_tools(fields: Fields) -> OfferedTools:
    """`tools` in the client's order. Raises BadRequest, also for two tools of one name."""
    groups = fields.optional("tools", list_of(_read_tool)) or []
    tools = [tool for _, group in groups for tool in group]
    wire = {tool.spec.name: tool.wire for tool in tools}
    if len(wire) < len(tools):
        raise BadRequest("tools: two of them have the same name.", param="tools")
    return OfferedTools(
        specs=tuple(tool.spec for tool in tools),
        wire=wire,
        shown=tuple(said for said, group in groups if group),
        parameters={tool.spec.name: f"{tool.path}.parameters" for tool in tools},
        unserved=tuple(str(said["type"]) for said, group in groups if not group and said["type"] in _OF_THE_SERVER),
    )


def _read_tool(value: object, path: str) -> tuple[JsonObject, _Tools]:
    """The functions that the model gets for one tool of the body; none for a tool that is left out."""
    tool = mapping(value, path)
    kind = tool.required("type", text)
    if kind in _OF_THE_SERVER:
        return tool.values, []
    if kind == "namespace":
        return tool.values, _read_namespace(tool)
    return tool.values, [_read_own_tool(value, path)]


def _read_own_tool(value: object, path: str) -> _ReadTool:
    tool = mapping(value, path)
    kind = tool.required("type", text)
    if kind not in _OWN_TOOLS:
        raise mistyped(f"{path}.type", '"function", "custom" or "namespace" (the server runs no tools itself)', kind)
    spec, wire = _OWN_TOOLS[kind](value, path)
    return _ReadTool(spec, wire, path)


def _read_function_tool(value: object, path: str) -> tuple[ToolSpec, WireTool]:
    spec = read_function(value, path)
    return spec, WireTool("function", spec.name)


def _read_custom_tool(value: object, path: str) -> tuple[ToolSpec, WireTool]:
    tool = mapping(value, path)
    name = tool.required("name", tool_name)
    said = [tool.optional("description", text), tool.optional("format", _read_format)]
    description = "\n\n".join(part for part in said if part) or None
    return ToolSpec(name, description, _CUSTOM_PARAMETERS), WireTool("custom", name)


_OWN_TOOLS: Mapping[str, Callable[[object, str], tuple[ToolSpec, WireTool]]] = {
    "function": _read_function_tool,
    "custom": _read_custom_tool,
}


def _read_format(value: object, path: str) -> str | None:
    """The description of a custom tool's input for the model; it is not enforced."""
    said = mapping(value, path)
    if said.required("type", word("text", "grammar")) == "text":
        return None
    syntax = said.required("syntax", word("lark", "regex"))
    return f"The input must match this {syntax} grammar:\n{said.required('definition', filled_text)}"


def _read_namespace(namespace: Fields) -> _Tools:
    """The functions of a namespace; the first one's description includes the namespace's."""
    name = namespace.required("name", tool_name)
    about = namespace.optional("description", text)
    tools: _Tools = []
    for tool in namespace.required("tools", list_of(_read_own_tool)):
        described = tool.spec.description
        if about and not tools:
            described = "\n\n".join(part for part in (f"{name}: {about}", described) if part)
        renamed = replace(tool.spec, name=model_name(tool.spec.name, name), description=described)
        tools.append(replace(tool, spec=renamed, wire=replace(tool.wire, namespace=name)))
    return tools


# --- calls -----------------------------------------------------------------------------------------------------------


def custom_arguments(said: str) -> str:
    """A custom tool's input as the arguments of its function."""
    return json.dumps({CUSTOM_INPUT: said}, ensure_ascii=False)


class CustomInput:
    """Decodes a custom tool's input (the text of `input`) from its function's arguments as they arrive.

    Arguments of another form are the input as they are, and so is what follows the text, except the last bracket: the
    tool judges it.
    """

    def __init__(self) -> None:
        self._held = ""
        self._stage: Literal["opening", "text", "behind", "raw"] = "opening"

    def feed(self, arguments: str) -> str:
        """The input that further arguments complete."""
        self._held += arguments
        if self._stage == "opening":
            if len(self._held) < len(_CUSTOM_OPENING) and _CUSTOM_OPENING.startswith(self._held):
                return ""
            opened = self._held.startswith(_CUSTOM_OPENING)
            self._held = self._held.removeprefix(_CUSTOM_OPENING)
            self._stage = "text" if opened else "raw"
        if self._stage == "text":
            return self._text()
        return "" if self._stage == "behind" else self._take(len(self._held))

    def finish(self) -> str:
        """The rest of the input; the arguments have ended."""
        return "" if self._stage == "behind" and self._held == "}" else self._take(len(self._held))

    def _text(self) -> str:
        whole = _STRING_CHARACTERS.match(self._held)
        taken = self._take(whole.end() if whole is not None else 0)
        if self._held.startswith('"'):
            self._held, self._stage = self._held[1:], "behind"
        try:
            return str(json.loads(f'"{taken}"', strict=False))
        except ValueError:
            return taken

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken


_CUSTOM_OPENING = f'{{"{CUSTOM_INPUT}": "'
_STRING_CHARACTERS = re.compile(
    r"""(?:[^"\\] | \\[^u] | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
    | \\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u[0-9a-fA-F]{4}) )*""",  # half of a pair waits for what follows
    re.DOTALL | re.VERBOSE,
)


def custom_input(arguments: str) -> str:
    """The input in a call's complete arguments."""
    reader = CustomInput()
    return reader.feed(arguments) + reader.finish()


def call_item(call: ToolCallBlock, tools: OfferedTools) -> dict[str, object]:
    """The item of a call, without id and status."""
    wire = tools.wire.get(call.name, WireTool("function", call.name))
    names = {"name": wire.name} | ({"namespace": wire.namespace} if wire.namespace is not None else {})
    if wire.kind == "custom":
        return {"type": "custom_tool_call", "call_id": call.call_id, **names, "input": custom_input(call.arguments)}
    return {"type": "function_call", "call_id": call.call_id, **names, "arguments": call.arguments}


# --- choices ---------------------------------------------------------------------------------------------------------


def wants_only_unserved(fields: Fields, tools: OfferedTools) -> bool:
    """Whether the request forces or needs tools that are not run here, or has only such tools, beyond those that every
    client offers in case the server has them."""
    choice, _ = fields.locate("tool_choice")
    if not tools.unserved or choice == "none":
        return False
    if isinstance(choice, Mapping):
        return choice.get("type") in tools.unserved
    return not tools.specs and (choice == "required" or bool(tools.missed))


def read_tool_choice(fields: Fields, tools: OfferedTools) -> tuple[ToolChoice, OfferedTools]:
    """`tool_choice`, and the tools that the model gets. Raises BadRequest, also if `tools` cannot meet the choice."""
    value, path = fields.locate("tool_choice")
    if value is None:
        return ToolChoice(), tools
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        return _allowed(mapping(value, path), tools)
    choice = _read_choice(value, path, tools)
    if choice.mode == "required" and not tools.specs:
        raise BadRequest(f'{path} is "required", but the request has no tools that the model can call.', param=path)
    return choice, tools


def _read_choice(value: object, path: str, tools: OfferedTools) -> ToolChoice:
    match value:
        case "auto" | "none" | "required":
            return ToolChoice(value)
    if isinstance(value, str):
        raise mistyped(path, '"auto", "none", "required" or an object', value)
    choice = mapping(value, path)
    kind = choice.required("type", text)
    if kind not in ("function", "custom"):
        raise mistyped(f"{path}.type", '"function", "custom" or "allowed_tools"', kind)
    return ToolChoice("function", _chosen(choice, tools))


def _chosen(choice: Fields, tools: OfferedTools) -> str:
    """The model's name of the tool that an object names."""
    kind: Literal["function", "custom"] = "custom" if choice.values["type"] == "custom" else "function"
    wire = WireTool(kind, choice.required("name", filled_text), choice.optional("namespace", filled_text))
    name = tools.name_of(wire)
    if name is None:
        raise BadRequest(f"{choice.path} names a tool that is not among the request's tools.", param=choice.path)
    return name


def _allowed(choice: Fields, tools: OfferedTools) -> tuple[ToolChoice, OfferedTools]:
    """A choice among some of the tools. If one of them must be called, a grammar bars the others and the prompt stays
    the same; otherwise the others are left out of the prompt."""
    mode = choice.required("mode", word("auto", "required"))

    def read(value: object, path: str) -> str:
        entry = mapping(value, path)
        entry.required("type", word("function", "custom"))
        return _chosen(entry, tools)

    names = frozenset(choice.required("tools", list_of(read)))
    if mode == "auto":
        return ToolChoice(), replace(tools, specs=tuple(spec for spec in tools.specs if spec.name in names))
    if not names:
        raise BadRequest(f"{choice.path} demands a call, but allows no tool.", param=f"{choice.path}.tools")
    if len(names) == 1:
        return ToolChoice("function", next(iter(names))), tools
    return ToolChoice("required", among=names if names != set(tools.wire) else None), tools


# --- the form of the text --------------------------------------------------------------------------------------------


def read_text_format(fields: Fields) -> ResponseFormat:
    """`text.format`: text, json_object or json_schema. Raises BadRequest."""
    options = fields.optional("text", mapping)
    if options is None:
        return ResponseFormat()
    options.optional("verbosity", text)
    return read_format(options.optional("format", mapping), is_flat=True)
