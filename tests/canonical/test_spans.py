"""Where spans may stand: a line rule looks at one line, every rule at one block; nothing is matched across a border."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.canonical.canonicalise import canonicalise
from kvserve.canonical.rule import RuleSet
from kvserve.canonical.rules import RULES
from kvserve.canonical.spans import canonical_text, find_spans
from kvserve.core import Message, Role, TextBlock
from tests.canonical.texts import REPORT
from tests.laws import num_examples

BILLING = "x-anthropic-billing-header: cc_version=2.1.119.710; cc_entrypoint=sdk-cli; cch=818ce;"
LINE_RULES = tuple(rule for rule in RULES if rule.scope == "line" and rule.form is not None)
IN_ANY_LINE = RuleSet(
    tuple(rule for rule in LINE_RULES if rule.form is not None and rule.form.place in ("line_start", "anywhere"))
)
PIECES = st.sampled_from(
    [
        *(BILLING, "Current time is", " 10:00", "Stats: runtime 1m5s • tokens 3k", "Today's date is 2026-11-21."),
        *("<total_tokens>7 tokens left</total_tokens>", "  Today's date: Sat Nov 21 2026", "<|im_end|>"),
        *("\n", "\n", "x", " ", "<", f"{REPORT}\n"),
    ]
)
TEXTS = st.lists(PIECES, max_size=10).map("".join)
ROLES = st.sampled_from(("system", "user"))


@given(TEXTS, ROLES)
@settings(max_examples=num_examples(60), deadline=None)
def test_no_span_of_a_line_rule_leaves_its_line(text: str, role: Role) -> None:
    """Nor does it take in what a template writes behind the last word of a message."""
    for span in find_spans(text, role, RuleSet(LINE_RULES)):
        assert "\n" not in span.text and "<|" not in span.text
        assert text[span.start : span.end] == span.text


@given(TEXTS, TEXTS, ROLES)
@settings(max_examples=num_examples(60), deadline=None)
def test_a_line_is_normalised_by_itself(before: str, after: str, role: Role) -> None:
    """A text cut at a line's end has the canonical form of its parts."""

    def canonical(text: str) -> str:
        return canonical_text(text, find_spans(text, role, IN_ANY_LINE))

    assert canonical(f"{before}\n{after}") == f"{canonical(before)}\n{canonical(after)}"


@given(st.lists(TEXTS, max_size=4), ROLES)
@settings(max_examples=num_examples(50), deadline=None)
def test_a_block_is_normalised_by_itself(texts: list[str], role: Role) -> None:
    """Two blocks that only together look like a recorded form are no recorded form."""

    def canonical(*said: str) -> list[str]:
        message = canonicalise(Message(role, tuple(map(TextBlock, said)))).message
        return [block.text for block in message.blocks if isinstance(block, TextBlock)] if message is not None else []

    if len(texts) > 1:  # a message of one block may be dropped whole
        assert canonical(*texts, "x") == [text for one in texts for text in canonical(one, "x")[:-1]] + ["x"]
