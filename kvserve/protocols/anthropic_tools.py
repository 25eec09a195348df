"""Parses Anthropic's tools, tool choice and response format, and the blocks that add or remove tools within a
conversation. This file knows the wire's fields, not what a model reads of them.

A reference names a tool that the request defines elsewhere: references are read first and get their definitions once
the request's tools are known.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvserve.core import Message, ResponseFormat, TextBlock, ToolBlock, ToolChoice, ToolResultBlock, ToolSpec
from kvserve.errors import BadRequest
from kvserve.protocols.fields import (
    FieldNames,
    Fields,
    filled_text,
    flag,
    list_of,
    mapping,
    mistyped,
    single_keys,
    text,
    word,
)
from kvserve.protocols.json_schema import read_schema
from kvserve.protocols.openai_tools import read_parameters, tool_name
from kvserve.protocols.placeholders import words

_SERVER_KINDS = re.compile(
    r"(web_search|web_fetch|code_execution|advisor|mcp_toolset|tool_search_tool_\w+?)(_[0-9]{8})?"
)
"""Tools that the provider's servers run."""

_SEARCH = "tool_search_tool_"

_CALLABLE = "can be called here: one that is deferred waits for its tool_reference, and one that was removed is gone."


@dataclass(frozen=True, slots=True)
class SentTools:
    """A request's tools: those in front of the conversation, those that a reference adds later, the names of those that
    the provider's servers would run, and the path of each schema in the body."""

    front: tuple[ToolSpec, ...] = ()
    deferred: tuple[ToolSpec, ...] = ()
    unserved: tuple[str, ...] = ()
    schemas: Mapping[str, str] = field(default_factory=dict)


def read_tools(fields: Fields) -> SentTools:
    """`tools`, in the client's order. Raises BadRequest.

    Deferred tools are in front too if the provider's servers would search them: no search runs here.
    """
    tools = fields.optional("tools", list_of(mapping)) or []
    kinds = [_kind(tool) for tool in tools]
    of_servers = [server_tool_name(tool) for tool in tools]
    ours = [tool for tool, name in zip(tools, of_servers, strict=True) if name is None]
    defers = not any(kind.startswith(_SEARCH) for kind in kinds)
    read = [(read_tool(tool), defers and (tool.optional("defer_loading", flag) or False)) for tool in ours]
    return SentTools(
        front=tuple(spec for spec, is_deferred in read if not is_deferred),
        deferred=tuple(spec for spec, is_deferred in read if is_deferred),
        unserved=tuple(name for name in of_servers if name is not None),
        schemas={spec.name: f"{tool.path}.input_schema" for tool, (spec, _) in zip(ours, read, strict=True)},
    )


def server_tool_name(tool: Fields) -> str | None:
    """The name of a tool that the provider's servers run; None for any other. Raises BadRequest."""
    kind = _kind(tool)
    return (tool.optional("name", text) or kind) if _SERVER_KINDS.fullmatch(kind) else None


def _kind(tool: Fields) -> str:
    return tool.optional("type", text) or "custom"


def read_tool(tool: Fields) -> ToolSpec:
    """A tool that the client runs. Raises BadRequest."""
    kind = _kind(tool)
    if kind != "custom":
        raise mistyped(f"{tool.path}.type", '"custom" (the provider\'s own kinds of tools are not known here)', kind)
    return ToolSpec(
        name=tool.required("name", tool_name),
        description=_description(tool),
        parameters=tool.required("input_schema", read_parameters),
        strict=tool.optional("strict", flag),
    )


def wants_only_unserved(fields: Fields, offered: Sequence[ToolSpec], unserved: Sequence[str]) -> bool:
    """Whether the request forces a tool that only the provider's servers run, or has no other tools."""
    choice = fields.optional("tool_choice", mapping)
    kind = choice.optional("type", text) if choice is not None else None
    if not unserved or kind == "none":
        return False
    name = choice.optional("name", text) if choice is not None and kind == "tool" else None
    return not offered or (name in unserved and name not in [tool.name for tool in offered])


def _description(tool: Fields) -> str | None:
    """The description, followed by the examples of input: chat templates have no place for examples."""
    described = tool.optional("description", text)
    examples = [example.values for example in tool.optional("input_examples", list_of(single_keys)) or ()]
    if not examples:
        return described
    lines = "\n".join(json.dumps(example, ensure_ascii=False) for example in examples)
    return "\n\n".join(part for part in (described, f"Examples of input:\n{lines}") if part)


def read_tool_choice(fields: Fields, tools: tuple[ToolSpec, ...]) -> tuple[ToolChoice, bool]:
    """`tool_choice`, if `tools` can meet it, and whether parallel calls are allowed. Raises BadRequest."""
    choice = fields.optional("tool_choice", mapping)
    if choice is None:
        return ToolChoice(), True
    is_parallel = not (choice.optional("disable_parallel_tool_use", flag) or False)
    match choice.required("type", word("auto", "any", "tool", "none")):
        case "any":
            if not tools:
                raise BadRequest(f'{choice.path} is "any", but no tool {_CALLABLE}', param=choice.path)
            return ToolChoice("required"), is_parallel
        case "tool":
            name = choice.required("name", filled_text)
            if name not in [tool.name for tool in tools]:
                raise BadRequest(f"{choice.path}.name is no tool that {_CALLABLE}", param=f"{choice.path}.name")
            return ToolChoice("function", name), is_parallel
        case "none":
            return ToolChoice("none"), is_parallel
    return ToolChoice(), is_parallel


