"""Bodies and typed readers: what is read, what is refused and which field an error names."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.errors import BadRequest
from kvserve.protocols.fields import (
    MAX_NESTING,
    Fields,
    decode_body,
    flag,
    integer,
    list_of,
    mapping,
    number,
    places,
    single_keys,
    text,
    with_extra_body,
    word,
)

SURROGATE_BODY = (
    rb'{"cut": "\ud83d", "low": "\uDE00", "whole": "\ud83d\ude00", "k\ud800": [{"x": "\ud800"}], "bs": "\\ud800"}'
)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "no body"),
        (b" \n", "no body"),
        (b'{"a": 1', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b"[1]", "must be a JSON object, got an array"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object, got null"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too large"),
        (b'{"a": ' + b"[" * 1000 + b"]" * 1000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"[" * 500_000, "nested too deeply"),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, "nested too deeply"),
    ],
    ids=itertools.count(),
)
def test_a_body_that_is_not_a_json_object_is_a_bad_request(raw: bytes, reason: str) -> None:
    """Every kind of broken body is refused with its reason."""
    with pytest.raises(BadRequest, match=reason):
        decode_body(raw)


def test_the_nesting_limit_is_exact() -> None:
    """The deepest allowed body is read, one level more is refused."""
    deepest = b"[" * (MAX_NESTING - 1) + b"]" * (MAX_NESTING - 1)
    decode_body(b'{"a":' + deepest + b"}")
    with pytest.raises(BadRequest, match="nested too deeply"):
        decode_body(b'{"a":[' + deepest + b"]}")


def test_of_equal_keys_the_last_one_counts() -> None:
    """Duplicate keys are tolerated."""
    assert decode_body(b'{"a": 1, "a": 2}') == {"a": 2}


def test_lone_surrogates_become_replacement_characters() -> None:
    """Half an emoji is mended in values and keys, a whole one and an escaped backslash stay."""
    body = decode_body(SURROGATE_BODY)
    assert body == {"cut": "\ufffd", "low": "\ufffd", "whole": "😀", "k\ufffd": [{"x": "\ufffd"}], "bs": "\\ud800"}


@given(st.text())
def test_any_decoded_text_encodes_to_utf8(content: str) -> None:
    """Whatever escapes a client writes, what was decoded can be written again."""
    raw = json.dumps({"a": content + "\ud83d", "b": [content]}).encode()
    json.dumps(decode_body(raw), ensure_ascii=False).encode("utf-8")


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_an_object_or_a_bad_request(raw: bytes) -> None:
    """No bytes raise anything but BadRequest."""
    try:
        assert isinstance(decode_body(raw), dict)
    except BadRequest as error:
        assert error.message


@pytest.mark.parametrize("value", ["1", True, 1.5, None, [], {}, 0, 11, float("nan"), float("inf"), 10**400, 1e300])
def test_what_is_no_integer_in_range_names_its_field(value: object) -> None:
    """Strings, booleans, fractions, NaN and huge numbers are not integers."""
    with pytest.raises(BadRequest) as caught:
        integer(1, 10)(value, "a.b[2]")
    assert caught.value.param == "a.b[2]"
    assert caught.value.message.startswith("a.b[2]: expected an integer from 1 to 10, got ")


def test_an_integer_beyond_what_python_prints_is_refused() -> None:
    """The error text does not need the digits."""
    with pytest.raises(BadRequest, match="got a number that is too large"):
        integer(1, 10)(10**5000, "x")


def test_a_whole_float_is_an_integer() -> None:
    """1.0 is what some JSON writers make of 1."""
    assert integer(1, 10)(1.0, "x") == 1
    assert isinstance(integer(1, 10)(1.0, "x"), int)


@pytest.mark.parametrize("value", ["1", True, None, -0.1, 2.1, float("nan"), float("inf"), -(10**400), [1]])
def test_what_is_no_number_in_range_is_refused(value: object) -> None:
    """Neither strings nor booleans nor NaN nor huge numbers are numbers in range."""
    with pytest.raises(BadRequest, match="expected a number from 0 to 2"):
        number(0, 2)(value, "temperature")


def test_an_open_lower_end_is_refused() -> None:
    """`above` excludes the lower end."""
    with pytest.raises(BadRequest, match="above 0 and up to 2"):
        number(0, 2, above=True)(0, "x")


@pytest.mark.parametrize(
    ("reader", "value"),
    [(text, 1), (text, None), (flag, 0), (flag, "true"), (mapping, []), (word("a", "b"), "c"), (word("a"), ["a"])],
)
def test_other_types_are_refused(reader: object, value: object) -> None:
    """Each reader takes its own type only."""
    with pytest.raises(BadRequest) as caught:
        reader(value, "field")  # type: ignore[operator]
    assert caught.value.param == "field"


def test_a_list_names_the_item() -> None:
    """An error inside an array carries the index."""
    with pytest.raises(BadRequest) as caught:
        Fields({"a": [{"b": "x"}, {"b": 2}]}).required("a", list_of(lambda v, p: mapping(v, p).required("b", text)))
    assert caught.value.param == "a[1].b"


def test_a_missing_field_is_named() -> None:
    """Missing and null are the same: required."""
    for body in ({}, {"a": None}):
        with pytest.raises(BadRequest, match="a is required") as caught:
            Fields(body).required("a", text)
        assert caught.value.param == "a"


def test_extra_body_fills_in_what_the_body_lacks() -> None:
    """The top level counts, null there is silence, and errors name where the value stood."""
    fields = with_extra_body({"a": "top", "b": None, "extra_body": {"a": "extra", "b": "extra", "c": 1}})
    assert fields.optional("a", text) == "top"
    assert fields.optional("b", text) == "extra"
    with pytest.raises(BadRequest) as caught:
        fields.optional("c", text)
    assert caught.value.param == "extra_body.c"
    with pytest.raises(BadRequest, match=r"^d is required"):
        fields.required("d", text)


def test_places_are_those_that_exist() -> None:
    """Missing and null objects are skipped, other types are refused."""
    body = {"x": {"y": {"k": 1}}, "z": None}
    assert [place.path for place in places(body, (), ("x", "y"), ("z",), ("z", "y"))] == ["", "x.y"]
    with pytest.raises(BadRequest):
        places({"x": 3}, ("x",))


@pytest.mark.parametrize("sent", ['{"a":1,"a":2}', '{"b":[{"a":"\\ud800","a":2}]}', '{"b":{"c":{"":1,"":1}}}'])
@pytest.mark.parametrize("sign", ['"type":"tool_use","input":', '"arguments" : ', '"input_examples":'])
def test_where_every_word_must_arrive_equal_keys_are_refused(sent: str, sign: str) -> None:
    """One of the two values would be lost: the client hears of it, with the field's name."""
    body = decode_body(f"{{{sign}{sent}}}".encode())
    field = next(key for key, value in body.items() if not isinstance(value, str))
    with pytest.raises(BadRequest, match="a key is named twice") as caught:
        Fields(body).required(field, single_keys)
    assert caught.value.param == field


@given(
    st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=9)
)
def test_objects_without_equal_keys_are_read(value: object) -> None:
    """Whatever they hold."""
    sent = {"type": "tool_use", "input": {"value": value}}
    body = decode_body(json.dumps(sent).encode())
    assert Fields(body).required("input", single_keys).values == decode_body(json.dumps(sent["input"]).encode())
