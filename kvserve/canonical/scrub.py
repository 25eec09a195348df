"""Line-scoped scrubs of plain or rendered text, for reading and comparing prompts; never what the model reads.

No match reaches across the end of a line or across a marker between sections.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvserve.canonical.rule import Form, Rule, RuleSet
from kvserve.canonical.rules import DEFAULT_RULES
from kvserve.canonical.spans import Span, canonical_text, match_at, spans_of


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """The text with its volatile lines in their canonical form, and the rules that changed something."""

    text: str
    fired: frozenset[str]


def scrub(text: str, rules: RuleSet = DEFAULT_RULES, *, boundaries: Sequence[str] = ()) -> Scrubbed:
    """`text` with the line rules applied to each line, whoever said it; who said what is not known here.

    `boundaries` are the template's markers between messages: a line with markers in it is several lines.
    """
    if not any(rule.form is not None and rule.form.opener in text for rule in rules.line_rules):
        return Scrubbed(text, frozenset())
    cut = re.compile("(" + "|".join(["\n", *(re.escape(marker) for marker in boundaries if marker)]) + ")")
    fired: set[str] = set()
    pieces = [piece if i % 2 else _scrub_line(piece, rules, fired) for i, piece in enumerate(cut.split(text))]
    return Scrubbed("".join(pieces), frozenset(fired))


def _scrub_line(line: str, rules: RuleSet, fired: set[str]) -> str:
    for rule in rules.line_rules:
        form = rule.form
        if form is None or form.opener not in line:
            continue
        spans = tuple(_spans_in_line(line, rule, form, rules))
        if any(span.canonical != span.text for span in spans):
            fired.add(rule.name)
            line = canonical_text(line, spans)
    return line


def _spans_in_line(line: str, rule: Rule, form: Form, rules: RuleSet) -> Iterator[Span]:
    if form.place in ("line_start", "anywhere"):
        yield from spans_of(rule, form, line, 0, rules)
        return
    span = match_at(line, 0, len(line), rule, form, rules)
    if span is not None and (form.place == "start" or span.end == len(line)):
        yield span
