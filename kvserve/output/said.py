"""What a finished turn says: reasoning, content and calls, in a form that is equal for texts that say the same.

It reads text with the splitter that also reads answers as they come; white space at the edges of reasoning and content
and the spacing of a call's JSON say nothing. It knows no tokens and no templates.
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
    """What a turn says. `calls` are name and arguments, these as JSON in one spelling; 1, 1.0 and "1" differ."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class MessageReader:
    """Reads turns of one model under one set of tools. `key` is equal where every text says the same.

    The tools decide how arguments that are written as bare text are typed. Without tools there are no calls.
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
        """What `text` says: a whole turn as it stands behind its header, thinking tags included."""
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
        """The ids that the calls of a text, which says this, are written with: "" for one without, () in a form without
        ids."""
        return written_ids(self.output_format, text, [name for name, _ in said[2]])


def _call(call: ToolCallBlock) -> tuple[str, str]:
    """Arguments that are no JSON, as those of a call that was cut, are equal where their text is."""
    try:
        return call.name, json.dumps(json.loads(call.arguments), sort_keys=True)
    except ValueError:
        return call.name, call.arguments


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"no JSON value: {type(value).__name__}")
