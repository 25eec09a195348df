"""The incremental JSON scanner against the standard library, and what reading and writing keep exact."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.output.tool_parsers.form import NotACall
from kvserve.output.tool_parsers.json_text import json_container, read_json, write_json

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
