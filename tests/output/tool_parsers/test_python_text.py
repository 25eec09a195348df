"""Values of JSON in Python's spelling come back exactly; whatever else is refused."""

import json

import pytest
from hypothesis import given

from kvserve.output.tool_parsers.python_text import read_python
from tests.output.tool_parsers.test_calls import JSON


@given(JSON)
def test_what_python_shows_of_a_value_is_that_value(value: object) -> None:
    """Quotes of both kinds, escapes, numbers and words at every depth."""
    assert json.dumps(read_python(repr(value))) == json.dumps(value)


@pytest.mark.parametrize(
    "text",
    [
        "{'a': 1, 'a': 2}", "[true]", "{'a': null}", "(1, 2)", "{1, 2}", "{1: 2}", "'a' 'b'", "[1 2]", "b'a'", "f'a'",
        "'\\d'", "1_000", "0x10", "1j", "inf", "nan", "[1,]", "'a", "__import__('os')", "1 + 1", "", "'\\U99999999'",
        "[" * 100_000,
    ],
)  # fmt: skip
def test_what_json_does_not_have_is_refused(text: str) -> None:
    """Equal keys, JSON's words, tuples, sums, names, broken texts: taking a part of them would alter them."""
    with pytest.raises(ValueError):
        read_python(text)
