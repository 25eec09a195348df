"""Tools, choices and text formats of `/v1/responses`, and calls on their way back."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvserve.core import ResponseFormat, ToolCallBlock, ToolChoice
from kvserve.errors import BadRequest
from kvserve.protocols.responses_tools import CustomInput, call_item, custom_arguments, custom_input
from tests.protocols.responses_wire import described, parse

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "About agents.",
    "tools": [{"type": "function", "name": "stop", "description": "Stops."}, {"type": "function", "name": "go"}],
}
TOOLS = [FUNCTION, PATCH, AGENTS, {"type": "web_search", "external_web_access": True}]


def test_functions_custom_tools_and_namespaces_become_functions() -> None:
    """Everything that the client says of a tool reaches the model; what no server here runs is left out."""
    look, patch, stop, go = parse(tools=TOOLS).turn.tools
    assert (look.name, look.description, look.parameters, look.strict) == ("look", "Looks.", SCHEMA, True)
    assert patch.name == "apply_patch"
    assert patch.description == 'Patches.\n\nThe input must match this lark grammar:\nstart: "x"'
    assert patch.parameters["required"] == ["input"]
    assert (stop.name, stop.description) == ("agents__stop", "agents: About agents.\n\nStops.")
    assert (go.name, go.description) == ("agents__go", None)


def test_a_response_lists_the_tools_that_the_model_got() -> None:
    """In the client's own words, so that what was left out can be seen."""
    assert described(tools=TOOLS).echo["tools"] == [FUNCTION, PATCH, AGENTS]


def test_a_custom_tool_needs_no_more_than_a_name() -> None:
    """Plain text is every text."""
    [tool] = parse(tools=[{"type": "custom", "name": "note", "format": {"type": "text"}}]).turn.tools
    assert (tool.name, tool.description) == ("note", None)


@given(st.text())
def test_a_custom_tools_input_survives_the_function(said: str) -> None:
    """Any text, there and back."""
    assert custom_input(custom_arguments(said)) == said


@pytest.mark.parametrize("arguments", ["", "{", "[]", '"x"', "{}", '{"patch": "x"}', '{"input": 5}', '{"input":"x"}'])
def test_arguments_of_another_form_are_the_input_as_they_are(arguments: str) -> None:
    """Nothing that the model wrote is dropped."""
    assert custom_input(arguments) == arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"input": "x", "y": 1}', 'x, "y": 1}'),
        ('{"input": "x"}}', "x}}"),
        ('{"input": "x', "x"),
        ('{"input": "x\\', "x\\"),
        ('{"input": "a\\qb', "a\\qb"),
    ],
)
def test_what_stands_behind_the_text_belongs_to_the_input(arguments: str, said: str) -> None:
    """The text has gone out by then, so more is added to it; a cut input is what there is of it."""
    assert custom_input(arguments) == said


@given(st.text(), st.text(), st.sets(st.integers(0, 30), max_size=6))
@example("a\n", ', "b": 1}', {11, 12, 13})
def test_a_custom_tools_input_does_not_depend_on_the_cut(said: str, behind: str, cuts: set[int]) -> None:
    """In any pieces it is the input of the whole arguments."""
    arguments = custom_arguments(said)[:-1] + behind
    places = sorted({0, len(arguments), *(cut for cut in cuts if cut < len(arguments))})
    reader = CustomInput()
    pieces = [reader.feed(arguments[start:end]) for start, end in pairwise(places)]
    assert "".join([*pieces, reader.finish()]) == custom_input(arguments)


def test_calls_go_back_as_the_client_knows_the_tools() -> None:
    """Function, custom tool, function of a namespace, and a name that nobody offered."""
    tools = described(tools=TOOLS).tools
    made = [
        call_item(ToolCallBlock("c", name, '{"input": "x"}'), tools)
        for name in ("look", "apply_patch", "agents__go", "who")
    ]
    function = {"type": "function_call", "call_id": "c", "arguments": '{"input": "x"}'}
    assert made == [
        {**function, "name": "look"},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x"},
        {**function, "name": "go", "namespace": "agents"},
        {**function, "name": "who"},
    ]


CHOICES: list[tuple[object, ToolChoice]] = [
    (None, ToolChoice()),
    ("auto", ToolChoice()),
    ("none", ToolChoice("none")),
    ("required", ToolChoice("required")),
    ({"type": "function", "name": "look"}, ToolChoice("function", "look")),
    ({"type": "custom", "name": "apply_patch"}, ToolChoice("function", "apply_patch")),
    ({"type": "function", "name": "go", "namespace": "agents"}, ToolChoice("function", "agents__go")),
    (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
        ToolChoice("function", "look"),
    ),
    (
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [
                {"type": "function", "name": "look"},
                {"type": "custom", "name": "apply_patch"},
                {"type": "function", "name": "go", "namespace": "agents"},
                {"type": "function", "name": "stop", "namespace": "agents"},
            ],
        },
        ToolChoice("auto"),
    ),
]


@pytest.mark.parametrize(("said", "expected"), CHOICES)
def test_choices(said: object, expected: ToolChoice) -> None:
    """Each form of a choice."""
    assert parse(tools=TOOLS, tool_choice=said).turn.tool_choice == expected


