"""The stop scanner's laws: no cut matters, the first complete stop string ends the text, only beginnings are held."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.output.stop import StopScanner
from tests.laws import num_examples

LETTERS = st.text(alphabet="ab<Ж", max_size=24)
STOPS = st.lists(st.text(alphabet="ab<Ж", max_size=4), max_size=4)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text and a way to cut it."""
    text = draw(LETTERS)
    places = sorted(draw(st.sets(st.integers(0, len(text)))))
    return text, [text[a:b] for a, b in pairwise([0, *places, len(text)])]


def scan(parts: list[str], stops: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    text = "".join(scanner.feed(part).text for part in parts) + scanner.finish().text
    return text, scanner.stop_string


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: try every end in order, the longest stop string there counts."""
    for end in range(1, len(text) + 1):
        for stop in sorted(filter(None, stops), key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(cut_texts(), STOPS)
@settings(max_examples=num_examples(60))
def test_the_first_complete_stop_string_ends_the_text(case: tuple[str, list[str]], stops: list[str]) -> None:
    """For any cutting the text ends before the stop string that is complete first."""
    text, parts = case
    assert scan(parts, stops) == expected(text, stops)
    assert scan(list(text), stops) == expected(text, stops)


@given(LETTERS, STOPS)
@settings(max_examples=num_examples(60))
def test_only_a_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    """What is not out yet is the beginning of a stop string, and no longer beginning could have been meant."""
    scanner = StopScanner(stops)
    out = scanner.feed(text).text
    if scanner.stop_string is None:
        held = text.removeprefix(out)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "out", "found"),
    [
        ("one\n\ntwo", ["\n\n"], "one", "\n\n"),
        ("abc", ["abcd", "b"], "a", "b"),
        ("xab", ["ab", "b"], "x", "ab"),
        ("stop at the en", ["end"], "stop at the en", None),
        ("anything", [""], "anything", None),
        ("anything", [], "anything", None),
    ],
)
def test_table(text: str, stops: list[str], out: str, found: str | None) -> None:
    """Overlaps, a beginning at the very end, and nothing to look for."""
    assert scan(list(text), stops) == (out, found)


def test_text_after_the_match_is_dropped() -> None:
    """The turn is over at the match: neither the rest of the piece nor later pieces go out."""
    scanner = StopScanner(["END"])
    assert scanner.feed("a END b").text == "a "
    assert scanner.feed("c").text == ""
    assert scanner.finish().text == ""
    assert scanner.stop_string == "END"
