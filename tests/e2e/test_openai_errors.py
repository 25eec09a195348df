"""The openai SDK's error classes, against a server with a key, strict names, a small context and a queue of one."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError, OpenAI, RateLimitError

from tests.e2e.conftest import API_KEY, CONTEXT_LIMIT, connect
from tests.e2e.servers import ServerProcess

pytestmark = pytest.mark.e2e

MODEL = "kvserve-demo-qwen3"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
STOP_TOKENS = (1097, 1099)
ENDLESS = {str(token): -100 for token in STOP_TOKENS}


@pytest.fixture
def client(strict_server: ServerProcess, front: str) -> Iterator[OpenAI]:
    """The SDK with the right key."""
    with connect(strict_server, front, API_KEY) as client:
        yield client


@pytest.mark.parametrize("name", [MODEL, f"openai/{MODEL}"])
def test_the_right_key_and_name_are_served(client: OpenAI, name: str) -> None:
    """The model answers to its own name and to the one that LiteLLM lists."""
    assert client.chat.completions.create(model=name, messages=HELLO, max_tokens=2).choices
    assert client.models.list().data


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_key_is_an_authentication_error(strict_server: ServerProcess, front: str, stream: bool) -> None:
    """For chats and for the list of models."""
    with connect(strict_server, front, "wrong") as client:
        with pytest.raises(AuthenticationError) as raised:
            client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
        assert raised.value.code == "invalid_api_key"
        with pytest.raises(AuthenticationError):
            client.models.list()


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_a_not_found_error(client: OpenAI, stream: bool) -> None:
    """Strict mode says which name was wrong and which is right."""
    with pytest.raises(NotFoundError) as raised:
        client.chat.completions.create(model="somebody/else", messages=HELLO, stream=stream)
    assert raised.value.param == "model"
    assert "somebody/else" in raised.value.message
    assert MODEL in raised.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_names_both_numbers(client: OpenAI, stream: bool) -> None:
    """A bad request, before anything is computed, with the prompt's length and the limit."""
    with pytest.raises(BadRequestError) as raised:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "one two three " * 4000}], max_tokens=2, stream=stream
        )
    assert raised.value.code == "context_length_exceeded"
    numbers = [int(word) for word in raised.value.message.replace(".", " ").split() if word.isdigit()]
    assert CONTEXT_LIMIT in numbers
    assert max(numbers) > CONTEXT_LIMIT


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"enable_thinking": "perhaps"}, "enable_thinking"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistyped_field_is_named(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    """A bad request whose `param` says where."""
    with pytest.raises(BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=fields)
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"


def test_a_full_queue_is_a_rate_limit_error(client: OpenAI, strict_server: ServerProcess) -> None:
    """One row runs, one waits, the third is told to come back; when the two have left, it is served."""
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": CONTEXT_LIMIT, "logit_bias": ENDLESS}
    with client.chat.completions.create(**asked, stream=True) as running:
        strict_server.wait_for(num_running=1)
        with client.chat.completions.create(**asked, stream=True) as waiting:
            strict_server.wait_for(num_running=1, num_waiting=1)
            for stream in (False, True):
                with pytest.raises(RateLimitError) as raised:
                    client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
                assert raised.value.type == "rate_limit_error"
                assert int(raised.value.response.headers["retry-after"]) > 0
            waiting.close()
        running.close()
    strict_server.wait_for(num_running=0, num_waiting=0)
    assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2).choices
