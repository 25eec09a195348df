"""The anthropic Python SDK against the demo model, through both ports. Its weights are random: what these tests show is
the wire form, and that what a request says reaches the model; where a form is forced, the answer's form too."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import Message, ToolUseBlock

from kvserve.protocols.sealed_thinking import signed_text
from tests.e2e.conftest import API_KEY, CONTEXT_LIMIT
from tests.e2e.servers import ServerProcess
from tests.e2e.test_openai_sdk import CITIES, ZONES, added_token

pytestmark = pytest.mark.e2e

MODEL = "kvserve-demo-qwen3"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
OFF: Any = {"type": "disabled"}
WORDS = "The user asks what the server should write before the file is read again. "
ENDLESS = {"logit_bias": {"1097": -100, "1099": -100}}


def tool(name: str, key: str, choices: set[str]) -> Any:
    """A tool with one argument out of a few words, so that a model with random weights can fill it in."""
    properties = {key: {"type": "string", "enum": sorted(choices)}}
    schema = {"type": "object", "properties": properties, "required": [key], "additionalProperties": False}
    return {"name": name, "description": "Looks it up.", "input_schema": schema}


TOOLS = [tool("get_weather", "city", CITIES), tool("get_time", "zone", ZONES)]


def connect(server: ServerProcess, front: str, api_key: str = "any") -> Anthropic:
    """The SDK without retries, so that each error is seen as it comes."""
    base_url = f"http://127.0.0.1:{server.port_of(front)}"
    return Anthropic(base_url=base_url, api_key=api_key, max_retries=0, timeout=100)


@pytest.fixture
def claude(open_server: ServerProcess, front: str) -> Iterator[Anthropic]:
    """The SDK, pointed at one port of the server with the default settings."""
    with connect(open_server, front) as client:
        yield client


@pytest.fixture
def strict_claude(strict_server: ServerProcess, front: str) -> Iterator[Anthropic]:
    """The SDK with the right key on the strict server."""
    with connect(strict_server, front, API_KEY) as client:
        yield client


def _text(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def num_prompt_tokens(message: Message) -> int:
    usage = message.usage
    return usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_a_message_is_answered(claude: Anthropic) -> None:
    """Content, stop reason and usage are there, and the request's id is part of the answer's."""
    reply = claude.messages.with_raw_response.create(model="claude-x", messages=HELLO, max_tokens=24, thinking=OFF)
    message = reply.parse()
    assert reply.request_id == message._request_id == reply.headers["x-request-id"]
    assert reply.request_id is not None and reply.request_id in message.id
    assert message.role == "assistant" and message.content[0].type == "text" and message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 24 and num_prompt_tokens(message) > 0


def test_a_stream_says_what_the_whole_answer_says(claude: Anthropic) -> None:
    """In pieces as they are written; the SDK's accumulated message is the whole one."""
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 32, "thinking": OFF}
    asked |= {"extra_body": {"temperature": 0}}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        types = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert _text(streamed) == _text(whole) != ""
    assert (streamed.stop_reason, num_prompt_tokens(streamed)) == (whole.stop_reason, num_prompt_tokens(whole))
    assert types[0] == "message_start" and types[-1] == "message_stop"
    assert types.count("content_block_delta") > 5


def test_thinking_has_a_block_of_its_own_and_comes_back(claude: Anthropic, open_server: ServerProcess) -> None:
    """Signed, omitted where that is asked for, and what it says is in the next prompt either way: behind a call, where
    templates keep it."""
    opening = added_token(open_server, "<think>")
    biased = {"extra_body": {"logit_bias": {str(opening): 100}, "repetition_penalty": 1}}
    use = {"type": "tool_use", "id": "toolu1", "name": "get_time", "input": {"zone": sorted(ZONES)[0]}}
    result = {"type": "tool_result", "tool_use_id": "toolu1", "content": "noon"}
    for display in ("summarized", "omitted"):
        thinking: Any = {"type": "adaptive", "display": display}
        asked: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 24, "thinking": thinking, **biased}
        with claude.messages.stream(**asked) as stream:
            block = stream.get_final_message().content[0]
        assert block.type == "thinking" and block.signature
        assert bool(block.thinking) == (display == "summarized")

        def counted(*echoed: Any, thinking: Any = thinking) -> int:
            talk = [*HELLO, {"role": "assistant", "content": [*echoed, use]}, {"role": "user", "content": [result]}]
            return claude.messages.count_tokens(model="m", messages=talk, thinking=thinking, tools=TOOLS).input_tokens

        said = block.thinking or signed_text(block.signature) or ""
        assert len(said) > 20
        assert counted(block) == counted({"type": "thinking", "thinking": said, "signature": ""}) > counted() + 10


