"""What LiteLLM gets to see."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.errors import BadRequest
from kvserve.proxy.envelope import chat_envelope
from tests.laws import IS_FULL

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=100 if IS_FULL else 20)
@given(messages=JSON, stream=JSON, options=JSON)
def test_whatever_the_messages_are_the_envelope_is_plain(messages: Any, stream: Any, options: Any) -> None:
    """Known roles, text or text parts, a true boolean: nothing that LiteLLM could stumble over."""
    body = {"model": "m", "messages": messages, "stream": stream, "stream_options": options}
    envelope = chat_envelope(body, "default")
    shown = envelope["messages"]
    assert isinstance(shown, list)
    assert len(shown) == (1 if isinstance(messages, list) and messages else 0)
    for message in shown:
        assert message["role"] in ("system", "developer", "user", "assistant", "tool", "function")
        content = message["content"]
        assert isinstance(content, str) or all(isinstance(part["text"], str) for part in content)
    assert envelope.get("stream") in (None, True)
    assert isinstance(envelope.get("stream_options", {}), dict)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "system", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "tool", "tool_call_id": "x"}, {"role": "tool", "content": ""}),
        ({"role": "strange", "content": None}, {"role": "user", "content": ""}),
        (
            {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "b", "cache_control": {}}, 5]},
            {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {}}]},
        ),
    ],
)
def test_the_newest_text_is_shown(message: object, shown: object) -> None:
    """Who said it and what; no calls, no images, no history, no other fields."""
    envelope = chat_envelope({"messages": [{"role": "user", "content": "before"}, message], "tools": [1]}, "default")
    assert envelope == {"model": "default", "messages": [shown]}


@pytest.mark.parametrize("name", [5, ["a"], "a,b", "http://machine/model", True])
def test_what_is_no_name_is_refused(name: object) -> None:
    """LiteLLM would take it for several models, or for an address."""
    with pytest.raises(BadRequest) as caught:
        chat_envelope({"model": name}, "default")
    assert caught.value.param == "model"
