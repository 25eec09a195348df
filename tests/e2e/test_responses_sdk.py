"""The openai SDK's responses API against the demo model, through both ports. Its weights are random: what these tests
show is the wire form, and that what a request says reaches the model; where a form is forced, the answer's form too."""

import json
import uuid
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel, ConfigDict

from tests.e2e.conftest import API_KEY, connect
from tests.e2e.servers import ServerProcess
from tests.e2e.test_openai_sdk import added_token

pytestmark = pytest.mark.e2e

NO_THINKING: Any = {"effort": "none"}
WORDS = "The quick brown fox jumps over the lazy dog and reads the file again. " * 8


def tool(name: str, *choices: str) -> Any:
    """A function with one argument out of a few words, so that a model with random weights can fill it in."""
    return {
        "type": "function",
        "name": name,
        "description": "Looks it up.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "enum": list(choices)}},
            "required": ["at"],
            "additionalProperties": False,
        },
    }


TOOLS = [tool("get_weather", "Paris", "Rome"), tool("get_time", "CET", "UTC")]


def calls(response: Response) -> list[ResponseFunctionToolCall]:
    return [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]


def said(response: Response) -> list[Any]:
    """What the items say, without ids."""
    return [
        {name: value for name, value in item.to_dict().items() if name not in ("id", "call_id")}
        for item in response.output
    ]


def test_an_input_is_answered(client: OpenAI) -> None:
    """Items, status and usage are there, and the request's id is part of the response's."""
    reply = client.responses.with_raw_response.create(model="any/name", input="Hello", max_output_tokens=24)
    response = reply.parse()
    assert reply.headers["x-request-id"] in response.id
    assert response.status in ("completed", "incomplete") and response.output
    assert response.usage is not None
    assert 0 < response.usage.output_tokens <= 24
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert 0 <= response.usage.input_tokens_details.cached_tokens < response.usage.input_tokens
    assert (response.store, response.object, response.error) == (True, "response", None)


def test_a_stream_says_what_the_whole_response_says(client: OpenAI) -> None:
    """The official order, every sequence number once, the text in pieces, the same items at the end."""
    asked: dict[str, Any] = {"model": "m", "input": "Hello", "max_output_tokens": 32, "temperature": 0}
    asked |= {"reasoning": NO_THINKING, "store": False}
    whole = client.responses.create(**asked)
    with client.responses.create(**asked, stream=True) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert [getattr(event, "sequence_number") for event in events] == list(range(len(events)))  # noqa: B009
    assert kinds.count("response.output_text.delta") > 5
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert said(last.response) == said(whole)
    assert last.response.output_text == whole.output_text


@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_is_an_item_of_its_own(client: OpenAI, open_server: ServerProcess, summary: Any) -> None:
    """What the model writes after its thinking tag: as content, or as the summary that was asked for, and sealed."""
    opening = added_token(open_server, "<think>")
    response = client.responses.create(
        model="m",
        input="Hello",
        max_output_tokens=9,
        reasoning={"summary": summary},
        include=["reasoning.encrypted_content"],
        extra_body={"logit_bias": {str(opening): 100}},
    )
    [item] = response.output
    assert item.type == "reasoning"
    texts = [part.text for part in (item.summary if summary else item.content or [])]
    assert len(texts) == 1 and texts[0] and item.encrypted_content
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens > 0


