"""Parses Anthropic's blocks that add or remove tools within a conversation. This file knows the wire's blocks, not what
a model reads of them.

A reference names a tool that the request defines elsewhere: references are read first and get their definitions once
the request's tools are known.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvserve.core import Message, TextBlock, ToolBlock, ToolResultBlock, ToolSpec
from kvserve.protocols.anthropic_tools import read_tool, server_tool_name
from kvserve.protocols.fields import Fields, filled_text, list_of, mapping, mistyped, text, word
from kvserve.protocols.placeholders import words

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
    return [TextBlock(f"[The search for tools failed: {content.optional('error_code', text) or 'no reason given'}]")]


def read_compaction(block: Fields) -> Sequence[Change]:
    """The provider's summary of the conversation so far, and its changes of tools. A summary that only the provider can
    read becomes a name."""
    said = block.optional("content", text)
    changes = block.optional("tool_changes", list_of(mapping)) or []
    readers = {"tool_addition": read_tool_addition, "tool_removal": read_tool_removal}
    tools = [found for change in changes for found in readers[change.required("type", word(*readers))](change)]
    return [TextBlock(COMPACTED + said if said else f"\n{words(block)}\n"), *tools]


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
