"""When two writings are one, and that sizes follow the texts."""

import pytest

from kvserve.core import ImageBlock, Message, TextBlock, ThinkingBlock, ToolResultBlock
from kvserve.sessions.written_messages import (
    message_bytes,
    said_digest,
    same_words,
    same_writing,
    written_bytes,
)
from tests.sessions.samples import assistant, call, user, written


def test_ids_and_signatures_are_not_words() -> None:
    """Call ids and signatures are made anew each time; empty blocks say nothing."""
    one = Message("assistant", (ThinkingBlock("t", "s"), TextBlock(""), call("{}", call_id="1")))
    other = Message("assistant", (ThinkingBlock("t"), call("{}", call_id="2")))
    assert same_writing(written(one), written(other, 3))
    assert said_digest(written(one)) == said_digest(written(other, 3))


@pytest.mark.parametrize(
    "other",
    [assistant("a", thinking="u"), assistant("b", thinking="t"), assistant("a"), assistant("t", thinking="a")],
)
def test_another_word_is_another_writing(other: Message) -> None:
    """Each word counts, and whether it was thought or said."""
    one = written(assistant("a", thinking="t"))
    assert not same_writing(one, written(other)) and said_digest(one) != said_digest(written(other))


def test_a_thought_is_no_answer() -> None:
    """The same words only thought, or only said, are two writings."""
    thought, said = written(assistant("", thinking="a")), written(assistant("a"))
    assert not same_writing(thought, said) and said_digest(thought) != said_digest(said)


def test_raw_calls_are_words() -> None:
    """A call spelt differently is another writing: its tokens are others."""
    assert not same_writing(written(assistant("", call("{}"))), written(assistant("", call("{ }"))))


def test_results_are_compared_by_what_they_say() -> None:
    """A result under a new call id says the same; one changed character does not."""

    def result(call_id: str, text: str) -> Message:
        return Message("tool", (ToolResultBlock(call_id, (TextBlock(text),)),))

    assert same_words(result("1", "ok"), result("2", "ok"))
    assert not same_words(result("1", "ok"), result("1", "OK"))


@pytest.mark.parametrize("length", [0, 1, 1_000, 50_000])
def test_bytes_follow_the_texts(length: int) -> None:
    """Every kind of block weighs what its texts weigh; writings weigh their ids too."""
    text = "x" * length
    image = Message("user", (ImageBlock(text),))
    result = Message("tool", (ToolResultBlock("1", (TextBlock(text), ImageBlock(text))),))
    for message, share in ((user(text), 1), (image, 1), (result, 2), (assistant("", call(text), thinking="t"), 1)):
        assert share * length <= message_bytes(message) <= share * length + 1_000
    assert written_bytes(written(user(text), *range(100))) - message_bytes(user(text)) > 100 * 36