@pytest.mark.parametrize(
    "said",
    [
        {"type": "file_search"},
        {"type": "function", "name": "missing"},
        {"type": "function", "name": "apply_patch"},
        {"type": "custom", "name": "look"},
        {"type": "function", "name": "go"},
        {"type": "function", "function": {"name": "look"}},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "missing"}]},
        {"type": "allowed_tools", "mode": "required", "tools": []},
        {"type": "allowed_tools", "mode": "never", "tools": [{"type": "function", "name": "look"}]},
        "sometimes",
        5,
        [],
        {},
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused(said: object) -> None:
    """The error names the field."""
    with pytest.raises(BadRequest) as caught:
        parse(tools=TOOLS, tool_choice=said)
    assert str(caught.value.param).startswith("tool_choice")


SOME = [{"type": "function", "name": "look"}, {"type": "function", "name": "go", "namespace": "agents"}]


def test_some_of_the_tools_may_be_called() -> None:
    """The model is not told of the others; the response still names everything that was offered."""
    request = parse(tools=TOOLS, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": SOME})
    assert [tool.name for tool in request.turn.tools] == ["look", "agents__go"]
    assert request.turn.tool_choice == ToolChoice()
    assert request.described.echo["tools"] == [FUNCTION, PATCH, AGENTS]
    assert request.described.echo["tool_choice"] == {"type": "allowed_tools", "mode": "auto", "tools": SOME}
    nothing = parse(tools=TOOLS, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": []})
    assert (nothing.turn.tools, nothing.turn.tool_choice) == ((), ToolChoice())


def test_one_of_some_tools_must_be_called() -> None:
    """The prompt stays as it is with all of them, so that its KV is found: the others are barred by the grammar."""
    request = parse(tools=TOOLS, tool_choice={"type": "allowed_tools", "mode": "required", "tools": SOME})
    assert [tool.name for tool in request.turn.tools] == ["look", "apply_patch", "agents__stop", "agents__go"]
    assert request.turn.tool_choice == ToolChoice("required", among=frozenset(("look", "agents__go")))


def test_a_call_cannot_be_demanded_without_tools() -> None:
    """There is nothing to call."""
    with pytest.raises(BadRequest):
        parse(tools=[], tool_choice="required")


WEB, FILES = {"type": "web_search"}, {"type": "file_search", "vector_store_ids": ["v"]}


@pytest.mark.parametrize(
    ("tools", "choice", "named"),
    [
        ([WEB, FUNCTION], {"type": "web_search"}, ["web_search"]),
        ([WEB], "required", ["web_search"]),
        ([FILES], "auto", ["file_search"]),
        ([FILES, WEB], None, ["file_search", "web_search"]),
        ([{"type": "mcp", "server_label": "s", "server_url": "http://x"}], None, ["mcp"]),
        ([{"type": "code_interpreter", "container": {"type": "auto"}}], "required", ["code_interpreter"]),
    ],
)
def test_what_only_the_providers_servers_run_is_answered_in_words(tools: Any, choice: Any, named: list[str]) -> None:
    """The words name the tools; the response shows none of them."""
    request = parse(tools=tools, **({} if choice is None else {"tool_choice": choice}))
    assert request.words is not None and all(f"`{name}`" in request.words for name in named)
    assert request.described.echo["tools"] == [tool for tool in tools if tool is FUNCTION]


@pytest.mark.parametrize(
    ("tools", "choice", "offered", "noted"),
    [
        ([WEB], "auto", [], ()),
        ([WEB, FILES, FUNCTION], "required", ["look"], ("file_search",)),
        ([FILES], "none", [], ("file_search",)),
    ],
)
def test_beside_others_they_are_left_out(tools: Any, choice: Any, offered: list[str], noted: tuple[str, ...]) -> None:
    """A search of the web that a client offers in case the server has it is no reason not to answer, nor is it noted:
    Codex offers it with every request."""
    request = parse(tools=tools, tool_choice=choice)
    assert request.words is None and [tool.name for tool in request.turn.tools] == offered
    assert request.turn.unserved_tools == noted


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (5, "tools"),
        ([5], "tools[0]"),
        ([{}], "tools[0].type"),
        ([{"type": "local_shell"}], "tools[0].type"),
        ([{"type": "computer_use_preview"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "name": "a b"}], "tools[0].name"),
        ([{"type": "function", "function": {"name": "look"}}], "tools[0].name"),
        ([{**FUNCTION, "parameters": {"type": "string"}}], "tools[0].parameters.type"),
        ([FUNCTION, FUNCTION], "tools"),
        ([{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "bnf"}}], "tools[0].format.syntax"),
        ([{"type": "namespace", "name": "x"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "x", "tools": [{"type": "mcp"}]}], "tools[0].tools[0].type"),
    ],
)
def test_a_broken_tool_is_named(tools: object, param: str) -> None:
    """The error says where."""
    with pytest.raises(BadRequest) as caught:
        parse(tools=tools)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, ResponseFormat()),
        ({}, ResponseFormat()),
        ({"verbosity": "low"}, ResponseFormat()),
        ({"format": {"type": "text"}}, ResponseFormat()),
        ({"format": {"type": "json_object"}}, ResponseFormat("json_object")),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
            ResponseFormat("json_schema", SCHEMA, strict=True),
        ),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            ResponseFormat("json_schema", SCHEMA),
        ),
    ],
)
def test_text_formats(said: object, expected: ResponseFormat) -> None:
    """Each form of `text`."""
    assert parse(text=said).turn.response_format == expected


def test_the_description_of_a_custom_tool_stays_valid_json() -> None:
    """What stands for it is a schema like any other."""
    [tool] = parse(tools=[PATCH]).turn.tools
    assert json.loads(json.dumps(tool.parameters))["additionalProperties"] is False
