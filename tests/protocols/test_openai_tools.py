"""Tools, tool choice and response format: nouns, legacy spelling and refusals."""

from collections.abc import Callable

import pytest

from kvserve.core import ResponseFormat, ToolChoice, ToolSpec
from kvserve.errors import BadRequest
from kvserve.protocols.openai_chat import ChatRequest

type Parse = Callable[..., ChatRequest]

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
BARE = {"type": "function", "function": {"name": "g"}}


def test_tools_keep_their_order_and_schema(parse: Parse) -> None:
    """A tool without parameters takes none; unknown keys are tolerated."""
    turn = parse(tools=[TOOL, {**BARE, "cache_control": {"type": "ephemeral"}}]).turn
    assert turn.tools == (
        ToolSpec("f", "d", SCHEMA, strict=True),
        ToolSpec("g", None, {"type": "object", "properties": {}}),
    )
    assert turn.tool_choice == ToolChoice()
    assert parse(tools=[]).turn.tools == parse(tools=None).turn.tools == ()


def test_legacy_functions_mean_the_same(parse: Parse) -> None:
    """`functions` and `function_call` are `tools` and `tool_choice`."""
    turn = parse(functions=[TOOL["function"]], function_call={"name": "f"}).turn
    assert turn.tools == (ToolSpec("f", "d", SCHEMA, strict=True),)
    assert turn.tool_choice == ToolChoice("function", "f")
    assert parse(functions=[{"name": "g"}], function_call="none").turn.tool_choice == ToolChoice("none")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "g"}}, ToolChoice("function", "g")),
    ],
)
def test_a_choice_is_read(parse: Parse, choice: object, expected: ToolChoice) -> None:
    """All four modes."""
    assert parse(tools=[TOOL, BARE], tool_choice=choice).turn.tool_choice == expected


def test_auto_and_none_need_no_tools(parse: Parse) -> None:
    """Clients send a choice with every request."""
    assert parse(tool_choice="auto", tools=[]).turn.tool_choice == ToolChoice()
    assert parse(tool_choice="none").turn.tool_choice == ToolChoice("none")


def test_parallel_calls_can_be_switched_off(parse: Parse) -> None:
    """`parallel_tool_calls` is on unless false."""
    assert parse().turn.parallel_tool_calls
    assert not parse(parallel_tool_calls=False).turn.parallel_tool_calls


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, ResponseFormat()),
        ({"type": "text"}, ResponseFormat()),
        ({"type": "json_object"}, ResponseFormat("json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            ResponseFormat("json_schema", SCHEMA, strict=True),
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": None}},
            ResponseFormat("json_schema", SCHEMA),
        ),
    ],
)
def test_a_response_format_is_read(parse: Parse, said: object, expected: ResponseFormat) -> None:
    """Free text, any JSON, or JSON of a schema."""
    assert parse(response_format=said).turn.response_format == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [BARE, {"function": {"name": ""}}]}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": "f", "description": 5}}]}, "tools[0].function.description"),
        ({"tools": [{"function": {"name": "f", "strict": "x"}}]}, "tools[0].function.strict"),
        ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": 5}}}}}]},
            "tools[0].function.parameters.properties.a.type",
        ),
        ({"tools": [TOOL], "functions": [{"name": "g"}]}, "functions"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "f"}}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "z"}}}, "tool_choice"),
        ({"functions": [{"name": "g"}], "function_call": {"name": "z"}}, "function_call"),
        ({"functions": [{"name": "g"}], "function_call": "required"}, "function_call"),
        ({"tools": [TOOL], "tool_choice": "auto", "function_call": "auto"}, "function_call"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}},
            "response_format.json_schema.schema.type",
        ),
    ],
)
def test_what_cannot_be_met_is_named(parse: Parse, body: dict[str, object], param: str) -> None:
    """Mistyped, unsupported and contradictory tool fields are a 400 with their path."""
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["a b", "a\nb", "<think>", 'quo"ted', "{x}", "n" * 129])
def test_a_name_that_no_form_of_calls_can_write_is_refused(parse: Parse, name: str) -> None:
    """A forced call of such a tool could not be read back; the request says so instead."""
    with pytest.raises(BadRequest) as raised:
        parse(tools=[{"type": "function", "function": {"name": name}}])
    assert raised.value.param == "tools[0].function.name"


@pytest.mark.parametrize("name", ["mcp__github__get-file", "fs.read", "web/search", "読む"])
def test_names_that_clients_use_pass(parse: Parse, name: str) -> None:
    """Dots, slashes, dashes and letters of any script are fine."""
    assert parse(tools=[{"type": "function", "function": {"name": name}}]).turn.tools[0].name == name
