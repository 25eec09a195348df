"""Whatever a body of `/v1/messages`, count_tokens, `/v1/responses` or `/v1/agents` is, parsing ends in a request or in
a request error, as for chat/completions."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import NOBODY, JsonObject, RequestDefaults, RequestId
from kvserve.errors import BadRequest, NotFound, RequestError
from kvserve.protocols.agents import parse_create, parse_generate
from kvserve.protocols.anthropic_messages import parse_counted, parse_messages
from kvserve.protocols.error_bodies import encode_anthropic_error, encode_openai_error
from kvserve.protocols.responses_request import parse_responses
from kvserve.protocols.responses_store import ResponseStore
from tests.laws import num_examples
from tests.protocols.test_robustness import JSON, VALID, paths, replaced

ID = RequestId("req0123456789abcdef01234567")
KEPT = ResponseStore(None, print).of(NOBODY)
MARK = {"type": "ephemeral", "ttl": "1h"}

MESSAGES: dict[str, object] = {
    "model": "claude-x",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s", "cache_control": MARK}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": MARK}]},
        {"role": "system", "content": "a note"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "", "signature": "kv1AAAA"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "is_error": True,
                    "content": [
                        {"type": "text", "text": "r"},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                        {"type": "tool_reference", "tool_name": "g"},
                        {
                            "type": "search_result",
                            "title": "t",
                            "source": "s",
                            "content": [{"type": "text", "text": "x"}],
                        },
                    ],
                },
                {"type": "document", "title": "d", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": MARK}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": '{"session_id": "s"}'},
    "service_tier": "auto",
    "betas": ["b"],
    "mcp_servers": [],
    "stream": True,
    "cache_control": MARK,
    "extra_body": {"ttl": "5m", "speculation": False, "seed": 3},
}
RESPONSES: dict[str, object] = {
    "model": "m",
    "instructions": "i",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": [{"type": "input_file", "filename": "a", "file_data": "YQ=="}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "s"}],
            "encrypted_content": "x",
        },
        {"type": "function_call", "call_id": "1", "name": "stop", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": "data:x"}]},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "y"},
    ],
    "tools": [
        {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "stop"}]},
        {"type": "web_search"},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "look"}, {"type": "function", "name": "stop", "namespace": "agents"}],
    },
    "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 5,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "truncation": "auto",
    "store": False,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
}
AGENT: dict[str, object] = {
    "agent_id": "a",
    "model": "m",
    "system_prompt": [{"type": "text", "text": "s"}],
    "max_context": 100,
    "persist": True,
}

type Parse = Callable[[JsonObject, RequestDefaults], object]
PROTOCOLS: dict[str, tuple[dict[str, object], Parse]] = {
    "messages": (MESSAGES, lambda body, defaults: parse_messages(body, {}, defaults, ID)),
    "count_tokens": (MESSAGES, lambda body, defaults: parse_counted(body, {}, defaults, ID)),
    "responses": (RESPONSES, lambda body, defaults: parse_responses(body, {}, defaults, ID, KEPT)),
    "agent": (AGENT, lambda body, _: parse_create(body)),
    "generate": (VALID, lambda body, defaults: parse_generate(body, {}, defaults, ID)),
}
NAMES = st.sampled_from(sorted({*MESSAGES, *RESPONSES, *AGENT, "type", "role", "previous_response_id"}))
OBJECTS = st.dictionaries(NAMES | st.text(max_size=4), JSON, max_size=6)


def check(parse: Parse, body: JsonObject, defaults: RequestDefaults) -> None:
    """A request, or a request error of which either form's body is JSON."""
    try:
        parse(body, defaults)
    except RequestError as error:
        assert isinstance(error, BadRequest | NotFound)
        for encode in (encode_anthropic_error, encode_openai_error):
            assert json.dumps(encode(error), allow_nan=False)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_body_that_is_mutated_is_valid(name: str, defaults: RequestDefaults) -> None:
    """Otherwise the mutations would prove nothing."""
    valid, parse = PROTOCOLS[name]
    parse(valid, defaults)


@pytest.mark.parametrize("name", PROTOCOLS)
@given(data=st.data())
@settings(max_examples=num_examples(25))
def test_any_mutation_of_a_valid_body_is_answered(name: str, data: st.DataObject, defaults: RequestDefaults) -> None:
    """One field of any depth replaced by any JSON value, or any object at all."""
    valid, parse = PROTOCOLS[name]
    mutated = st.sampled_from(list(paths(valid))).flatmap(lambda path: JSON.map(lambda new: replaced(valid, path, new)))
    check(parse, data.draw(mutated | OBJECTS), defaults)
