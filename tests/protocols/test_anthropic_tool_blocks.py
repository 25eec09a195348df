"""Tools that come later: deferred ones wait for a reference, which gets their definition; messages add and remove."""

import json
from typing import Any

import pytest

from kvserve.core import Message, TextBlock, ToolBlock, ToolChoice, ToolResultBlock, ToolSpec, offered_tools
from kvserve.errors import BadRequest
from tests.protocols.anthropic_wire import parse

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
LOOK = {"name": "look", "description": "looks", "input_schema": SCHEMA}
LATER = {"name": "later", "description": "does it later", "input_schema": SCHEMA, "defer_loading": True}
PLACEHOLDER = {"name": "DeferredToolPlaceholder", "input_schema": {"type": "object"}, "defer_loading": True}
DEFINED = ToolBlock("later", "does it later", json.dumps(SCHEMA))
USER = {"role": "user", "content": "hi"}


def found(*names: str) -> dict[str, Any]:
    """The result of a search that a client ran."""
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": references}
    return {"role": "user", "content": [result, {"type": "text", "text": "Tool loaded."}]}


def system(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks)}


def added(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": tool}


def removed(name: str) -> dict[str, Any]:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}}


def names(*sent: Any, **fields: Any) -> list[str]:
    """The tools that can be called behind these messages."""
    turn = parse(messages=[USER, *sent], **fields).turn
    return [tool.name for tool in offered_tools(turn.tools, turn.messages)]


def test_deferred_tools_stand_at_their_reference_and_nowhere_else() -> None:
    """The list in front has the others only; the placeholder is shown nowhere."""
    turn = parse(messages=[USER, found("later", "nowhere")], tools=[LOOK, LATER, PLACEHOLDER]).turn
    assert [tool.name for tool in turn.tools] == ["look"]
    assert turn.messages[1:] == (
        Message("tool", (ToolResultBlock("c1", (DEFINED, ToolBlock("nowhere"))),)),
        Message("user", (TextBlock("Tool loaded."),)),
    )
    assert names(tools=[LOOK, LATER, PLACEHOLDER]) == ["look"]
    assert names(found("later"), tools=[LOOK, LATER, PLACEHOLDER]) == ["look", "later"]


def test_the_front_is_the_same_before_and_behind_a_search() -> None:
    """Other deferred tools may come and go in the request's list."""
    before = parse(messages=[USER], tools=[LOOK, PLACEHOLDER]).turn
    behind = parse(messages=[USER, found("later")], tools=[LATER, LOOK, PLACEHOLDER]).turn
    assert before.tools == behind.tools and before.messages == behind.messages[:1]


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_reference_may_stand_in_any_message(role: str) -> None:
    """Not only in a result."""
    turn = parse(
        messages=[USER, {"role": role, "content": [{"type": "tool_reference", "tool_name": "later"}]}], tools=[LATER]
    ).turn
    assert turn.messages[1].blocks == (DEFINED,)


def test_system_messages_add_and_remove_tools() -> None:
    """By name or with a definition, of which the last one counts; what is removed comes back when it is added again."""
    new = added({"type": "tool_definition", "definition": {**LOOK, "name": "new"}})
    other = added({"type": "tool_definition", "definition": {**LOOK, "name": "new", "description": "other"}})
    by_name = added({"type": "tool_reference", "name": "later"})
    tools = [LOOK, LATER]
    assert names(system(new), tools=tools) == ["look", "new"]
    assert names(system(by_name, removed("look")), tools=tools) == ["later"]
    assert names(system(removed("look")), USER, system(added({"type": "tool_reference", "name": "look"})), tools=tools)
    turn = parse(messages=[USER, system(new), USER, system(other)], tools=tools).turn
    assert offered_tools(turn.tools, turn.messages)[1] == ToolSpec("new", "other", SCHEMA)
    assert turn.messages[1] == Message("system", (ToolBlock("new", "looks", json.dumps(SCHEMA)),))
    assert names(system(new)) == ["new"]


def test_a_name_is_what_was_defined_last_before_it() -> None:
    """A definition within a message holds for the references behind it, and not for those before."""
    new = added({"type": "tool_definition", "definition": {**LATER, "description": "anew"}})
    turn = parse(messages=[USER, found("later"), system(new), found("later")], tools=[LATER]).turn
    said = [block.blocks[0] for message in turn.messages for block in message.blocks if hasattr(block, "call_id")]
    assert [block.description for block in said] == ["does it later", "anew"]


def test_tools_of_servers_that_nobody_knows_here_are_names() -> None:
    """References to an MCP server's tools are told, and bring nothing in."""
    of_server = added({"type": "mcp_tool_reference", "server_name": "s", "name": "n"})
    whole = added({"type": "mcp_toolset_reference", "server_name": "s"})
    turn = parse(messages=[USER, system(of_server, whole)]).turn
    assert turn.messages[1].blocks == (ToolBlock("s_n"), ToolBlock("s"))
    assert not offered_tools(turn.tools, turn.messages)


@pytest.mark.parametrize("kind", ["web_search_20250305", "code_execution_20250825", "mcp_toolset"])
def test_a_definition_of_a_tool_that_a_server_runs_is_a_name(kind: str) -> None:
    """A history that once brought one in goes on: a client cannot mend it."""
    tool = added({"type": "tool_definition", "definition": {"type": kind, "name": "web"}})
    nameless = added({"type": "tool_definition", "definition": {"type": kind}})
    turn = parse(messages=[USER, system(tool, nameless)]).turn
    assert turn.messages[1].blocks == (ToolBlock("web"), ToolBlock(kind))
    assert not offered_tools(turn.tools, turn.messages)


