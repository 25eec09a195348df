"""The openai Python SDK against the demo model, through both ports. Its weights are random: what these tests show is
the wire form, and that what a request says reaches the model; where a form is forced, the answer's form too."""

import json
from collections.abc import Iterable
from typing import Any, Literal

import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.servers import ServerProcess

pytestmark = pytest.mark.e2e

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
NO_THINKING = {"enable_thinking": False}
CITIES = {"Paris", "Rome"}
ZONES = {"CET", "UTC"}
PLAIN_SAMPLING = {"top_k": 0, "min_p": 0, "repetition_penalty": 1}
NUM_SEEDS = 12


def tool(name: str, key: str, choices: Iterable[str]) -> Any:
    """A function with one argument out of a few words, so that a model with random weights can fill it in."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string", "enum": sorted(choices)}},
        "required": [key],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": "Looks it up.", "parameters": parameters}}


TOOLS = [tool("get_weather", "city", CITIES), tool("get_time", "zone", ZONES)]


def added_token(server: ServerProcess, text: str) -> int:
    """The id of a control token of the demo model."""
    (path,) = (server.folder / "state").glob("*/tokenizer.json")
    tokens = json.loads(path.read_text("utf-8"))["added_tokens"]
    return next(int(token["id"]) for token in tokens if token["content"] == text)


def joined(chunks: Iterable[ChatCompletionChunk], field: str = "content") -> str:
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    return "".join(getattr(delta, field, None) or "" for delta in deltas)


def finish_reasons(chunks: Iterable[ChatCompletionChunk]) -> list[str]:
    return [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]


def function_calls(answer: ChatCompletion) -> list[ChatCompletionMessageFunctionToolCall]:
    calls = answer.choices[0].message.tool_calls or []
    assert all(isinstance(call, ChatCompletionMessageFunctionToolCall) for call in calls)
    return [call for call in calls if isinstance(call, ChatCompletionMessageFunctionToolCall)]


def signature(call: ChatCompletionMessageFunctionToolCall) -> tuple[str, Any]:
    return call.function.name, json.loads(call.function.arguments)


# --- text -------------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered(client: OpenAI) -> None:
    """Content, finish reason and usage are there, and the request's id is part of the answer's."""
    reply = client.chat.completions.with_raw_response.create(model="any/name", messages=HELLO, max_tokens=24)
    answer = reply.parse()
    assert reply.headers["x-request-id"] in answer.id
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 24
    assert answer.usage.prompt_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert 0 <= cached < answer.usage.prompt_tokens


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    """Role first, then the text in pieces, one finish reason, and with include_usage the same usage at the end."""
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert joined(chunks) == whole.choices[0].message.content
    assert sum(bool(joined([chunk])) for chunk in chunks) > 5
    assert finish_reasons(chunks) == [whole.choices[0].finish_reason]
    assert [chunk.usage for chunk in chunks if chunk.usage] == [chunks[-1].usage]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_has_no_usage_that_was_not_asked_for(client: OpenAI) -> None:
    """Also behind LiteLLM, which asks the backend for it in any case."""
    chunks = list(client.chat.completions.create(model="m", messages=HELLO, max_tokens=8, stream=True))
    assert not [chunk.usage for chunk in chunks if chunk.usage]
    assert all(chunk.choices for chunk in chunks)


def test_reasoning_is_its_own_channel(client: OpenAI, open_server: ServerProcess) -> None:
    """What the model writes after its thinking tag arrives as reasoning_content, streamed and not, and is counted."""
    opening = added_token(open_server, "<think>")
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 9, "logit_bias": {str(opening): 100}}
    whole = client.chat.completions.create(**asked)
    reasoning = getattr(whole.choices[0].message, "reasoning_content", None)
    assert reasoning
    assert not whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 9
    assert joined(client.chat.completions.create(**asked, stream=True), "reasoning_content") == reasoning


@pytest.mark.parametrize(
    ("off", "on"),
    [
        ({"enable_thinking": False}, {"enable_thinking": True}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": True}},
        ),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled", "budget_tokens": 64}}),
        ({"reasoning": {"enabled": False}}, {"reasoning": {"effort": "low"}}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_thinking_switches_arrive(client: OpenAI, off: dict[str, Any], on: dict[str, Any]) -> None:
    """The template closes the thinking of a request that switches it off: its prompt is longer."""

    def num_prompt_tokens(extra: dict[str, Any]) -> int:
        answer = client.chat.completions.create(model="m", messages=HELLO, max_tokens=1, extra_body=extra)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert num_prompt_tokens(off) > num_prompt_tokens(on) == num_prompt_tokens({})


def test_a_raw_prompt_is_completed(client: OpenAI) -> None:
    """Text or token ids, streamed or not, without the chat template."""
    asked: dict[str, Any] = {"model": "m", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(prompt="The quick brown", **asked)
    assert whole.usage is not None
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "The quick brown"}], **asked)
    assert chat.usage is not None
    assert whole.usage.prompt_tokens < chat.usage.prompt_tokens
    assert whole.choices[0].text
    chunks = list(client.completions.create(prompt="The quick brown", stream=True, **asked))
    # LiteLLM leaves the text out of the chunks that carry the finish reason and the usage; the SDK then says None.
    assert "".join(choice.text or "" for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    ids = client.completions.create(prompt=[5, 6, 7, 8], **asked)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 4


def test_the_model_is_listed(client: OpenAI, front: str) -> None:
    """First in the list, and served by that name; LiteLLM lists it as PROXY_MODEL_ID says."""
    name = {"kvserve": "kvserve-demo-qwen3", "litellm": "openai/kvserve-demo-qwen3"}[front]
    assert client.models.list().data[0].id == name
    if front == "kvserve":
        assert client.models.retrieve(name).id == name
    assert client.chat.completions.create(model=name, messages=HELLO, max_tokens=2).choices


# --- tools ------------------------------------------------------------------------------------------------------------


def test_a_tool_round_trip(client: OpenAI, open_server: ServerProcess) -> None:
    """A forced call comes; its result, sent back with the call, stands in the prompt of the next answer."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather?"}]
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    first = client.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=300, extra_body=NO_THINKING
    )
    assert first.choices[0].finish_reason == "tool_calls"
    (call,) = function_calls(first)
    assert call.id.isalnum()
    assert call.function.name == "get_weather"
    city = json.loads(call.function.arguments)["city"]
    assert city in CITIES
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Hail of marbles, 3 degrees."})
    second = client.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, tool_choice="none", max_tokens=24, extra_body=NO_THINKING
    )
    assert second.choices[0].message.content
    assert not second.choices[0].message.tool_calls
    seen = open_server.prompts()[-1]
    assert "get_weather" in seen
    assert city in seen
    assert "Hail of marbles, 3 degrees." in seen


