"""How much of a schema is enforced: never a refusal unless it is strict, and what is enforced is held by every walk."""

import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from llguidance import LLMatcher, LLTokenizer

from kvserve.core import ResponseFormat
from kvserve.errors import BadRequest
from kvserve.output.enforced import MAX_TRIES, Enforced, allows_any_text, described, enforced
from kvserve.output.grammar import build_raw_grammar
from tests.laws import num_examples
from tests.output.schemas import LOOK_AROUND, ODD_KEYWORDS, schemas

BYTES = LLTokenizer("byte")
FIELD = "tools[0].function.parameters"

EVERYWHERE = {
    "type": "object",
    "properties": {
        "name": LOOK_AROUND,
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True, "maxItems": 2},
        "size": {"$ref": "#/$defs/size"},
        "mode": {"enum": ["r", "w"]},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
    "dependentRequired": {"tags": ["mode"]},
    "$defs": {"size": {"type": "integer", "minimum": 1, "maximum": 5, "contains": {}}},
}


def matcher(schema: Enforced) -> LLMatcher:
    made = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(schema.text), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(schema: Enforced, value: object) -> bool:
    guide, ids = matcher(schema), BYTES.tokenize_str(json.dumps(value))
    return guide.try_consume_tokens(ids) == len(ids) and guide.is_accepting()


def test_only_what_cannot_be_held_is_left_out() -> None:
    """A look-around leaves its pattern out and nothing around it; keywords that are dropped are named."""
    held = enforced(EVERYWHERE, FIELD, strict=False)
    assert set(held.left_out) == {"properties.name.pattern", "uniqueItems", "dependentRequired", "contains"}
    good: dict[str, object] = {"name": "abc", "tags": ["a", "a"], "size": 3, "mode": "r"}
    assert accepts(held, good)
    for bad in (
        {**good, "name": 5},
        {**good, "tags": ["a", "b", "c"]},
        {**good, "tags": ["long"]},
        {**good, "size": 6},
        {**good, "mode": "x"},
        {**good, "more": 1},
        {"name": "abc"},
    ):
        assert not accepts(held, bad), bad


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": LOOK_AROUND}}}},
         "$defs.a.properties.b.pattern"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/gone"}}}, "properties.a.$ref"),
        ({"type": "array", "items": {"anyOf": [LOOK_AROUND, {"type": "integer"}]}}, "items.anyOf.0.pattern"),
        ({"patternProperties": {"(?=x)": {"type": "integer"}}}, "patternProperties.(?=x)"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "maximum"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "multipleOf": 0, "type": "integer"}, "multipleOf"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "properties.a"),
        ({"type": "object", "required": True}, "required"),
        ({"type": "object", "properties": 3}, "properties"),
        ({"enum": []}, "enum"),
        ({"$ref": "#"}, "$ref"),
        ({"$ref": "https://example.com/other.json"}, "$ref"),
    ],
    ids=str,
)  # fmt: skip
def test_the_place_of_a_fault(schema: Mapping[str, object], place: str) -> None:
    """It is found wherever it stands, and named: left out where the schema is not strict, refused where it is."""
    assert enforced(schema, FIELD, strict=False).left_out == (place,)
    with pytest.raises(BadRequest, match=re.escape(f"cannot be enforced: {place}: ")):
        enforced(schema, FIELD, strict=True)


def test_several_faults_are_all_found() -> None:
    """Each at its place; the rest is held."""
    names = [f"k{index}" for index in range(40)]
    schema = {"type": "object", "properties": {name: LOOK_AROUND for name in names[::10]} | {"k5": {"type": "null"}}}
    held = enforced(schema, FIELD, strict=False)
    assert held.left_out == tuple(f"properties.{name}.pattern" for name in names[::10])
    assert accepts(held, {"k0": "x", "k5": None}) and not accepts(held, {"k0": "x", "k5": 1})
    assert not accepts(held, {"k0": 1})


