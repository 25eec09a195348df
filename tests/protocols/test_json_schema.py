"""Tool schemas: what agents really send passes, what is broken is named."""

import pytest

from kvserve.errors import BadRequest
from kvserve.protocols.fields import Fields, decode_body
from kvserve.protocols.json_schema import read_schema

GOOD = [
    {},
    {"type": "object", "properties": {}},
    {"type": ["string", "null"]},
    {"type": "object", "properties": {"a": {"type": "string", "required": True}}, "required": ["a"]},
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/x"}}], "$defs": {"x": {"enum": [1]}}},
    {"type": "array", "items": [{"type": "integer"}, True], "additionalProperties": False, "x-vendor": 3},
]
BROKEN = [
    ("text", "p"),
    ({"type": "banana"}, "p.type"),
    ({"type": ["string", 5]}, "p.type[1]"),
    ({"type": {}}, "p.type"),
    ({"properties": "oops"}, "p.properties"),
    ({"properties": {"a": "string"}}, "p.properties.a"),
    ({"properties": {"a": {"type": "array", "items": {"type": 5}}}}, "p.properties.a.items.type"),
    ({"required": "a"}, "p.required"),
    ({"required": ["a", 1]}, "p.required[1]"),
    ({"enum": "a"}, "p.enum"),
    ({"anyOf": {}}, "p.anyOf"),
    ({"oneOf": [3]}, "p.oneOf[0]"),
    ({"$defs": []}, "p.$defs"),
    ({"description": 3}, "p.description"),
]


KEYWORDS = (
    *("type", "properties", "patternProperties", "$defs", "definitions", "items", "prefixItems"),
    *("additionalProperties", "anyOf", "oneOf", "allOf", "not", "required", "enum", "description", "$ref", "pattern"),
)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_every_known_keyword_has_a_shape(keyword: str) -> None:
    """A number fits none of them, at any depth."""
    with pytest.raises(BadRequest) as caught:
        read_schema({"allOf": [{"not": {keyword: 3.5}}]}, "p")
    assert caught.value.param == f"p.allOf[0].not.{keyword}"


@pytest.mark.parametrize("schema", GOOD)
def test_good_schemas_are_returned_unchanged(schema: dict[str, object]) -> None:
    """A well-formed schema is kept as it was sent."""
    assert read_schema(schema, "p") == schema


@pytest.mark.parametrize(("schema", "param"), BROKEN)
def test_a_broken_schema_names_the_keyword(schema: object, param: str) -> None:
    """The error points at the keyword that is wrong."""
    with pytest.raises(BadRequest) as caught:
        read_schema(schema, "p")
    assert caught.value.param == param


@pytest.mark.parametrize(
    "schema",
    [
        '{"type":"object","type":"array"}',
        '{"properties":{"a":{"type":"string"},"a":{"type":"integer"}}}',
        '{"items":{"anyOf":[{"properties":{"b":{"enum":["x"],"enum":["y"]}}}]}}',
        '{"x-vendor":[{"k":1,"k":2}]}',
    ],
)
@pytest.mark.parametrize("name", ["parameters", "input_schema", "schema"])
def test_equal_keys_in_a_schema_are_refused(name: str, schema: str) -> None:
    """However deep: the model would read one of the two only, so the client hears of it with the field's name."""
    fields = Fields(decode_body(f'{{"tools":[],"{name}" : {schema}}}'.encode()))
    with pytest.raises(BadRequest, match="a key is named twice") as caught:
        fields.required(name, read_schema)
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["parameters", "input_schema", "schema"])
def test_equal_keys_in_two_objects_of_a_schema_are_none(name: str) -> None:
    """Neighbours and parents may have the same names."""
    schema = '{"type":"object","properties":{"type":{"type":"string"},"a":{"type":"string"}}}'
    assert Fields(decode_body(f'{{"{name}":{schema}}}'.encode())).required(name, read_schema)["type"] == "object"