def _a_session() -> dict[str, str]:
    """A session of its own: without one, the same words of another test may be another client's."""
    return {"x-session-id": uuid.uuid4().hex}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_forced_call_has_its_form(client: OpenAI, is_streamed: bool) -> None:
    """`tool_choice` names the function, its arguments obey the schema; the result goes on by the response's name."""
    asked: dict[str, Any] = {"model": "m", "input": "Where?", "tools": TOOLS, "reasoning": NO_THINKING}
    asked |= {"tool_choice": {"type": "function", "name": "get_time"}, "max_output_tokens": 200}
    asked |= {"extra_headers": _a_session()}
    if is_streamed:
        with client.responses.stream(**asked) as stream:
            response: Response = stream.get_final_response()
    else:
        response = client.responses.create(**asked)
    [call] = calls(response)
    assert call.name == "get_time" and json.loads(call.arguments)["at"] in ("CET", "UTC")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"}]
    following = client.responses.create(
        model="m",
        input=output,
        previous_response_id=response.id,
        tools=TOOLS,
        max_output_tokens=4,
        extra_headers=asked["extra_headers"],
    )
    assert following.usage is not None and response.usage is not None
    assert following.usage.input_tokens > response.usage.input_tokens
    assert following.usage.input_tokens_details.cached_tokens >= response.usage.input_tokens - 1


def test_a_custom_tool_gets_text(client: OpenAI) -> None:
    """Its call is an item of its own kind, whose input is text and no JSON."""
    tools: Any = [{"type": "custom", "name": "note", "description": "Takes a note."}]
    response = client.responses.create(
        model="m",
        input="Note it.",
        tools=tools,
        tool_choice="required",
        reasoning=NO_THINKING,
        parallel_tool_calls=False,
        max_output_tokens=1000,
        extra_body={"seed": 3},
    )
    kinds = [item.type for item in response.output]
    if response.status == "completed":
        assert kinds == ["custom_tool_call"]
        [item] = response.output
        assert item.type == "custom_tool_call" and item.name == "note" and isinstance(item.input, str)
    else:  # a text without end: what was cut is no call
        assert "custom_tool_call" not in kinds


class Answer(BaseModel):
    """A form with one word out of two."""

    model_config = ConfigDict(extra="forbid")
    word: Literal["yes", "no"]


def test_a_text_format_is_kept(client: OpenAI) -> None:
    """The SDK's own parser reads the answer."""
    response = client.responses.parse(
        model="m", input="Is it?", text_format=Answer, reasoning=NO_THINKING, max_output_tokens=100
    )
    assert response.output_parsed is not None and response.output_parsed.word in ("yes", "no")


def test_a_conversation_goes_on_by_name(client: OpenAI) -> None:
    """Only the new message is sent, next to nothing is computed again, and what is kept can be read and deleted."""
    asked: dict[str, Any] = {"model": "m", "max_output_tokens": 8, "reasoning": NO_THINKING}
    asked |= {"extra_headers": _a_session()}
    first = client.responses.create(**asked, input=WORDS, instructions="Be brief.")
    second = client.responses.create(
        **asked, input="And then?", previous_response_id=first.id, instructions="Be brief."
    )
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    listed: list[Any] = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.content[0].text for item in listed] == [WORDS, first.output_text, "And then?"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(**asked, input="x", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


def test_an_answer_that_a_limit_cuts_is_incomplete(client: OpenAI) -> None:
    """Streamed and not."""
    asked: dict[str, Any] = {"model": "m", "input": "Hello", "max_output_tokens": 2, "reasoning": NO_THINKING}
    response = client.responses.create(**asked)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    with client.responses.create(**asked, stream=True) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "file"}]}, "input[0].type"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_wrong_requests_raise_with_their_field(
    client: OpenAI, fields: dict[str, Any], param: str, is_streamed: bool
) -> None:
    """The SDK's own class of error, before any event."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "m", "input": "x", "stream": is_streamed, **fields})
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


def test_a_strict_server_asks_for_key_and_name(strict_server: ServerProcess, front: str) -> None:
    """401, 404 and a prompt over the context, each as its class."""
    with connect(strict_server, front, "wrong") as wrong, pytest.raises(openai.AuthenticationError):
        wrong.responses.create(model="m", input="x")
    with connect(strict_server, front, API_KEY) as right:
        with pytest.raises(openai.NotFoundError):
            right.responses.create(model="gpt-12", input="x")
        served = right.models.list().data[0].id
        with pytest.raises(openai.BadRequestError) as caught:
            right.responses.create(model=served, input=WORDS * 200)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        assert right.responses.create(model=served, input="x", max_output_tokens=2).usage is not None
