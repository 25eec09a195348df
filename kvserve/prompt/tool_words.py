"""Writes the words for tools that come or go in the middle of a conversation.

It knows tools, not where in a text the words go.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from kvserve.core import ToolBlock, ToolSpec
from kvserve.prompt.call_words import HERMES, CallWords
from kvserve.prompt.control import ControlTokens
from kvserve.prompt.guarding import guarded_tools
from kvserve.prompt.steps import function_dict

OPENING = "These tools can be called from here on:\n"
NOT_DEFINED = "The tool {name} is named here, but nobody defines it: it cannot be called."
REMOVED = "The tool {name} was removed: it cannot be called from here on."


class ToolDescriber(Protocol):
    """A chat template's form of tool descriptions; `opening` and `closing` surround them in a conversation."""

    @property
    def opening(self) -> str: ...

    @property
    def closing(self) -> str: ...

    def describe(self, tool: ToolSpec) -> str | None:
        """The template's text for the tool; None if it differs from the probed form."""


@dataclass(frozen=True, slots=True)
class ToolWords:
    """The words for changes of tools. `form` None describes tools as JSON; `explains`: they are the first tools, so
    `calls` adds instructions. With `control` the client's own words are guarded."""

    form: ToolDescriber | None = None
    explains: bool = False
    control: ControlTokens | None = None
    calls: CallWords = HERMES

    def said(self, blocks: Sequence[ToolBlock]) -> str:
        """The text of consecutive blocks."""
        return "\n".join(self._parts(blocks))

    def _parts(self, blocks: Sequence[ToolBlock]) -> Iterator[str]:
        for is_definition, group in groupby(blocks, key=lambda block: block.spec is not None):
            if is_definition:
                yield self._described([spec for block in group if (spec := block.spec) is not None])
                continue
            for block in group:
                yield (REMOVED if block.is_removed else NOT_DEFINED).format(name=self._guarded(block.name))

    def _described(self, tools: Sequence[ToolSpec]) -> str:
        said = tools if self.control is None else guarded_tools(tools, self.control)
        if self.explains:
            return self.calls.tools(said)
        opening, closing = (self.form.opening, self.form.closing) if self.form is not None else (OPENING, "")
        return opening + "\n".join(map(self._description, said)) + closing

    def _description(self, tool: ToolSpec) -> str:
        described = self.form.describe(tool) if self.form is not None else None
        return json.dumps(function_dict(tool), ensure_ascii=False) if described is None else described

    def _guarded(self, name: str) -> str:
        return name if self.control is None else self.control.marked(name)


AS_JSON = ToolWords().said
"""For prompts without a template's form of descriptions."""
