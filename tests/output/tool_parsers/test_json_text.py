"""The incremental JSON scanner against the standard library, and what reading and writing keep exact."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import NotACall
from kvserve.output.tool_parsers.json_text import json_container, read_json, write_json
from tests.laws import num_examples

PIECES = st.sampled_from(
    [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"',
        '"a"',
        '"b"',
        "\\",
        "\\n",
        "1",
        "-",
        "0",
        ".5",
        "e3",
        "true",
        "nul",
        "null",
        " ",
        "é",
    ]
)


def scanned(text: str) -> str | None:
    """What the scanner takes from the beginning of `text`; None if it refuses or wants more."""
    scan = json_container(text[:1])
    try:
        next(scan)
        for char in text[1:]:
            scan.send(char)
    except StopIteration as done:
        return str(done.value)
    except NotACall:
        return None
    return None


@given(
    st.lists(PIECES, max_size=14).map("".join) | st.lists(PIECES, max_size=8).map(lambda inner: f"[{''.join(inner)}]")
)
def test_the_scanner_agrees_with_the_standard_decoder(text: str) -> None:
    """It takes exactly the object or array that the standard decoder finds at the beginning, or nothing."""
    expected: str | None
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text)
        expected = text[:end] if text[:1] in ("{", "[") else None
    except ValueError:
        expected = None
    assert scanned(text) == expected


@pytest.mark.parametrize("text", ['{"a": x', '{"a" 1', "{1", "[1 2", '["\\q', "[01,", "[tru,"])
def test_the_scanner_stops_at_the_first_impossible_character(text: str) -> None:
    """A broken call is let go at once instead of holding back the rest of the answer."""
    scan = json_container(text[0])
    next(scan)
    with pytest.raises(NotACall):
        for char in text[1:]:
            scan.send(char)


def test_a_lone_surrogate_survives_as_an_escape() -> None:
    """Text that cannot be encoded is written so that it can be sent."""
    text = write_json(read_json('{"a": "\\ud800", "b": "ж"}'))
    text.encode()
    assert json.loads(text) == {"a": "\ud800", "b": "ж"}
    assert write_json({"b": "ж"}) == '{"b": "ж"}'


STRINGS = st.lists(
    st.sampled_from(["\\ud83d\\ude00", "\\ud83d", "\\ude00", "\\n", "\n", '\\"', "\\u00e9", "é", "a", "\\/"])
)
SPELT_STRINGS = STRINGS.map(lambda parts: f'"{"".join(parts)}"')
SCALARS = st.sampled_from(["1", "-0", "1.50", "1e3", "true", "null", "-0.0", "12345678901234567890"])
SPACES = st.sampled_from(["", "", " ", "\n  ", "\t"])


@st.composite
def spelt_objects(draw: st.DrawFn, depth: int = 2) -> str:
    """An object in a spelling that `json.dumps` would not choose."""
    values = SPELT_STRINGS | SCALARS
    if depth:
        values = (
            values | spelt_objects(depth - 1) | st.lists(SCALARS, max_size=3).map(lambda each: f"[{','.join(each)}]")
        )
    members = draw(
        st.lists(
            st.tuples(SPELT_STRINGS, values), max_size=3, unique_by=lambda member: json.loads(member[0], strict=False)
        )
    )
    gap = draw(SPACES)
    return "{" + f"{gap},".join(f"{gap}{key}{gap}:{gap}{value}" for key, value in members) + gap + "}"


@given(spelt_objects())
@settings(max_examples=num_examples(40))
def test_a_draft_gets_what_is_read_as_it_is_written_again(text: str) -> None:
    """However an object is spelt, the draft has the spelling of `write_json`, but for the last bracket, and a
    beginning of that at any place."""
    draft = CallDraft(["f"])
    draft.open("f")
    scan = json_container(text[0], draft)
    next(scan)
    expected = write_json(read_json(text))
    with pytest.raises(StopIteration):
        for char in text[1:]:
            assert expected.startswith(draft.arguments)
            draft.hold(char)
            scan.send(char)
    assert draft.arguments + "}" == expected
