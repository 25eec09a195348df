"""Reads a finished turn's reasoning, content and calls into a form that is equal for texts with the same meaning.

It uses the splitter that reads running answers. White space at the edges of reasoning and content and the spacing of a
call's JSON do not count. It knows no tokens and no templates.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvserve.core import ContentDelta, ReasoningDelta, ToolCallBlock, ToolCallEnd, ToolSpec
from kvserve.output.formats import OutputFormat
from kvserve.output.splitter import Splitter
from kvserve.output.written_ids import written_ids


class GeneratedMessage(NamedTuple):
    """A turn's content. `calls` are names and arguments, these as JSON in one spelling; 1, 1.0 and "1" differ."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class MessageReader:
    """Reads turns of one model under one set of tools. Readers with equal `key` read every text alike.

    The tools give the types of arguments that are written as bare text. Without tools there are no calls.
    """

    output_format: OutputFormat
    tools: tuple[ToolSpec, ...]
    key: bytes

    @classmethod
    def under(cls, output_format: OutputFormat, tools: Sequence[ToolSpec]) -> "MessageReader":
        """The reader for a request with these tools."""
        signature = json.dumps([[tool.name, tool.parameters] for tool in tools], default=_plain, sort_keys=True)
        return cls(output_format, tuple(tools), hashlib.sha256(signature.encode()).digest())

    def __call__(self, text: str) -> GeneratedMessage:
        """The message in `text`, a whole turn behind its header, thinking tags included."""
        splitter = Splitter(
            self.output_format,
            starts_in_reasoning=False,
            tools=self.tools,
            new_call_id=str,
            allow_calls=bool(self.tools),
        )
        deltas = [*splitter.feed(text), *splitter.finish(cut=False)]
        return GeneratedMessage(
            "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)).strip(),
            "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)).strip(),
            tuple(_call(delta.call) for delta in deltas if isinstance(delta, ToolCallEnd)),
        )

    def ids(self, text: str, said: tuple[str, str, tuple[tuple[str, str], ...]]) -> tuple[str, ...]:
        """The ids in the text of this message's calls: "" for a call without one, () in a form without ids."""
        return written_ids(self.output_format, text, [name for name, _ in said[2]])


def _call(call: ToolCallBlock) -> tuple[str, str]:
    """A call's name and arguments. Arguments that are not JSON, as of a cut call, are compared as text."""
    try:
        return call.name, json.dumps(json.loads(call.arguments), sort_keys=True)
    except ValueError:
        return call.name, call.arguments


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"no JSON value: {type(value).__name__}")
