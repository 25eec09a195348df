"""Where the tools of a request are placed: in front of the conversation, or where they came in later.

A client that adds tools to its list in the middle of a conversation does not say where. Where the list holds all tools
of the known part, unchanged, the others are placed at the first new message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvserve.canonical.canonicalise import Canonical, tool_digest
from kvserve.core import Message, ToolBlock, ToolResultBlock, ToolSpec, tool_blocks
from kvserve.sessions.tool_layouts import NO_TOOLS, AddedTools, ToolLayout


@dataclass(frozen=True, slots=True)
class PlacedTools:
    """The tools of a request by place: `front`, and by the index of a message those that it brings in. `new` are the
    names of those that no earlier request brought in."""

    layout: ToolLayout
    front: tuple[ToolSpec, ...]
    added: Mapping[int, tuple[ToolSpec, ...]]
    new: tuple[str, ...] = ()

    @property
    def later(self) -> tuple[ToolSpec, ...]:
        """The tools that are not in front, in the order in which they came."""
        return tuple(tool for index in sorted(self.added) for tool in self.added[index])

    @property
    def notes(self) -> tuple[str, ...]:
        """The note on the new tools."""
        return (f"tools added where the conversation is: {', '.join(self.new)}",) if self.new else ()

    def in_messages(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages with the tools that they bring in."""
        return tuple(
            _with_tools(message, self.added[index]) if index in self.added else message
            for index, message in enumerate(messages)
        )


@dataclass(frozen=True, slots=True)
class PlacementFacts:
    """A request's messages and what is known of them. `layouts`: those of the part that is known and shown to be the
    client's, each with the index of the message from which on it holds, the last message first. That part is the first
    `num_known` messages; `newest` is the first message that was not answered yet."""

    messages: Sequence[Message]
    canonical: Sequence[Canonical]
    chains: Sequence[bytes]
    layouts: Sequence[tuple[int, ToolLayout]]
    num_known: int
    newest: int


def unplaced(tools: Sequence[ToolSpec]) -> PlacedTools:
    """All tools in front, without a layout."""
    return PlacedTools(NO_TOOLS, tuple(tools), {})


def place_tools(tools: Sequence[ToolSpec], facts: PlacementFacts, *, keeps_order: bool) -> PlacedTools:
    """The tools where earlier requests had them, and new ones where the new part begins; all in front where the known
    part has another list, or nothing is known. `keeps_order`: the order of the list counts."""
    by_digest = {tool_digest(tool): tool for tool in tools}
    if len(by_digest) != len(tools) or len({tool.name for tool in tools}) != len(tools):
        return unplaced(tools)
    front = PlacedTools(ToolLayout(tuple(by_digest)), tuple(tools), {})
    known = [each for each in facts.layouts if _fits(each[1], by_digest, facts.chains, keeps_order=keeps_order)]
    place = _place_of_new(facts)
    usable = [
        (index, len(layout.tools), layout)
        for index, layout in known
        if len(layout.tools) == len(tools) or (place is not None and index < place)
    ]
    if not usable:
        return front
    _, _, layout = max(usable, key=lambda each: each[:2])  # the last one in force
    found = _placed(layout, by_digest, facts, place)
    if not found.later:
        return found
    # a message may name such a tool before the place that it would get
    named = {block.name for block in tool_blocks(facts.messages)}
    return found if named.isdisjoint(tool.name for tool in found.later) else front


def _fits(layout: ToolLayout, tools: Mapping[bytes, ToolSpec], chains: Sequence[bytes], *, keeps_order: bool) -> bool:
    """Whether the list holds all tools of the layout, unchanged, and the conversation its messages."""
    if any(each.place not in chains for each in layout.added):
        return False
    if keeps_order:
        return tuple(islice(tools, len(layout.tools))) == layout.tools
    return tools.keys() >= set(layout.tools)


def _placed(
    layout: ToolLayout, tools: Mapping[bytes, ToolSpec], facts: PlacementFacts, place: int | None
) -> PlacedTools:
    """The tools as the layout places them, and those that it lacks at the message `place`."""
    new = tuple(digest for digest in tools if digest not in layout.tools)
    if new and place is not None:
        layout = replace(layout, added=(*layout.added, AddedTools(facts.chains[place], new)))
    added = {facts.chains.index(each.place): tuple(tools[digest] for digest in each.tools) for each in layout.added}
    front = tuple(tools[digest] for digest in layout.front)
    return PlacedTools(layout, front, added, tuple(tools[digest].name for digest in new))


def _place_of_new(facts: PlacementFacts) -> int | None:
    """The first message that is new or not answered yet and can bring tools in."""
    behind = range(min(facts.num_known, facts.newest), len(facts.messages))
    return next((index for index in behind if _can_bring(facts.messages[index], facts.canonical[index])), None)


def _can_bring(message: Message, canonical: Canonical) -> bool:
    """Whether a message can bring tools in: it is not the model's, and the next request will send it again."""
    return message.role != "assistant" and canonical.message is not None


def _with_tools(message: Message, tools: Sequence[ToolSpec]) -> Message:
    """The message with the tools before its words; behind them in its last tool result, if it has one."""
    blocks = tuple(map(ToolBlock.of, tools))
    results = [index for index, block in enumerate(message.blocks) if isinstance(block, ToolResultBlock)]
    if not results:
        return replace(message, blocks=(*blocks, *message.blocks))
    last = message.blocks[results[-1]]
    if isinstance(last, ToolResultBlock):
        last = replace(last, blocks=(*last.blocks, *blocks))
    return replace(message, blocks=(*message.blocks[: results[-1]], last, *message.blocks[results[-1] + 1 :]))