@pytest.mark.parametrize("streams", [False, True])
def test_tools_are_called_and_answered(claude: Anthropic, streams: bool) -> None:
    """A demanded call has arguments that fit; its result goes back, as text, blocks and error."""
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 400, "tools": TOOLS, "thinking": OFF}
    asked |= {"tool_choice": {"type": "tool", "name": "get_time"}}
    if streams:
        with claude.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = claude.messages.create(**asked)
    [call] = [block for block in message.content if isinstance(block, ToolUseBlock)]
    assert message.stop_reason == "tool_use" and call.name == "get_time"
    assert isinstance(call.input, dict) and call.input["zone"] in ZONES
    for said in ("noon", [{"type": "text", "text": "noon"}]):
        result = {"type": "tool_result", "tool_use_id": call.id, "content": said, "is_error": said == "noon"}
        talk: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]
        answer = claude.messages.create(model="m", messages=talk, max_tokens=4, tools=TOOLS, thinking=OFF)
        assert (answer.usage.cache_read_input_tokens or 0) > 0.5 * num_prompt_tokens(answer)


def test_tokens_are_counted(claude: Anthropic) -> None:
    """As many as the same request's usage says."""
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "tools": TOOLS, "system": WORDS, "thinking": OFF}
    counted = claude.messages.count_tokens(**asked).input_tokens
    assert counted == num_prompt_tokens(claude.messages.create(**asked, max_tokens=1))


def test_a_conversation_is_read_from_the_cache(claude: Anthropic) -> None:
    """Marked as clients mark it, the second turn computes what is new; created and read add up."""
    mark = {"type": "ephemeral", "ttl": "1h"}
    talk: list[Any] = [{"role": "user", "content": [{"type": "text", "text": WORDS * 20, "cache_control": mark}]}]
    asked: dict[str, Any] = {"model": "m", "max_tokens": 8, "thinking": OFF}
    first = claude.messages.create(**asked, messages=talk)
    talk[0]["content"] = WORDS * 20
    talk += [{"role": "assistant", "content": first.content}]
    talk += [{"role": "user", "content": [{"type": "text", "text": "And on.", "cache_control": mark}]}]
    second = claude.messages.create(**asked, messages=talk)
    assert (second.usage.cache_read_input_tokens or 0) >= 0.9 * num_prompt_tokens(second)
    assert 0 < (second.usage.cache_creation_input_tokens or 0) < 40


def test_the_models_are_listed(claude: Anthropic) -> None:
    """In this API's form, on both ports; each is found by its name, others are not."""
    listed = list(claude.models.list(limit=1))
    assert listed[0].id == MODEL and listed[0].type == "model"
    found = claude.models.retrieve(MODEL)
    assert found == listed[0] and (found.max_input_tokens or 0) > 0
    with pytest.raises(anthropic.NotFoundError) as raised:
        claude.models.retrieve("nobody/nothing")
    _details(raised.value, "not_found_error")


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_an_authentication_error(strict_server: ServerProcess, front: str) -> None:
    """For messages and for counts."""
    with connect(strict_server, front, "wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as raised:
            client.messages.create(model=MODEL, messages=HELLO, max_tokens=1)
        assert raised.value.body == {"type": "error", "error": _details(raised.value, "authentication_error")}
        with pytest.raises(anthropic.AuthenticationError):
            client.messages.count_tokens(model=MODEL, messages=HELLO)


def _details(error: anthropic.APIStatusError, kind: str) -> dict[str, Any]:
    """The inner part of an error's body, after showing its type."""
    assert isinstance(error.body, dict)
    details: dict[str, Any] = error.body["error"]
    assert details["type"] == kind and details["message"]
    return details


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_sdks_own_classes(strict_claude: Anthropic, stream: bool) -> None:
    """Unknown model, a prompt that is too long, a wrong field."""
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 4, "stream": stream}
    with pytest.raises(anthropic.NotFoundError) as missing:
        strict_claude.messages.create(**asked, model="gpt-12")
    _details(missing.value, "not_found_error")
    assert missing.value.request_id and missing.value.request_id.startswith("req")
    with pytest.raises(anthropic.BadRequestError) as long:
        strict_claude.messages.create(**{**asked, "messages": [{"role": "user", "content": WORDS * 900}]}, model=MODEL)
    message = _details(long.value, "invalid_request_error")["message"]
    assert message.startswith("prompt is too long: ") and f" > {CONTEXT_LIMIT} maximum" in message
    with pytest.raises(anthropic.BadRequestError) as mistyped:
        strict_claude.messages.create(**asked, model=MODEL, extra_body={"tool_choice": {"type": "any"}})
    assert "tool_choice" in _details(mistyped.value, "invalid_request_error")["message"]


def test_a_full_queue_is_a_rate_limit_error(strict_claude: Anthropic, strict_server: ServerProcess) -> None:
    """One row runs, one waits, the third is told to come back; when the two have left, it is served."""
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": CONTEXT_LIMIT, "extra_body": ENDLESS}
    with strict_claude.messages.create(**asked, stream=True):
        strict_server.wait_for(num_running=1)
        with strict_claude.messages.create(**asked, stream=True):
            strict_server.wait_for(num_running=1, num_waiting=1)
            for stream in (False, True):
                with pytest.raises(anthropic.RateLimitError) as raised:
                    strict_claude.messages.create(model=MODEL, messages=HELLO, max_tokens=1, stream=stream)
                _details(raised.value, "rate_limit_error")
                assert int(raised.value.response.headers["retry-after"]) > 0
    strict_server.wait_for(num_running=0, num_waiting=0)
    assert strict_claude.messages.create(model=MODEL, messages=HELLO, max_tokens=2).content
