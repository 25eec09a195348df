"""Finds the form of calls of a chat template that has no place for them, at load: they stand in the text of an answer.

Either it asks for them in words, in its rendering of a tool (Granite 3's): these are read as "<tag> followed by a JSON
list"; a form in other words is not found. Or it writes them beside the content None alone, and only two of a message
whole (the first DeepSeek V3's).
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import product

from kvserve.core import CallRow
from kvserve.prompt.call_row import ENDINGS, shown_row
from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.conform import Dialect
from kvserve.prompt.pair_row import Unlike
from kvserve.prompt.probe import PROBE_TOOL, Prober, probe, talk
from kvserve.prompt.reading_back import ReadsCalls, reads_back
from kvserve.prompt.steps import THINK_TAGS, WireForm
from kvserve.prompt.switches import keep_arguments
from kvserve.prompt.thinking_tags import thinking_tags
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.prompt.writing import REASONING_TAGS

_SENTENCE_END = re.compile(r"[.!?](?=[\s<\[]|\Z)|\n")
_TAG = re.compile(r"<[^<>\s]{2,}>|\[[A-Z_]{2,}\]")
_ASKS = re.compile(r"\b(?:answer|call|generate|output|produce|reply|respond|return|write)\b", re.IGNORECASE)
_LIST = re.compile(r"\s*(?:followed by|and then|then)\s+(?:an?\s+|the\s+)?JSON\s+(?:list|array)\b", re.IGNORECASE)
_OTHERWISE = re.compile(r"\b(?:never|not|don't|keys?|fields?)\b", re.IGNORECASE)
"""Words with which a sentence forbids the form, or says more of it than is understood."""


def told_row(tokenizer: Tokenizer, reads: ReadsCalls) -> CallRow | None:
    """The row of a model's calls; None where its template writes calls itself, or tells nothing that is understood.
    Raises ModelLoadError."""
    if tokenizer.chat_template is None:
        return None
    return find_told_row(CompiledTemplate(tokenizer.chat_template, tokenizer.template_variables), reads)


def find_told_row(template: CompiledTemplate, reads: ReadsCalls) -> CallRow | None:
    """The row that the template shows or its words ask for, verified with `reads`."""
    shows, tells = "tool_calls" in template.source, "tools" in template.reads
    if not shows and not tells:
        return None
    dialect = probe(Prober(template, (PROBE_TOOL,)))
    if dialect is None or dialect.calls:
        return None
    row = _beside_no_content(template, reads) if shows else None
    return row if row is not None or not dialect.tools else _in_words(template, dialect, reads)


def _beside_no_content(template: CompiledTemplate, reads: ReadsCalls) -> CallRow | None:
    """That of two calls whose message has the content None."""
    own = thinking_tags(template)
    prober = Prober(template, arguments=keep_arguments(template), think_tags=own or THINK_TAGS)
    tags = REASONING_TAGS if own is None else (own, *REASONING_TAGS)
    for as_text, ending in product((False, True), ENDINGS):
        form = WireForm(nulls_empty_content=True, arguments_as_text=as_text)
        with suppress(Unlike):
            row = shown_row(prober, form, ending, tags)
            if row.between is not None and reads_back(row, reads):
                return row
    return None


def _in_words(template: CompiledTemplate, dialect: Dialect, reads: ReadsCalls) -> CallRow | None:
    """That of a list of calls behind the one tag that a sentence of the prompt asks for."""
    told = Prober(template, (PROBE_TOOL,)).render(talk(["user"]), dialect.form)
    plain = Prober(template).render(talk(["user"]), dialect.form)
    if not isinstance(told, str) or not isinstance(plain, str):
        return None
    new = [tag for tag in dict.fromkeys(_asked_for(told)) if tag not in plain]
    rows = [row for tag in new if reads_back(row := _list_behind(tag), reads)]
    return rows[0] if len(rows) == 1 else None


def _asked_for(text: str) -> Iterator[str]:
    """The tags that a sentence asks for, followed by a JSON list; a sentence with several tags says more than that."""
    for sentence in _SENTENCE_END.split(text):
        if len(tags := _TAG.findall(sentence)) == 1:
            before, tag, behind = sentence.partition(tags[0])
            if _ASKS.search(before) and _LIST.match(behind) and not _OTHERWISE.search(sentence):
                yield tag


def _list_behind(tag: str) -> CallRow:
    """Calls as objects with a name and arguments, as templates that write a list of calls do."""
    return CallRow((f'{tag}[{{"name": "',), ('", "arguments": ',), ('}, {"name": "',), ("}]",))