def read_response_format(fields: Fields) -> ResponseFormat:
    """`output_config.format`, or the older `output_format`: JSON that strictly follows a schema. Raises BadRequest."""
    said = _format(fields)
    if said is None:
        return ResponseFormat()
    said.required("type", word("json_schema"))
    return ResponseFormat("json_schema", said.required("schema", read_schema), strict=True)


def _format(fields: Fields) -> Fields | None:
    config = fields.optional("output_config", mapping)
    return (config and config.optional("format", mapping)) or fields.optional("output_format", mapping)


def field_names(fields: Fields, sent: SentTools, offered: Sequence[ToolSpec]) -> FieldNames:
    """The paths of the schemas in a parsed body."""
    said = _format(fields)
    parameters = tuple(sent.schemas.get(tool.name, f"the input_schema of {tool.name}") for tool in offered)
    if said is None:
        return FieldNames(parameters=parameters)
    return FieldNames(schema=f"{said.path}.schema", parameters=parameters)


# --- tools within a conversation -------------------------------------------------------------------------------------


COMPACTED = "[Summary of the conversation up to here]\n"

type Change = TextBlock | ToolBlock


def read_tool_reference(block: Fields) -> list[ToolBlock]:
    """A tool that a tool search found."""
    return [ToolBlock(block.required("tool_name", filled_text))]


def read_tool_addition(block: Fields) -> list[ToolBlock]:
    """A tool offered from here on, by name or with its definition; a server's tool is only a name."""
    tool = block.required("tool", mapping)
    if tool.required("type", text) == "tool_definition":
        definition = tool.required("definition", mapping)
        name = server_tool_name(definition)
        return [ToolBlock.of(read_tool(definition)) if name is None else ToolBlock(name)]
    return [ToolBlock(_name(tool))]


def read_tool_removal(block: Fields) -> list[ToolBlock]:
    """A tool that is no longer offered."""
    return [ToolBlock(_name(block.required("tool", mapping)), is_removed=True)]


def _name(tool: Fields) -> str:
    match tool.required("type", text):
        case "tool_reference":
            return tool.required("name", filled_text)
        case "mcp_tool_reference":
            return f"{tool.required('server_name', filled_text)}_{tool.required('name', filled_text)}"
        case "mcp_toolset_reference":
            return tool.required("server_name", filled_text)
        case other:
            raise mistyped(f"{tool.path}.type", '"tool_reference" or "tool_definition"', other)


def read_tool_search_result(block: Fields) -> Sequence[Change]:
    """The tools that a search on the provider's servers found."""
    content = block.required("content", mapping)
    if content.required("type", text) == "tool_search_tool_search_result":
        references = content.required("tool_references", list_of(mapping))
        return [found for reference in references for found in read_tool_reference(reference)]
    said = f"[The search for tools failed: {content.optional('error_code', text) or 'no reason given'}]"
    return [TextBlock(said, is_ours=True)]


def read_compaction(block: Fields) -> Sequence[Change]:
    """The provider's summary of the conversation so far, and its changes of tools. A summary that only the provider can
    read becomes a name."""
    said = block.optional("content", text)
    changes = block.optional("tool_changes", list_of(mapping)) or []
    readers = {"tool_addition": read_tool_addition, "tool_removal": read_tool_removal}
    tools = [found for change in changes for found in readers[change.required("type", word(*readers))](change)]
    return [TextBlock(COMPACTED + said if said else f"\n{words(block)}\n", is_ours=True), *tools]


def with_definitions(
    messages: Sequence[tuple[Message, ...]], tools: Iterable[ToolSpec]
) -> tuple[tuple[Message, ...], ...]:
    """The messages, each reference with the definition in force there: that of `tools` or a later one of a message. An
    undefined name stays a name."""
    known = {tool.name: ToolBlock.of(tool) for tool in tools}

    def defined(block: ToolBlock) -> ToolBlock:
        if block.is_removed:
            return block
        if block.parameters is not None:
            known[block.name] = block
        return known.get(block.name, block)

    def changed(message: Message) -> Message:
        if not any(isinstance(block, ToolBlock | ToolResultBlock) for block in message.blocks):
            return message
        return replace(
            message,
            blocks=tuple(
                defined(block)
                if isinstance(block, ToolBlock)
                else replace(block, blocks=tuple(defined(b) if isinstance(b, ToolBlock) else b for b in block.blocks))
                if isinstance(block, ToolResultBlock)
                else block
                for block in message.blocks
            ),
        )

    return tuple(tuple(map(changed, some)) for some in messages)
