"""Forced arguments in pairs of keys and values: what a schema says of them is held, or told and refused if strict."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvserve.core import JsonObject, ToolSpec
from kvserve.errors import BadRequest
from kvserve.output.tool_parsers.form import ParsedCall
from tests.laws import sampled_cells
from tests.output.test_grammar import RENDER, SETUPS

FORMS = ("glm", "qwen_coder")
every_form = pytest.mark.parametrize("form", FORMS)
each_form_once = sampled_cells(lambda form, tokens, **_: tokens is (form == "glm"))
DEFS: JsonObject = {
    "an integer": {"type": "integer"},
    "mode": {"enum": ["r", "w"]},
    "named": {"$anchor": "named", "type": "integer"},
    "same": {"anyOf": [{"$ref": "#/$defs/same"}, {"$ref": "#/$defs/mode"}]},
}


def tool(schema: object, more: JsonObject | None = None, **said: object) -> ToolSpec:
    properties = {"a": schema, **(more or {})}
    closed = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    return ToolSpec("read", None, {**closed, "$defs": DEFS, **said})


def written(form: str, **said: object) -> str:
    return RENDER[form](ParsedCall("read", said), ())


def noted(form: str, asked: ToolSpec, *, tokens: bool = False) -> str:
    """What is told of a tool; of a strict one it is refused if anything is."""
    notes = SETUPS[form, tokens].promise(tools=(asked,)).notes
    strict = replace(asked, strict=True)
    if not notes:
        assert SETUPS[form, tokens].grammar(tools=(strict,)) is not None
        return ""
    with pytest.raises(BadRequest, match="cannot be enforced"):
        SETUPS[form, tokens].grammar(tools=(strict,))
    return notes[0].removeprefix("not enforced of tool read: ")


UNWRITTEN = "which the model's form of calls cannot write"
FREE = "properties.a, as the model's form of calls leaves a text's inside free"
HELD: Mapping[str, tuple[JsonObject, tuple[object, ...], tuple[object, ...]]] = {
    "beside a minimum": ({"enum": [1, 5], "minimum": 3}, (5,), (1,)),
    "beside a constant": ({"enum": ["x", 5], "const": 5}, (5,), ("x",)),
    "beside a type": ({"enum": ["x", 5], "type": "integer"}, (5,), ("x",)),
    "beside a length": ({"enum": ["x", "long"], "minLength": 2}, ("long",), ("x",)),
    "by a reference": ({"$ref": "#/$defs/mode"}, ("r",), ("x", "")),
    "by the only one of all": ({"allOf": [{"$ref": "#/$defs/mode"}], "default": "r"}, ("r",), ("x",)),
    "or null": ({"anyOf": [{"$ref": "#/$defs/mode"}, {"type": "null"}]}, ("r", None), ("x", 5)),
    "by itself": ({"$ref": "#/$defs/same"}, (), ("x",)),
    "with escapes": ({"$ref": "#/$defs/an%20integer"}, (5,), ("x",)),
}
"""Schemas, and what each allows and forbids."""


@every_form
def test_an_enumeration_in_a_pair_is_what_all_of_its_schema_allows(form: str) -> None:
    """What stands beside it, and what references and alternatives enumerate."""
    case = SETUPS[form, False]
    for reason, (schema, good, bad) in HELD.items():
        asked = tool(schema)
        grammar = case.grammar(tools=(asked,))
        assert noted(form, asked) == (FREE if reason == "by itself" else ""), reason
        for value in good:
            text = written(form, a=value)
            assert case.accepts(grammar, text) and case.calls(text, (asked,)) == ([("read", {"a": value})], ""), reason
        if reason != "by itself":
            assert not [value for value in bad if case.accepts(grammar, written(form, a=value))], reason


TOLD: Mapping[str, tuple[ToolSpec, str]] = {
    "a name": (tool({"$ref": "#named"}), FREE),
    "a text, or some numbers": (tool({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}), FREE),
    "one of some keys": (tool(True, anyOf=[{"required": ["a"]}]), "anyOf"),
    "a reference to all": (tool(True, **{"$ref": "#/$defs/all"}), "$ref"),
    "keys by pattern": (tool(True, patternProperties={"^b": {"type": "integer"}}), "patternProperties"),
    "read as a list": (
        tool({"enum": ["[1]", [2]]}),
        "properties.a: '[1]', which the model's form of calls cannot write",
    ),
}


@every_form
@pytest.mark.parametrize("reason", TOLD)
def test_what_a_pair_cannot_hold_is_told(form: str, reason: str) -> None:
    """And refused of a strict tool; a text or any number, list and object is held."""
    asked, what = TOLD[reason]
    if reason == "a reference to all":
        asked = replace(asked, parameters={**asked.parameters, "$defs": {**DEFS, "all": {"type": "object"}}})
    assert noted(form, asked) == what
    assert noted(form, tool({"type": ["string", "number", "array", "object", "null"]})) == ""
    assert noted(form, tool({"anyOf": [{"type": "string"}, {"type": "boolean"}]})) == ""


ENDS = {
    "glm": ("</arg_value>", ("</arg_value><arg_key>c</arg_key><arg_value>", "</arg_value>\n</tool_call>")),
    "qwen_coder": ("\n</parameter>", ("\n</parameter>\n<parameter=c>\n", "\n</parameter></function></tool_call>")),
}
"""What closes a value, and what would end it in the middle of a text."""


@each_form_once
@every_form
@pytest.mark.parametrize("tokens", [True, False])
def test_no_choice_in_a_pair_is_read_as_two_arguments(form: str, tokens: bool) -> None:
    """One that holds the next key, or ends the call, is left out and told; one that holds a tag alone is written, also
    where another one begins with it."""
    closing, whole = ENDS[form]
    case, more = SETUPS[form, tokens], {"b": {"type": "string"}}
    for end in whole:
        asked = tool({"enum": ["x", f"x{end}y"]}, more)
        grammar = case.grammar(tools=(asked,))
        assert f"{f'x{end}y'!r}, {UNWRITTEN}" in noted(form, asked, tokens=tokens)
        assert case.accepts(grammar, written(form, a="x")) and not case.accepts(grammar, written(form, a=f"x{end}y"))
    tags = () if tokens else (f"z{closing}", f"z{closing}y", f"x{closing}y")  # as tokens these are no text
    choices = ("x", "x\n", "x\ny", *tags)
    asked = tool({"enum": list(choices)}, more)
    grammar = case.grammar(tools=(asked,))
    assert noted(form, asked, tokens=tokens) == ""
    for value in choices:
        for said in ({"a": value}, {"a": value, "b": "c"}):
            text = written(form, **said)
            assert case.accepts(grammar, text) and case.calls(text, (asked,)) == ([("read", said)], ""), text


@every_form
def test_a_choice_in_a_pair_hides_no_other(form: str) -> None:
    """One that goes on where another one ends as what follows that does is left out and told: a lexer does not go
    back."""
    closing, case = ENDS[form][0], SETUPS[form, False]
    other = f"x{closing}{closing}"
    asked = tool({"enum": ["x", other]}, {"b": {"type": "string"}})
    assert f"{other!r}, {UNWRITTEN}" in noted(form, asked)
    grammar = case.grammar(tools=(asked,))
    assert case.accepts(grammar, written(form, a="x")) and case.accepts(grammar, written(form, a="x", b="c"))


@each_form_once
@every_form
@pytest.mark.parametrize("tokens", [True, False])
def test_an_enumeration_in_a_pair_may_be_long(form: str, tokens: bool) -> None:
    """Longer than the alternatives that a parser follows at once; the empty text too."""
    case = SETUPS[form, tokens]
    grammar = case.grammar(tools=(tool({"enum": ["", *(f"v {number}" for number in range(2500))]}),))
    for value, is_right in (("", True), ("v 7", True), ("v 777", True), ("v 2500", False)):
        assert case.accepts(grammar, written(form, a=value)) is is_right, value


@every_form
def test_unnamed_arguments_in_pairs_obey_what_is_said_of_them(form: str) -> None:
    """By its type, or as one of an enumeration; none where nothing can be said, and any where nothing is."""
    case = SETUPS[form, False]
    for rest, good, bad in (
        ({"type": "integer"}, (5, 6), ("x",)),
        ({"enum": ["x", 5]}, ("x", 5), (6,)),
        (True, (5, "x", None), ()),
    ):
        asked = ToolSpec("read", None, {"additionalProperties": rest})
        assert noted(form, asked) == ""
        grammar = case.grammar(tools=(asked,))
        assert case.accepts(grammar, written(form))
        assert all(case.accepts(grammar, written(form, b=value, c=value)) for value in good)
        assert not any(case.accepts(grammar, written(form, b=value)) for value in bad)
    asked = ToolSpec("read", None, {"additionalProperties": {"enum": [f"x{ENDS[form][1][0]}y"]}})
    assert "additionalProperties: " in noted(form, asked)
    grammar = case.grammar(tools=(asked,))
    assert case.accepts(grammar, written(form)) and not case.accepts(grammar, written(form, b="x"))
