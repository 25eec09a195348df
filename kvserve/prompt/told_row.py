"""Finds the form of calls that a chat template asks for in words and never writes, at load, in its rendering of a tool.

Such a template (Granite 3's) has no place for calls: they stand in the text of an answer. What the words say is read as
"<tag> followed by a JSON list"; a form in other words is not found.
"""

import re
from collections.abc import Iterator

from kvserve.core import CallRow
from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.probe import PROBE_TOOL, Prober, probe, talk
from kvserve.prompt.reading_back import ReadsCalls, reads_back
from kvserve.prompt.tokenizer import Tokenizer

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
    """The row that the template's words ask for, verified with `reads`."""
    if "tools" not in template.reads:
        return None
    prober = Prober(template, (PROBE_TOOL,))
    dialect = probe(prober)
    if dialect is None or dialect.calls or not dialect.tools:
        return None
    told = prober.render(talk(["user"]), dialect.form)
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
