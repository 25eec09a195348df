"""Events and their lines: the format is a contract with scripts that cannot import the package."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.observe.trace import format_line
from tests.laws import num_examples
from tests.trace_lines import Event, parse_line

names = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)
texts = st.text(st.characters(), max_size=40)
scalars = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
events = st.builds(Event, names, st.dictionaries(names, values, max_size=4))


def parse_as_a_script_does(line: str) -> tuple[str, dict[str, object]]:
    """The six lines that trace.py promises to scripts."""
    name, _, rest = line.rstrip("\n").partition(" ")
    fields: dict[str, object] = {}
    while rest:
        key, _, rest = rest.partition("=")
        fields[key], end = json.JSONDecoder().raw_decode(rest)
        rest = rest[end + 1 :]
    return name, fields


@given(events)
@settings(max_examples=num_examples(40))
def test_a_line_parses_back_to_its_event(event: Event) -> None:
    """parse(format(event)) == event, for any values that JSON can say."""
    assert parse_line(event.line) == event
    assert parse_line(event.line + "\n") == event


@given(events)
@settings(max_examples=num_examples(40))
def test_a_line_is_one_printable_line(event: Event) -> None:
    """Whatever the values hold, the line has no character that splits lines or moves a cursor."""
    line = event.line
    assert line.isprintable()
    assert line.splitlines() == [line]


@given(events)
@settings(max_examples=num_examples(40))
def test_the_reader_promised_to_scripts_works(event: Event) -> None:
    """The six lines of the file's charter read what format_line writes."""
    assert parse_as_a_script_does(event.line + "\n") == (event.name, event.fields)


def test_a_line_reads_well() -> None:
    """Name first, then the fields in the order given, text as it is."""
    fields = {"request_id": "a1b2", "num_prompt_tokens": 10432, "stream": True, "text": 'say "ä"\n', "rules": ["cch"]}
    assert format_line("turn", **fields, why=None) == (
        'turn request_id="a1b2" num_prompt_tokens=10432 stream=true text="say \\"ä\\"\\n" rules=["cch"] why=null'
    )


def test_what_json_cannot_say_is_written_as_text() -> None:
    """A value of another type costs no event."""
    assert format_line("turn", error=KeyError("x")) == """turn error="'x'\""""


@pytest.mark.parametrize("word", ["", "Turn", "a b", "a=b", "1a", "turn\n"])
def test_a_name_that_would_break_the_line_is_refused(word: str) -> None:
    """Names and keys are lower case letters, digits and underscores."""
    with pytest.raises(ValueError, match="cannot name"):
        format_line(word)
    with pytest.raises(ValueError, match="cannot name"):
        format_line("turn", **{word: 1})


@pytest.mark.parametrize("line", ["", "turn a", "turn a=", 'turn a="x', "turn a=1b=2", "turn a=1 a=2", "turn a=1  b=2"])
def test_another_line_is_refused(line: str) -> None:
    """A line that format_line cannot have written raises ValueError."""
    with pytest.raises(ValueError):
        parse_line(line)
