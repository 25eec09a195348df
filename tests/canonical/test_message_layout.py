"""When the arguments of two calls say the same: the one place where that is decided."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.canonical.message_layout import same_arguments
from tests.laws import num_examples

TEXTS = st.text(max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3)


@given(ARGUMENTS)
@settings(max_examples=num_examples(50))
def test_spelling_does_not_matter(value: object) -> None:
    """However JSON is spaced, ordered and escaped, it says the same; wrapped once more it does not."""
    spellings = [
        json.dumps(value),
        json.dumps(value, separators=(",", ":"), ensure_ascii=False),
        json.dumps(value, indent=2, sort_keys=True),
    ]
    assert all(same_arguments(one, other) for one in spellings for other in spellings)
    assert not same_arguments(spellings[0], json.dumps({"value": value}))


@given(ARGUMENTS, ARGUMENTS)
@settings(max_examples=num_examples(50))
def test_equal_arguments_are_equal_values(one: object, other: object) -> None:
    """Never same where Python's own comparison finds a difference."""
    if same_arguments(json.dumps(one), json.dumps(other)):
        assert one == other


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1", "true", False),
        ("0", "false", False),
        ("1.0", "1", True),
        ("1e999", "1e998", False),
        ("0.1", "0.10000000000000000001", False),
        ("[]", "{}", False),
        ("[1]", "1", False),
        ("{", "{", True),
        ("{", "{ ", False),
        ("NaN", "NaN ", False),
        ("1e99999999999999999999999", "1", False),
        ("1e99999999999999999999999", "1e99999999999999999999999", True),
        ("[" * 200_000, "[" * 200_001, False),
    ],
)
def test_values_that_python_would_mix_up(one: str, other: str, same: bool) -> None:
    """true is not 1, rounding is not equality, what cannot be parsed is only equal as text."""
    assert same_arguments(f'{{"a":{one}}}', f'{{"a":{other}}}') is same


def test_a_key_that_is_named_twice_is_not_the_last_one() -> None:
    """A parser would take the second and forget that the first was written."""
    assert not same_arguments('{"a": 1, "a": 2}', '{"a": 2}')
