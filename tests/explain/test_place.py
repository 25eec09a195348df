"""Where a template parts two prompts: message, character and text, from token ids and where messages begin."""

from collections.abc import Sequence

from kvserve.core import Message, RequestId, TextBlock, ToolResultBlock
from kvserve.explain.difference import message_at, template_difference
from kvserve.sessions.seen import PathNode, TurnRecord, pack_ids
from tests.sessions.samples import assistant, user


def decode(ids: Sequence[int]) -> str:
    """Every id is a character."""
    return "".join(chr(each) for each in ids)


def record(messages: Sequence[Message], texts: Sequence[str], answer: str = "") -> TurnRecord:
    """A request whose messages are written as these texts, its answer behind a tail of two characters."""
    prompt = "".join(texts) + "A:"
    starts = [sum(len(text) for text in texts[:count]) for count in range(len(texts) + 1)]
    return TurnRecord(
        request_id=RequestId("one"),
        session=None,
        leaf=PathNode(None, b"c", messages[0], None, 0),
        messages=tuple(messages),
        tools=(),
        tools_digest=b"",
        packed_ids=pack_ids([ord(char) for char in prompt + answer]),
        num_prompt_tokens=len(prompt),
        starts=tuple(starts),
        template_arguments={},
        fired=frozenset(),
    )


TALK = (user("one"), assistant("two"), user("three"), assistant("four"))
TEXTS = ("U:one.", "A:two.", "U:three.")


def result(text: str) -> Message:
    return Message("tool", (ToolResultBlock("c", (TextBlock(text),)),))


def test_the_message_is_found_by_its_tokens() -> None:
    """Each place of the prompt belongs to one message; the answer is the last one."""
    before = record(TALK, TEXTS, "four")
    whole = decode(before.ids)
    assert [message_at(before, whole.index(text)) for text in ("one", "two", "three", "four")] == [0, 1, 2, 3]


def test_results_that_are_written_as_one_message_are_counted_as_one() -> None:
    """What follows them keeps its number; a template that joins otherwise leaves the message unnamed."""
    messages = (user("one"), assistant("two"), result("r"), result("s"), assistant("five"))
    joined = record(messages, ("U:one.", "A:two.", "R:r s."), "five")
    assert message_at(joined, decode(joined.ids).index("r s")) == 2
    assert message_at(joined, decode(joined.ids).index("five")) == 4
    assert message_at(record(messages, ("U:one. A:two.", "R:r s."), "five"), 3) is None


def test_the_character_is_one_of_the_written_message() -> None:
    """Counted from where the message begins, with the text around it on both sides."""
    before = record(TALK, TEXTS, "four")
    ids = [ord(char) for char in "U:one.A:tXo.U:three.A:"]
    found = template_difference(before, ids, 9, decode)
    assert found is not None
    assert (found.message_index, found.role, found.char) == (1, "assistant", 3)
    assert found.before.startswith("A:two.") and found.after.startswith("A:tXo.")


def test_a_long_message_is_shown_around_the_difference_only() -> None:
    """80 characters at most, and the character is still counted from the beginning."""
    before = record((user("x"),), ("U:" + "x" * 5_000 + ".",))
    ids = [*before.ids[:4_000], ord("#"), *before.ids[4_001:]]
    found = template_difference(before, ids, 4_000, decode)
    assert found is not None and found.char == 4_000
    assert "#" in found.after and len(found.after) <= 80


def test_going_on_is_no_difference() -> None:
    """A prompt that is the beginning of the other, and one that nobody can decode."""
    before = record(TALK, TEXTS)
    assert template_difference(before, before.ids, len(before.ids), decode) is None
    assert template_difference(before, [1, 2], 0, None) is None
