"""Finds the spans of the rules in one text block. It knows the places of forms, not what happens to the spans."""

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice

from kvserve.canonical.rule import Form, Rule, RuleSet
from kvserve.core import Role

_MAX_SPANS = 64
"""Per text block; recordings have five at most. It bounds the work that a malicious text can cause."""


@dataclass(frozen=True, slots=True)
class RuleSpan:
    """The half-open run `[start, end)` of characters of one text block that a rule matches.

    `canonical` replaces it in identity; `meaning` is the span without its volatile parts; `volatile` are those, each
    with the name of the rule whose policy applies to it.
    """

    start: int
    end: int
    rule: Rule
    text: str
    canonical: str
    meaning: str
    volatile: tuple[tuple[str, str], ...]

    @property
    def key(self) -> tuple[str, str]:
        """Equal for spans with the same meaning."""
        return self.rule.name, self.meaning

    def without(self, names: Container[str]) -> str:
        """The text without the volatile parts of the rules with these names."""
        text, form = self.text, self.rule.form
        for name, pattern in form.volatile.items() if form is not None else ():
            text = pattern.sub("", text) if name in names else text
        return text


def find_spans(text: str, role: Role, rules: RuleSet) -> tuple[RuleSpan, ...]:
    """The spans in `text`, in order, without overlaps.

    A text whose canonical form would change again has no spans: two pieces that meet only because a span between them
    was taken out are not a recorded form. That makes the canonical form stable. A text with more spans than any client
    sends has none either.
    """
    span_rules = rules.span_rules[role]
    if not span_rules:
        return ()
    spans = tuple(_scan(text, span_rules, rules))
    if len(spans) > _MAX_SPANS:
        return ()
    if spans:
        canonical = canonical_text(text, spans)
        if canonical and canonical_text(canonical, tuple(_scan(canonical, span_rules, rules))) != canonical:
            return ()
    return spans


def canonical_text(text: str, spans: tuple[RuleSpan, ...]) -> str:
    """`text` with the canonical form of each span in its place."""
    return _with_spans_as(text, [(span, span.canonical) for span in spans])


def meaning_text(text: str, spans: tuple[RuleSpan, ...]) -> str:
    """`text` with only the volatile parts taken out."""
    return _with_spans_as(text, [(span, span.meaning) for span in spans])


def _with_spans_as(text: str, replaced: list[tuple[RuleSpan, str]]) -> str:
    pieces: list[str] = []
    done = 0
    for span, replacement in replaced:
        pieces += (text[done : span.start], replacement)
        done = span.end
    return "".join([*pieces, text[done:]])


def _scan(text: str, span_rules: tuple[Rule, ...], rules: RuleSet) -> Iterator[RuleSpan]:
    leading = _leading_spans(text, span_rules, rules)
    yield from leading
    done = leading[-1].end if leading else 0
    later = [
        span
        for rule in span_rules
        if rule.form is not None and rule.form.place in ("line_start", "last_line", "anywhere", "end")
        for span in islice(_spans_of(rule, rule.form, text, done, rules), _MAX_SPANS + 1)
    ]
    for span in sorted(later, key=lambda span: (span.start, -span.end)):
        if span.start >= done:
            yield span
            done = span.end


def _leading_spans(text: str, span_rules: tuple[Rule, ...], rules: RuleSet) -> list[RuleSpan]:
    spans: list[RuleSpan] = []
    position, found = 0, True
    while found:
        found = False
        if len(spans) > _MAX_SPANS:
            break
        for rule in span_rules:
            form = rule.form
            if form is None or form.place not in ("start", "whole") or not text.startswith(form.opener, position):
                continue
            if form.place == "whole" and position:
                continue
            span = _match_at(text, position, _end_of_scope(text, position, rule), rule, form, rules)
            if span is not None and (form.place == "start" or span.end == len(text)):
                spans.append(span)
                position, found = span.end, span.end < len(text)
                break
    return spans


def _spans_of(rule: Rule, form: Form, text: str, start: int, rules: RuleSet) -> Iterator[RuleSpan]:
    """The spans of one rule that is not a leading one, from `start`, where the leading spans end."""
    if form.heading is not None and form.heading.match(text, start) is None:
        return
    if form.place in ("end", "last_line"):
        position = text.rfind(form.opener, start) if form.place == "end" else _last_line(text, form.opener, start)
        if position >= 0:
            span = _match_at(text, position, _end_of_scope(text, position, rule), rule, form, rules)
            if span is not None and (form.place == "last_line" or span.end == len(text)):
                yield span
        return
    position = text.find(form.opener, start)
    while position >= 0:
        following = position + 1
        if form.place == "anywhere" or position == 0 or text[position - 1] == "\n":
            span = _match_at(text, position, _end_of_scope(text, position, rule), rule, form, rules)
            if span is not None:
                yield span
                following = span.end
        position = text.find(form.opener, following)


def _last_line(text: str, opener: str, start: int) -> int:
    """Where the last line from `start` on begins that begins with `opener`; -1 without one."""
    before = text.rfind(f"\n{opener}", start)
    return before + 1 if before >= 0 else start if text.startswith(opener, start) else -1


def _end_of_scope(text: str, position: int, rule: Rule) -> int:
    """How far a span of `rule` that starts at `position` may reach: the end of its line, or of the text."""
    if rule.scope != "line":
        return len(text)
    line_end = text.find("\n", position)
    return len(text) if line_end < 0 else line_end


def _match_at(text: str, start: int, end: int, rule: Rule, form: Form, rules: RuleSet) -> RuleSpan | None:
    """The span of `rule` at `start`, up to `end` at most; None if the text does not have the recorded form."""
    match = form.pattern.match(text, start, end)
    if match is None or match.end() == start:
        return None
    span_text = match.group()
    if form.is_json and not _is_json_object(match["json"]):
        return None
    if form.holds is not None and form.holds.search(span_text) is None:
        return None
    if form.lacks is not None and form.lacks.search(span_text) is not None:
        return None
    meaning, volatile = _without_volatile(span_text, form, rules)
    canonical = "" if form.is_omitted else meaning
    return RuleSpan(start, match.end(), rule, span_text, canonical, meaning, volatile)


def _without_volatile(text: str, form: Form, rules: RuleSet) -> tuple[str, tuple[tuple[str, str], ...]]:
    volatile: list[tuple[str, str]] = []
    for name, pattern in form.volatile.items():
        if name in rules:
            volatile.append((name, "\n".join(match.group() for match in pattern.finditer(text))))
            text = pattern.sub("", text)
    return text, tuple(volatile)


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
