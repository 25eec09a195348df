"""Calls as they are written, on the whole server with a real model: pieces before the end, and an end that comes too
early, streamed and whole, through every protocol and as legacy functions."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.anthropic_serving import MESSAGES_PATH, ask_both, events_of, messages_body
from tests.serving import CHAT_PATH, AppUnderTest, chat_body, chunks_of, joined, serving_app, writing

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION = {"name": "write", "description": "Writes.", "parameters": PARAMETERS}
CHAT_TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
MESSAGES_TOOLS = {"tools": [{"name": "write", "input_schema": PARAMETERS}], "thinking": {"type": "disabled"}}
RESPONSES_TOOLS = {"tools": [{"type": "function", **FUNCTION}]}
WORDS = "one two three four five six seven eight nine ten"
CUT = f'{{"path": "{WORDS}'
HEAD = '<tool_call>\n{"name": "write", "arguments": '
NO_THINKING = {"enable_thinking": False}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A server on a dense model, which writes calls in the JSON form."""
    with serving_app(tmp_path_factory.mktemp("calls")) as app:
        yield app


@pytest.fixture(scope="module")
def cut(app: AppUnderTest) -> Iterator[Mapping[str, Any]]:
    """What a request carries whose call the limit cuts inside its argument."""
    num_tokens = len(app.served.tokenizer.encode(HEAD + CUT))
    with writing(app, HEAD + CUT + " eleven", ends=False) as script:
        yield {**script, "max_tokens": num_tokens, "stream": True}


def test_a_chat_hears_of_a_call_while_it_is_written(app: AppUnderTest, cut: Mapping[str, Any]) -> None:
    """The name and then piece by piece what there is, though the call is never finished; the limit is told."""
    chunks = chunks_of(app.post(CHAT_PATH, chat_body(**cut, **CHAT_TOOLS, **NO_THINKING)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    functions = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert functions[0] == {"name": "write", "arguments": ""}
    assert len(functions) > 5 and all(function.keys() == {"arguments"} for function in functions[1:])
    answer = joined(chunks)
    assert (answer.content, answer.finish_reason, answer.calls) == ("", "length", (("write", CUT),))
    whole = {name: value for name, value in cut.items() if name != "stream"}
    assert app.both(**whole, **CHAT_TOOLS, **NO_THINKING).calls == answer.calls


def test_a_whole_call_in_pieces_is_the_call(app: AppUnderTest) -> None:
    """Streamed or not, it has the same name and arguments, and the answer ends with `tool_calls`."""
    with writing(app, f'I write.\n{HEAD}{CUT}"}}}}\n</tool_call>') as script:
        answer = app.both(**script, **CHAT_TOOLS, **NO_THINKING, max_tokens=200)
    assert (answer.calls, answer.finish_reason) == ((("write", CUT + '"}'),), "tool_calls")


def test_functions_are_answered_as_functions(app: AppUnderTest) -> None:
    """A request of the old form gets `function_call`, one of them, in pieces and whole; and may send it back."""
    call = f'{HEAD}{CUT}"}}}}\n</tool_call>'
    with writing(app, call + call) as script:
        body = chat_body(**script, **NO_THINKING, functions=[FUNCTION], max_tokens=400)
        [choice] = app.post(CHAT_PATH, body).json["choices"]  # type: ignore[misc]
        chunks = chunks_of(app.post(CHAT_PATH, {**body, "stream": True}))
    function = {"name": "write", "arguments": CUT + '"}'}
    assert choice["message"]["function_call"] == function and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    pieces = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    assert "".join(piece.get("arguments", "") for piece in pieces) == function["arguments"]
    result = {"role": "function", "name": "write", "content": "done"}
    again = app.post(CHAT_PATH, chat_body([*body["messages"], choice["message"], result], functions=[FUNCTION]))
    assert again.status == 200, again.body


def test_a_message_hears_of_a_call_while_it_is_written(app: AppUnderTest, cut: Mapping[str, Any]) -> None:
    """`tool_use` begins, its input comes in pieces, and the block ends where the limit is."""
    events = events_of(app.post(MESSAGES_PATH, messages_body(**cut, **MESSAGES_TOOLS)))
    [start] = [event for event in events if event["type"] == "content_block_start"]
    assert (start["content_block"]["name"], start["content_block"]["input"]) == ("write", {})
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == CUT and len(pieces) > 5
    whole = {name: value for name, value in cut.items() if name != "stream"}
    message = ask_both(app, **whole, **MESSAGES_TOOLS)
    assert (message["stop_reason"], message["content"][0]["input"]) == ("max_tokens", {"INVALID_JSON": CUT})


def test_a_response_hears_of_a_call_while_it_is_written(app: AppUnderTest, cut: Mapping[str, Any]) -> None:
    """The item is added, its arguments come in pieces, and it is left incomplete."""
    fields = {name: value for name, value in cut.items() if name != "max_tokens"}
    body = {**fields, **RESPONSES_TOOLS, "input": "Hello.", "temperature": 0, "reasoning": {"effort": "none"}}
    response = app.post("/v1/responses", {**body, "max_output_tokens": cut["max_tokens"]})
    events = [
        json.loads(line.removeprefix("data: ")) for line in response.body.decode().split("\n") if "data: " in line
    ]
    pieces = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == CUT and len(pieces) > 5
    assert events[-1]["type"] == "response.incomplete"
    [item] = events[-1]["response"]["output"]
    assert (item["status"], item["name"], item["arguments"]) == ("incomplete", "write", CUT)


def test_a_cut_call_that_is_sent_back_is_read(app: AppUnderTest, cut: Mapping[str, Any]) -> None:
    """A conversation goes on behind arguments that are no JSON: the model sees them as they were written."""
    call = {"id": "c1", "type": "function", "function": {"name": "write", "arguments": CUT}}
    messages = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "The arguments are not JSON."},
    ]
    assert app.post(CHAT_PATH, chat_body(messages, **CHAT_TOOLS)).status == 200
