"""Messages through the database: what comes back is what went in, for every kind of block."""

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.agents.agent_store import decode_messages, encode_messages
from kvserve.core import Block, ImageBlock, Message, TextBlock, ToolResultBlock
from tests.laws import num_examples

BLOCKS = st.deferred(  # else every worker computes at import what characters there are
    lambda: st.one_of(
        *(st.from_type(kind) for kind in get_args(Block.__value__) if kind is not ToolResultBlock),
        st.builds(
            ToolResultBlock,
            call_id=st.text(),
            blocks=st.lists(st.one_of(st.builds(TextBlock, st.text()), st.builds(ImageBlock, st.text()))).map(tuple),
            is_error=st.booleans(),
        ),
    )
)
MESSAGES = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["system", "user", "assistant", "tool"]),
        blocks=st.lists(BLOCKS, max_size=4).map(tuple),
        name=st.none() | st.text(),
    ),
    max_size=4,
).map(tuple)


@given(MESSAGES)
@settings(max_examples=num_examples(40))
def test_what_is_decoded_is_what_was_encoded(messages: tuple[Message, ...]) -> None:
    """In one line, whatever the text."""
    text = encode_messages(messages)
    assert decode_messages(text) == messages and "\n" not in text


@pytest.mark.parametrize(
    "text", ["{", "5", "[5]", '[{"role": "user"}]', '[{"role": "user", "blocks": [{"kind": "X"}]}]']
)
def test_what_was_not_encoded_here_is_an_error(text: str) -> None:
    """A ValueError, whatever is wrong with it."""
    with pytest.raises(ValueError):
        decode_messages(text)
