"""A conversation: a tuple of messages, each a tuple of ordered blocks, the tools that can be called in it, and how a
template writes calls. A block is compared and hashed with all that the model reads of it; it knows no wire form and no
template."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

type JsonObject = Mapping[str, object]

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Plain text. `is_ours`: no client wrote it as text: a file's contents, or words for what a model cannot see or
    this server does not know. It stands on lines of its own between a client's texts, which are joined as templates
    join them."""

    text: str
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    """Reasoning that an assistant wrote before its answer; `signature` is the client's echo of ours, if any."""

    text: str
    signature: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallBlock:
    """One call of a tool. `arguments` is the JSON text exactly as it was received or as the model's call parsed to."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ImageBlock:
    """An image as the client referred to it: a data URL, an https URL or a path; decoded in `prompt/` only."""

    source: str


@dataclass(frozen=True, slots=True)
class ToolBlock:
    """From here on a tool can be called or, with `is_removed`, it cannot any more.

    `parameters` is the JSON text of its schema, keys in the client's order: a block is compared and hashed with all
    that the model reads of it. None for a name that nobody defines.
    """

    name: str
    description: str | None = None
    parameters: str | None = None
    strict: bool | None = None
    is_removed: bool = False

    @classmethod
    def of(cls, tool: "ToolSpec") -> "ToolBlock":
        """The block that brings a tool in."""
        return cls(tool.name, tool.description, json.dumps(tool.parameters, ensure_ascii=False), tool.strict)

    @property
    def spec(self) -> "ToolSpec | None":
        """The tool that it brings in; None where it brings none."""
        if self.parameters is None or self.is_removed:
            return None
        return ToolSpec(self.name, self.description, json.loads(self.parameters), self.strict)


@dataclass(frozen=True, slots=True)
class ToolResultBlock:
    """What a tool returned for the call `call_id`."""

    call_id: str
    blocks: tuple[TextBlock | ImageBlock | ToolBlock, ...]
    is_error: bool = False


type Block = TextBlock | ThinkingBlock | ToolCallBlock | ToolResultBlock | ImageBlock | ToolBlock


@dataclass(frozen=True, slots=True)
class Message:
    """One message: who said it and its blocks in order. An empty tuple of blocks is an empty message."""

    role: Role
    blocks: tuple[Block, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        """Its text blocks, joined."""
        return "".join(block.text for block in self.blocks if isinstance(block, TextBlock))

    @property
    def calls(self) -> list[ToolCallBlock]:
        """Its calls, in order."""
        return [block for block in self.blocks if isinstance(block, ToolCallBlock)]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that the model may call; `parameters` is its JSON schema. `strict` None: the client does not say."""

    name: str
    description: str | None
    parameters: JsonObject
    strict: bool | None = None


def offered_tools(tools: Iterable[ToolSpec], messages: Iterable[Message]) -> tuple[ToolSpec, ...]:
    """The tools that can be called behind `messages`: those in front of them, as their blocks changed them since."""
    offered: dict[str, ToolSpec | ToolBlock] = {tool.name: tool for tool in tools}
    for block in tool_blocks(messages):
        if block.is_removed:
            offered.pop(block.name, None)
        elif block.parameters is not None:
            offered[block.name] = block
    return _specs(offered.values())


def known_tools(tools: Iterable[ToolSpec], messages: Iterable[Message]) -> tuple[ToolSpec, ...]:
    """The tools that calls anywhere in `messages` may be of: also those that were removed since."""
    known: dict[str, ToolSpec | ToolBlock] = {tool.name: tool for tool in tools}
    known |= {block.name: block for block in tool_blocks(messages) if block.parameters is not None}
    return _specs(known.values())


def _specs(tools: Iterable[ToolSpec | ToolBlock]) -> tuple[ToolSpec, ...]:
    specs = (tool.spec if isinstance(tool, ToolBlock) else tool for tool in tools)
    return tuple(spec for spec in specs if spec is not None)


def tool_blocks(messages: Iterable[Message]) -> list[ToolBlock]:
    """What changes the tools in the messages, in order, tool results included. A request asks this of its whole history
    several times, so it is one comprehension."""
    return [
        inner
        for message in messages
        for block in message.blocks
        for inner in (block.blocks if isinstance(block, ToolResultBlock) else (block,))
        if isinstance(inner, ToolBlock)
    ]
