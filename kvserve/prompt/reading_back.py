"""Asks a reader of answers, at load, whether calls in a form that was found are read back. It knows no template."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvserve.core import CallRow, ToolSpec
from kvserve.prompt.call_words import EXAMPLES, FUNCTION, CallWords
from kvserve.prompt.probe import PROBE_TOOL
from kvserve.prompt.token_replay import MessageParts

type ReadsCalls = Callable[[CallRow, Sequence[ToolSpec], str], MessageParts]
"""Reads a text whose calls have this row's form, under these tools."""


def reads_back(row: CallRow, reads: ReadsCalls, words: str = "") -> bool:
    """Whether calls that are written in this row's form are read, `words` right before them as such, nothing else."""
    calls = EXAMPLES[: 1 if row.between is None else 2]
    reasoning, content, found = reads(row, (replace(PROBE_TOOL, name=FUNCTION),), words + CallWords(row).calls(calls))
    return not reasoning and content == words and found == tuple((call.name, call.arguments) for call in calls)
