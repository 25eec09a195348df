"""Two versions of one user's message, and what a client sends for a message that it did not edit, for the laws."""

from dataclasses import dataclass

from hypothesis import strategies as st

from kvserve.canonical.rules import DEFAULT_RULES
from kvserve.core import Message, TextBlock
from tests.canonical.texts import HAS_VOLATILE, LEADING, LINES, REPORT, TRAILING

RENDER = {**LEADING, **LINES, **TRAILING}
OMITTED = {*LEADING, *TRAILING}
"""Rules that let the client leave a span out."""


def user(*texts: str) -> Message:
    return Message("user", tuple(TextBlock(text) for text in texts))


@dataclass(frozen=True)
class Slot:
    """A place for one span: what stands there in one version of a message, as (meaning, volatile), or nothing."""

    rule: str
    said: tuple[str, str] | None

    def text(self) -> str:
        return "" if self.said is None else RENDER[self.rule](*self.said)


@dataclass(frozen=True)
class Version:
    """One version of a user message: blocks of leading spans, and a body of fixed lines with line spans, and a tail."""

    leading: tuple[Slot, ...]
    lines: tuple[str | Slot, ...]
    trailing: Slot
    is_one_block: bool

    def slots(self) -> list[Slot]:
        return [*self.leading, *(line for line in self.lines if isinstance(line, Slot)), self.trailing]

    def message(self, texts: list[str] | None = None) -> Message:
        """The message, with `texts` in the slots instead of what they say."""
        said = iter([slot.text() for slot in self.slots()] if texts is None else texts)
        leading = [next(said) for _ in self.leading]
        body = "\n".join(line if isinstance(line, str) else next(said) for line in self.lines) + next(said)
        if self.is_one_block:
            return user("".join([*leading, body]))
        return user(*(text for text in leading if text), body)


WORDS = st.sampled_from(["red", "blue", "1", "22"])
FIXED = st.text(alphabet="ab \n<`*.é日", min_size=1, max_size=8).map(lambda text: "x" + text + "x")


def said(rule: str) -> st.SearchStrategy[tuple[str, str] | None]:
    some = st.tuples(WORDS, WORDS)
    return st.none() | some if rule in OMITTED else some


@st.composite
def versions(draw: st.DrawFn) -> tuple[Version, Version]:
    """Two versions of one message; the client may have edited anything in between."""
    leading = draw(st.lists(st.sampled_from(sorted(LEADING)), max_size=3, unique=True))
    inner = st.lists(FIXED | st.sampled_from(sorted(LINES)), max_size=3)
    lines = ["", *draw(inner.filter(lambda lines: lines.count("run_statistics") < 2)), "."]
    lines[0] = REPORT if "run_statistics" in lines else draw(FIXED)
    is_one_block = draw(st.booleans())
    edited = draw(st.booleans())

    def version(fixed: list[str]) -> Version:
        return Version(
            tuple(Slot(rule, draw(said(rule))) for rule in leading),
            tuple(Slot(line, draw(said(line))) if line in LINES else line for line in fixed),
            Slot("aider_reminder", draw(said("aider_reminder"))),
            is_one_block,
        )

    seen = version(lines)
    if edited:
        at = draw(st.sampled_from([i for i, line in enumerate(lines) if line not in LINES]))
        lines = [*lines[:at], draw(FIXED), *lines[at + 1 :]]
    return version(lines), seen


def may_be_as_seen(fresh: Slot, seen: Slot, in_history: bool) -> bool:
    """The law, said independently: only where the policy allows it, and only for what is left out or means the same."""
    if not DEFAULT_RULES.replays(fresh.rule, in_history=in_history) or seen.said is None:
        return False
    if fresh.said is None:
        return fresh.rule in OMITTED
    return fresh.said[0] == seen.said[0] and fresh.rule in HAS_VOLATILE


@st.composite
def echoes(draw: st.DrawFn) -> tuple[Version, Version]:
    """A message, and what a client sends for it that edits nothing: spans left out, volatile parts moved."""

    def echoed(slot: Slot) -> Slot:
        said = [slot.said]
        if slot.said is not None and slot.rule in HAS_VOLATILE:
            said.append((slot.said[0], draw(WORDS)))
        if slot.rule in OMITTED and DEFAULT_RULES.replays(slot.rule, in_history=True):
            said.append(None)
        return Slot(slot.rule, draw(st.sampled_from(said)))

    _, seen = draw(versions())
    lines = tuple(echoed(line) if isinstance(line, Slot) else line for line in seen.lines)
    return Version(tuple(map(echoed, seen.leading)), lines, echoed(seen.trailing), seen.is_one_block), seen
