"""Line scrubs: each line by itself, never across a line end or a marker of the template."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.canonical.rules import select
from kvserve.canonical.scrub import scrub

BILLING = "x-anthropic-billing-header: cc_version=2.1.119.710; cc_entrypoint=sdk-cli; cch=818ce;"
PROMPT = f"""<|im_start|>system
{BILLING}
You are an agent.
Current time is 10:00<|im_end|>
<|im_start|>user
Stats: runtime 1m5s • tokens 35k • sessionKey a
Hi<|im_end|>
"""
MARKERS = ("<|im_start|>", "<|im_end|>", "|CUT|")


def test_volatile_lines_of_a_rendered_prompt_are_blanked() -> None:
    """Everything else, markers too, stays where it is."""
    result = scrub(PROMPT, boundaries=MARKERS)
    assert result.text == PROMPT.replace(BILLING, "x-anthropic-billing-header: cc_version=; cc_entrypoint=;").replace(
        "is 10:00", "is"
    ).replace("1m5s • tokens 35k •", " • tokens •")
    assert result.fired == {"billing_header", "current_time", "run_statistics"}


def test_a_marker_on_the_line_ends_the_match() -> None:
    """What the template writes behind the last word of a message is never swallowed, known as a marker or not."""
    assert scrub("Current time is 10:00<|im_end|>\nx").text == "Current time is<|im_end|>\nx"
    assert scrub("Current time is 10:00|CUT|Answer", boundaries=MARKERS).text == "Current time is|CUT|Answer"


def test_rules_that_are_off_do_nothing() -> None:
    """And a text without any opener is the same text."""
    assert scrub(PROMPT, select({}, enabled=False)).text == PROMPT
    assert scrub("plain\ntext").text == "plain\ntext"
    assert "current_time" not in scrub(PROMPT, select({"current_time": "off"})).fired


TEXTS = [
    BILLING,
    "Current time is",
    " 10:00",
    "Stats: runtime 1m5s • tokens 3k",
    "<total_tokens>7 tokens left</total_tokens>",
]
PIECES = st.sampled_from([*TEXTS, *MARKERS, "\n", "\n", "x", " ", "<"])


@given(st.lists(PIECES, max_size=10).map("".join), st.lists(PIECES, max_size=10).map("".join))
@settings(max_examples=200, deadline=None)
def test_no_match_crosses_a_line_or_a_section(before: str, after: str) -> None:
    """A text cut at a line end or a marker is scrubbed piece by piece to the same, and scrubbing is stable."""
    for boundary in ("\n", *MARKERS):
        whole = scrub(before + boundary + after, boundaries=MARKERS)
        pieces = scrub(before, boundaries=MARKERS), scrub(after, boundaries=MARKERS)
        assert whole.text == pieces[0].text + boundary + pieces[1].text
        assert whole.fired == pieces[0].fired | pieces[1].fired
        assert scrub(whole.text, boundaries=MARKERS).text == whole.text