def test_a_search_that_ran_elsewhere_and_a_summary_are_read() -> None:
    """Blocks of an assistant's message: what was found, why nothing was, which tools a compacted history changed."""
    references = [{"type": "tool_reference", "tool_name": "later"}]
    result = {"type": "tool_search_tool_search_result", "tool_references": references}
    error = {"type": "tool_search_tool_result_error", "error_code": "unavailable"}
    turn = parse(
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_search_tool_result", "tool_use_id": "s1", "content": result},
                    {"type": "tool_search_tool_result", "tool_use_id": "s2", "content": error},
                    {"type": "compaction", "content": "It went well.", "tool_changes": [removed("look")]},
                    {"type": "compaction", "content": None},
                ],
            },
        ],
        tools=[LOOK, LATER],
    ).turn
    tool, failed, summary, gone, sealed = turn.messages[1].blocks
    assert tool == DEFINED and gone == ToolBlock("look", is_removed=True)
    assert isinstance(failed, TextBlock) and "unavailable" in failed.text
    assert isinstance(summary, TextBlock) and summary.text.endswith("It went well.")
    assert isinstance(sealed, TextBlock) and "compaction" in sealed.text


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([added({"type": "tool_definition", "definition": {"name": "a"}})], "content[0].tool.definition.input_schema"),
        ([added({"type": "tool_reference"})], "content[0].tool.name"),
        ([added({"type": "skill", "name": "x"})], "content[0].tool.type"),
        ([{"type": "tool_removal"}], "content[0].tool"),
        ([{"type": "tool_reference"}], "content[0].tool_name"),
    ],
)
def test_a_broken_change_is_named(content: Any, param: str) -> None:
    """The error says which field."""
    with pytest.raises(BadRequest) as caught:
        parse(messages=[USER, {"role": "system", "content": content}])
    assert caught.value.param == f"messages[1].{param}"


def test_what_a_reference_brought_can_be_forced_and_what_is_gone_cannot() -> None:
    """`tool_choice` knows the tools as they stand at the end."""
    force = {"type": "tool", "name": "later"}
    turn = parse(messages=[USER, found("later")], tools=[LOOK, LATER], tool_choice=force).turn
    assert turn.tool_choice == ToolChoice("function", "later")
    for sent in ([USER], [USER, found("later"), system(removed("later"))]):
        with pytest.raises(BadRequest):
            parse(messages=sent, tools=[LOOK, LATER], tool_choice=force)


def test_a_schema_that_a_grammar_refuses_is_named_as_the_client_does() -> None:
    """The index of a tool that is offered is not that in the body."""
    request = parse(messages=[USER, found("later")], tools=[PLACEHOLDER, LATER, LOOK])
    assert request.names.parameters == ("tools[2].input_schema", "tools[1].input_schema")


# --- tools that run on the provider's servers ------------------------------------------------------------------------

WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
KINDS = (
    WEB,
    {"type": "web_fetch_20260209", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "tool_search_tool_bm25", "name": "tool_search_tool_bm25"},
    {"type": "mcp_toolset", "mcp_server_name": "s"},
)


@pytest.mark.parametrize("tool", KINDS, ids=lambda tool: tool["type"])
def test_a_server_tool_beside_others_is_not_offered(tool: dict[str, Any]) -> None:
    """The request is served with the others, and the turn says what is missing."""
    request = parse(tools=[tool, LOOK])
    assert request.words is None
    assert [spec.name for spec in request.turn.tools] == ["look"]
    assert request.turn.unserved_tools == (tool.get("name", tool["type"]),)


@pytest.mark.parametrize("tool", KINDS, ids=lambda tool: tool["type"])
@pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "any"}])
def test_a_request_with_nothing_but_server_tools_is_answered_in_words(tool: dict[str, Any], choice: Any) -> None:
    """They name the tool."""
    words = parse(tools=[tool], tool_choice=choice).words
    assert words is not None and f"`{tool.get('name', tool['type'])}`" in words


def test_a_forced_server_tool_is_answered_in_words() -> None:
    """Also where others are offered; one that the client runs under the same name is not meant, and with `none` the
    model answers."""
    force = {"type": "tool", "name": "web_search"}
    assert parse(tools=[WEB, LOOK], tool_choice=force).words
    own = parse(tools=[{**WEB, "name": "search"}, {**LOOK, "name": "web_search"}], tool_choice=force)
    assert own.words is None and own.turn.tool_choice == ToolChoice("function", "web_search")
    assert parse(tools=[WEB], tool_choice={"type": "none"}).words is None
    with pytest.raises(BadRequest):
        parse(tools=[WEB, LOOK], tool_choice={"type": "tool", "name": "no"})


def test_deferred_tools_that_only_a_server_would_find_stand_in_front() -> None:
    """Nobody searches here: a tool that waits for that would never be seen."""
    turn = parse(tools=[KINDS[3], LATER, LOOK]).turn
    assert [tool.name for tool in turn.tools] == ["later", "look"]


def test_a_choice_of_a_tool_that_waits_or_is_gone_is_refused_as_that() -> None:
    """It is among the tools that were sent, which an answer that denies it would contradict."""
    cannot = "can be called here: one that is deferred waits for its tool_reference"
    for sent, fields in (([], {"tools": [LATER]}), ([system(removed("look"))], {"tools": [LOOK]})):
        for choice in ({"type": "any"}, {"type": "tool", "name": fields["tools"][0]["name"]}):
            with pytest.raises(BadRequest, match=cannot):
                parse(messages=[USER, *sent], tool_choice=choice, **fields)
