"""Messages, writings and tools come back from their rows exactly; another form is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import (
    Block,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolBlock,
    ToolCallBlock,
    ToolResultBlock,
    ToolSpec,
    Written,
)
from kvserve.sessions.message_rows import (
    dump,
    message_of,
    message_row,
    parse,
    tool_of,
    tool_row,
    written_of,
    written_row,
)
from tests.sessions.samples import assistant, written

texts = st.text(st.characters(codec=None), max_size=12)
"""Any code point, halves of surrogate pairs too: clients that cut text send them."""

plain: st.SearchStrategy[TextBlock | ImageBlock | ToolBlock] = st.one_of(
    st.builds(TextBlock, texts, st.booleans()),
    st.builds(ImageBlock, texts),
    st.builds(ToolBlock, texts, st.none() | texts, st.none() | texts, st.booleans(), st.booleans()),
)
said: st.SearchStrategy[Block] = st.one_of(
    st.builds(TextBlock, texts),
    st.builds(ThinkingBlock, texts, st.none() | texts),
    st.builds(ToolCallBlock, texts, texts, texts),
)
results = st.builds(ToolResultBlock, texts, st.lists(plain, max_size=3).map(tuple), st.booleans())
messages = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.lists(st.one_of(said, plain, results), max_size=4).map(tuple),
    st.none() | texts,
)
ids = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple)
writings = st.builds(
    Written,
    st.builds(Message, st.just("assistant"), st.lists(said, max_size=3).map(tuple), st.none() | texts),
    ids,
    ids,
    st.booleans(),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
tools = st.builds(ToolSpec, texts, st.none() | texts, st.dictionaries(texts, json_values, max_size=3), st.booleans())


@given(messages)
def test_a_message_comes_back(message: Message) -> None:
    """Every kind of block, empty ones, names and halves of surrogate pairs."""
    assert message_of(parse(dump(message_row(message)))) == message


def test_a_text_of_an_older_record_is_the_clients() -> None:
    """Rows did not say whose words a text is; those of a client's texts are written as they were."""
    row = {"role": "user", "name": None, "blocks": [{"kind": "text", "text": "hi"}]}
    message = Message("user", (TextBlock("hi"),))
    assert message_of(row) == message and message_row(message) == row


@given(writings)
def test_a_writing_comes_back(wrote: Written) -> None:
    """Its words, its tail and its emitted ids."""
    assert written_of(parse(dump(written_row(wrote)))) == wrote


@given(tools)
def test_a_tool_comes_back(tool: ToolSpec) -> None:
    """With its keys in their order, and true, 1 and 1.0 told apart: it is rendered again."""
    assert repr(tool_of(parse(dump(tool_row(tool))))) == repr(tool)


def test_two_halves_do_not_become_one_character() -> None:
    """What JSON's escapes would join stays apart."""
    message = Message("user", (TextBlock("\ud83d\ude00"),))
    again = message_of(parse(dump(message_row(message))))
    assert again == message and len(again.blocks[0].text) == 2  # type: ignore[union-attr]


def test_a_row_is_one_line() -> None:
    """A line break in a text is escaped: behind the first one begin a record's token ids."""
    assert b"\n" not in dump(message_row(Message("user", (TextBlock("a\nb\r\n\u2028"),))))


def test_a_model_writes_no_images() -> None:
    """A row of what cannot have been written is refused, both ways."""
    with pytest.raises(ValueError, match="ImageBlock"):
        written_row(written(Message("assistant", (ImageBlock("x"),))))
    row = written_row(written(assistant("a")))
    with pytest.raises(ValueError, match="does not write"):
        written_of({**row, "blocks": [{"kind": "image", "source": "x"}]})


GOOD = written_row(written(assistant("a", thinking="t")))


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {},
        {**GOOD, "ids": [True]},
        {**GOOD, "ids": [-1]},
        {**GOOD, "ids": [1.0]},
        {**GOOD, "blocks": "text"},
        {**GOOD, "blocks": [{"kind": "poem", "text": "x"}]},
        {**GOOD, "blocks": [{"kind": ["text"], "text": "x"}]},
        {**GOOD, "blocks": [{"kind": "text", "text": 1}]},
        {**GOOD, "blocks": [{"kind": "thinking", "text": "x", "signature": 1}]},
        {**GOOD, "opens_reasoning": 1},
        {**GOOD, "name": 1},
    ],
)
def test_another_form_is_refused(broken: Any) -> None:
    """A value of another type is no writing."""
    with pytest.raises(ValueError, match=r"."):
        written_of(broken)
