"""What the value looks like that two prompts differ in: a time, an id. It reads the text around a difference and gives
a word of its own, never one of the text's."""

import re
from collections.abc import Sequence
from typing import Literal

from kvserve.explain.difference import Difference, common_length

type Look = Literal["a time", "a date", "an id", "a path", "a number", "tools in another order"]

OTHER_ORDER: Look = "tools in another order"

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_FORMS: Sequence[tuple[Look, str]] = (
    ("an id", r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{1,12}"),
    ("a time", r"\d{1,2}:\d{2}(?::\d{2})?(?:[.,]\d+)?"),
    ("a time", r"\b1[5-9]\d{8}(?:\d{3})?\b"),  # seconds or milliseconds since 1970
    ("a date", r"\b\d{4}-\d{1,2}-\d{1,2}"),
    ("a date", r"\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b"),
    ("a date", rf"\b{_MONTH}\.? +\d{{1,2}}(?:,? +\d{{4}})?|\b\d{{1,2}}\.? +{_MONTH}(?: +\d{{4}})?"),
    ("a date", r"\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"),
    ("a path", r"(?:~|\b[A-Za-z]:)?(?:[/\\][\w.@+-]+){2,}"),
    ("an id", r"\b(?=\w*\d)(?=\w*[A-Za-z])\w(?:[\w-]{6,}\w)\b"),
    ("a number", r"\d+(?:[.,]\d+)*"),
)
"""The first that both prompts have at their difference counts: an hour is a time, not a number."""


def look_of(difference: Difference | None) -> Look | None:
    """What stands at a difference in both prompts; None where that has no form that is known."""
    if difference is None:
        return None
    was, now = difference.before, difference.after
    char = common_length(was, now)
    return next((look for look, form in _FORMS if _is_other_value(form, was, now, char)), None)


def _is_other_value(form: str, was: str, now: str, char: int) -> bool:
    """Whether a value of this form begins at one place in both and is another one; one that the difference only adjoins
    is the same."""
    before, after = (
        {match.start(): match[0] for match in re.finditer(form, text) if match.start() <= char <= match.end()}
        for text in (was, now)
    )
    return any(start in after and after[start] != value for start, value in before.items())