def test_a_streamed_tool_call(client: OpenAI) -> None:
    """The SDK's own accumulator builds the same call from the chunks as from the whole answer."""
    choice: Any = {"type": "function", "function": {"name": "get_time"}}
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    asked |= {"max_tokens": 300, "extra_body": NO_THINKING}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert [signature(call) for call in function_calls(streamed)] == [signature(call) for call in function_calls(whole)]


def test_two_parallel_calls_and_their_results(client: OpenAI, open_server: ServerProcess) -> None:
    """Two calls of two tools in one answer, streamed and not; both results go back under their ids.

    The model draws at random among the forms that tool_choice allows, so the first seed counts with which it chooses
    exactly two different tools and then ends by itself; a bias on its stop token makes that likely.
    """
    messages: list[Any] = [{"role": "user", "content": "Weather and time?"}]
    bias = {str(added_token(open_server, "<|im_end|>")): 10}
    asked: dict[str, Any] = {"model": "m", "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True}
    asked |= {"temperature": 1, "top_p": 1, "max_tokens": 250, "logit_bias": bias}
    asked |= {"extra_body": NO_THINKING | PLAIN_SAMPLING}
    for seed in range(NUM_SEEDS):
        answer = client.chat.completions.create(messages=messages, seed=seed, **asked)
        calls = function_calls(answer)
        if sorted(call.function.name for call in calls) == ["get_time", "get_weather"]:
            break
    else:
        pytest.fail(f"no seed below {NUM_SEEDS} made the model call both tools")
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert len({call.id for call in calls}) == 2
    chunks = list(client.chat.completions.create(messages=messages, seed=seed, stream=True, **asked))
    deltas = [part for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    assert [part.index for part in deltas if part.id] == [0, 1]
    assert [part.index for part in deltas] == sorted(part.index for part in deltas), "one call after the other"
    with client.chat.completions.stream(messages=messages, seed=seed, **asked) as stream:
        streamed = function_calls(stream.get_final_completion())
    assert [signature(call) for call in streamed] == [signature(call) for call in calls]
    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    results = {call.id: f"result of {call.function.name}" for call in calls}
    messages += [{"role": "tool", "tool_call_id": key, "content": text} for key, text in results.items()]
    last = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, max_tokens=4)
    assert last.choices
    seen = open_server.prompts()[-1]
    assert all(text in seen for text in results.values())


def test_one_call_where_parallel_ones_are_refused(client: OpenAI) -> None:
    """parallel_tool_calls=False holds behind LiteLLM too: one call, although the model would go on."""
    answer = client.chat.completions.create(
        model="m",
        messages=HELLO,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        extra_body=NO_THINKING,
    )
    assert len(function_calls(answer)) == 1
    assert answer.choices[0].finish_reason == "tool_calls"


# --- forms ------------------------------------------------------------------------------------------------------------


class Reading(BaseModel):
    """A form that a model with random weights can fill: every value comes from a small set."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-9, le=9)
    is_raining: bool
    winds: list[Literal["north", "south"]] = Field(min_length=1, max_length=2)


def test_json_schema_is_obeyed(client: OpenAI) -> None:
    """The content of an answer, streamed or not, is JSON that the schema's own model accepts."""
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "reading", "strict": True, "schema": Reading.model_json_schema()},
    }
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "response_format": form, "max_tokens": 600}
    answer = client.chat.completions.create(**asked, extra_body=NO_THINKING)
    assert answer.choices[0].finish_reason == "stop"
    Reading.model_validate_json(answer.choices[0].message.content or "")
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert finish_reasons(chunks) == ["stop"]
    Reading.model_validate_json(joined(chunks))


def test_the_sdk_parses_into_the_callers_class(client: OpenAI) -> None:
    """`parse` sends the class as a schema and gives back an instance."""
    answer = client.chat.completions.parse(
        model="m", messages=HELLO, response_format=Reading, max_tokens=600, extra_body=NO_THINKING
    )
    assert isinstance(answer.choices[0].message.parsed, Reading)


@pytest.mark.parametrize("fields", [{"n": 2}, {"top_logprobs": 3}])
def test_what_is_not_supported_is_refused_by_name(client: OpenAI, fields: dict[str, Any]) -> None:
    """n and top_logprobs without logprobs are no silent no-ops: a 400 that names the field."""
    with pytest.raises(BadRequestError) as raised:
        client.chat.completions.create(model="m", messages=HELLO, max_tokens=2, **fields)
    assert raised.value.param == next(iter(fields))
    assert raised.value.param in raised.value.message
    assert raised.value.type == "invalid_request_error"
