"""What a model reads where tools come or go in the middle of a conversation.

It knows tools and not where in a text the words go.
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
    """How a chat template describes tools; `opening` and `closing` stand around descriptions in a conversation."""

    @property
    def opening(self) -> str: ...

    @property
    def closing(self) -> str: ...

    def describe(self, tool: ToolSpec) -> str | None:
        """The template's text for the tool; None where it writes that in another way than it wrote others."""


@dataclass(frozen=True, slots=True)
class ToolWords:
    """What a model reads where its tools change. `form` None describes them as JSON; `explains`: the model was told of
    no tools yet, nor how to call one, which `calls` knows. With `control` the client's own words are guarded."""

    form: ToolDescriber | None = None
    explains: bool = False
    control: ControlTokens | None = None
    calls: CallWords = HERMES

    def said(self, blocks: Sequence[ToolBlock]) -> str:
        """What stands for the blocks, which follow one another."""
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
"""Where no template says how it describes tools."""