def test_a_schema_full_of_faults_takes_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not settled after so many tries is left out; the result is still one that is accepted."""
    tries = []
    real = LLMatcher.grammar_from_json_schema
    monkeypatch.setattr(LLMatcher, "grammar_from_json_schema", lambda text: tries.append(text) or real(text))
    schema = {"type": "object", "properties": {f"k{index}": LOOK_AROUND for index in range(300)}}
    held = enforced(schema, FIELD, strict=False)
    assert len(tries) < 2 * MAX_TRIES + 30
    matcher(held)
    [note] = described("tool x", held.left_out)
    assert note.startswith("not enforced of tool x: properties.k0.pattern") and note.endswith(" more")


def test_what_allows_any_text() -> None:
    """Bare text holds nothing of a string, so whether there is something to hold is tried."""
    for schema, expected in (
        ({"type": "string"}, True),
        ({}, True),
        ({"type": ["string", "null"], "description": "x", "default": "y"}, True),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, True),
        ({"type": "string", "maxLength": 20}, False),
        ({"type": "string", "minLength": 1}, False),
        ({"type": "string", "pattern": "^[a-z]+$"}, False),
        ({"type": "string", "format": "date"}, False),
        ({"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "null"}]}, False),
        ({"type": "integer"}, False),
    ):
        assert allows_any_text(enforced(schema, FIELD, strict=True)) == expected, schema


# --- the law ----------------------------------------------------------------------------------------------------------


def plain(value: object, dropped: set[str]) -> Any:
    """An enforced schema in the words of a validator: without what lenient mode drops, oneOf as anyOf."""
    if isinstance(value, list):
        return [plain(item, dropped) for item in value]
    if not isinstance(value, Mapping):
        return value
    kept = {key: plain(inner, dropped) for key, inner in value.items() if key not in dropped}
    return kept | {"anyOf": kept.pop("oneOf")} if "oneOf" in kept else kept


def readable(value: object) -> Any:
    """A schema that a validator can ask. What nobody can ask holds for no value of the type that it is about: a grammar
    leaves that type out, or does not read it at all in an anyOf that holds the empty schema."""
    if isinstance(value, list):
        return [readable(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kept = {key: readable(inner) for key, inner in value.items()}
    if isinstance(pattern := kept.get("pattern"), str) and not is_regex(pattern):
        kept = _without(kept, "pattern", "string")
    if isinstance(step := kept.get("multipleOf"), int | float) and step <= 0:
        kept = _without(kept, "multipleOf", "number")
    return kept


def _without(schema: dict[str, Any], keyword: str, about: str) -> dict[str, Any]:
    others = {key: value for key, value in schema.items() if key != keyword}
    return others | {"allOf": [*others.get("allOf", ()), {"not": {"type": about}}]}


def is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def walk(guide: LLMatcher, seed: int, max_tokens: int = 300) -> str | None:
    """A random text that the matcher allows to its end, seldom a long one; None if it got too long."""
    dice, ids = random.Random(seed), list[int]()
    preferred = [ord(char) for char in '"}],:']
    while len(ids) < max_tokens:
        if guide.is_accepting() and (guide.is_stopped() or dice.random() < 0.5):
            return BYTES.decode_str(ids)
        mask = guide.compute_bitmask()
        assert not guide.is_error(), guide.get_error()
        allowed = [token for token in range(256) if mask[token // 8] >> token % 8 & 1]
        if guide.is_accepting() and not allowed:  # nothing but the end may follow
            return BYTES.decode_str(ids)
        closing = [token for token in preferred if token in allowed]
        token = dice.choice(closing if closing and dice.random() < 0.6 else allowed)
        assert guide.consume_token(token)
        ids.append(token)
    return None


def texts(schema: Enforced) -> Iterator[str]:
    for seed in range(3):
        if (text := walk(matcher(schema), seed)) is not None:
            yield text


@given(schemas)
@example({"anyOf": [{"type": "string", "pattern": "["}, {"enum": []}]})
@example(
    {"anyOf": [{"type": "integer", "minimum": 0, "multipleOf": 0}, {"$ref": "#/$defs/here"}], "$defs": {"here": {}}}
)
@example({"type": "number", "maximum": 1, "multipleOf": 2})
@settings(max_examples=num_examples(24), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_written_obeys_what_is_enforced(schema: dict[str, object]) -> None:
    """No schema is refused that is not strict; random text under its grammar validates against what it says to hold,
    which is all of it where nothing is named. A strict one is refused, or held whole."""
    import jsonschema

    held = enforced(schema, FIELD, strict=False)
    dropped = {name for name in held.left_out if name in ODD_KEYWORDS}
    for text in texts(held):
        jsonschema.Draft202012Validator(readable(plain(held.schema, dropped))).validate(json.loads(text))
    promise = build_raw_grammar(ResponseFormat("json_schema", schema))
    assert promise.grammar is not None and bool(promise.notes) == bool(held.left_out)
    try:
        whole = enforced(schema, FIELD, strict=True)
    except BadRequest as refused:
        assert refused.param == FIELD and held.left_out
        return
    for text in texts(whole):
        jsonschema.Draft202012Validator(readable(schema)).validate(json.loads(text))
