"""What clients do to their history between two requests: seen once, it is expected the next time."""

from collections.abc import Sequence

import pytest

from kvserve.core import Message, Role, TextBlock, ThinkingBlock, ToolCallBlock
from kvserve.warming.client_behaviour import MAX_OPENINGS, Habits, echoed, history_after, learn


def say(role: Role, text: str) -> Message:
    return Message(role, (TextBlock(text),))


SYSTEM, ASK, MORE = say("system", "You look."), say("user", "Look there."), say("user", "And there?")
ANSWER = Message("assistant", (ThinkingBlock("Hm."), TextBlock("A hill.")))
CALL = Message("assistant", (ThinkingBlock("Hm."), ToolCallBlock("c1", "look", "{}")))
RULE_CARRIER = "<carrier>"


def note(words: str) -> Message:
    return say("user", f"Context of this request only, for you: {words}")


def is_synthetic(message: Message) -> bool:
    """A rule knows these."""
    return any(isinstance(block, TextBlock) and block.text.startswith(RULE_CARRIER) for block in message.blocks)


def identity(message: Message) -> bytes:
    """Without thinking, white space at the ends and ids of calls."""
    said = [
        block.text.strip() if isinstance(block, TextBlock) else f"{block.name} {block.arguments}"
        for block in message.blocks
        if isinstance(block, TextBlock | ToolCallBlock)
    ]
    return b"" if is_synthetic(message) else f"{message.role} {said}".encode()


def seen(asked: Sequence[Message], answer: Message, now: Sequence[Message], known: Habits | None = None) -> Habits:
    return learn(known or Habits(), asked, answer, now, identity)


def expected(habits: Habits, asked: Sequence[Message], answer: Message) -> tuple[tuple[Message, ...], int]:
    """The history of the next request, and how many messages it will have at its end again."""
    history = history_after(habits, asked, answer, is_synthetic)
    assert history is not None
    return history.messages, len(history.carried)


def test_a_client_that_only_appends_is_expected_to() -> None:
    """Of a new client and of one that was seen to."""
    habits = seen([SYSTEM, ASK], ANSWER, [SYSTEM, ASK, ANSWER, MORE])
    assert habits == Habits()
    assert expected(habits, [SYSTEM, ASK], ANSWER) == ((SYSTEM, ASK, ANSWER), 0)


def test_a_message_that_a_rule_takes_for_a_carrier_is_expected_to_leave() -> None:
    """From the first turn on, and to stand at the end of the next request again."""
    carrier = say("user", RULE_CARRIER)
    assert expected(Habits(), [SYSTEM, ASK, carrier], ANSWER) == ((SYSTEM, ASK, ANSWER), 1)


def test_a_rules_carrier_that_stays_is_expected_to_stay() -> None:
    """The client knows better than the rule."""
    carrier = say("user", RULE_CARRIER)
    habits = seen([SYSTEM, ASK, carrier], ANSWER, [SYSTEM, ASK, carrier, ANSWER, MORE])
    assert expected(habits, [SYSTEM, ASK, carrier], ANSWER) == ((SYSTEM, ASK, carrier, ANSWER), 0)


def test_a_carrier_that_no_rule_knows_is_learned() -> None:
    """By how it begins: the client's next one leaves too, a person's words stay."""
    asked = [SYSTEM, ASK, note("one")]
    assert expected(Habits(), asked, ANSWER)[1] == 0
    habits = seen(asked, ANSWER, [SYSTEM, ASK, ANSWER, MORE, note("two")])
    before = [SYSTEM, ASK, ANSWER, MORE]
    assert expected(habits, [*before, note("two")], ANSWER) == ((*before, ANSWER), 1)
    assert expected(habits, before, ANSWER) == ((*before, ANSWER), 0)


def test_a_carrier_that_begins_otherwise_each_time_is_known_by_its_place() -> None:
    """Behind a person's or a tool's words."""
    habits = seen([SYSTEM, ASK, say("user", "1: x")], ANSWER, [SYSTEM, ASK, ANSWER, MORE, say("user", "2: y")])
    before = [SYSTEM, ASK, ANSWER, MORE]
    assert expected(habits, [*before, say("user", "2: y")], ANSWER) == ((*before, ANSWER), 1)


def test_what_stays_after_all_is_not_expected_to_leave_again() -> None:
    """The newest sight counts."""
    habits = seen([SYSTEM, ASK, note("one")], ANSWER, [SYSTEM, ASK, ANSWER, MORE, note("two")])
    asked = [SYSTEM, ASK, ANSWER, MORE, note("two")]
    habits = seen(asked, ANSWER, [*asked, ANSWER, MORE], habits)
    assert expected(habits, [*asked, ANSWER, note("three")], ANSWER)[1] == 0


def test_words_that_are_glued_to_a_message_are_expected_to_go() -> None:
    """A reminder that every newest message ends with; where it ends otherwise nothing is known."""
    reminder = "\n\nAnswer in one line."
    glued = say("user", f"Look there.{reminder}")
    habits = seen([SYSTEM, glued], ANSWER, [SYSTEM, ASK, ANSWER, MORE])
    next_glued = say("user", f"And there?{reminder}")
    assert expected(habits, [SYSTEM, ASK, ANSWER, next_glued], ANSWER)[0] == (SYSTEM, ASK, ANSWER, MORE, ANSWER)
    assert history_after(habits, [SYSTEM, ASK, ANSWER, say("user", "Bare.")], ANSWER, is_synthetic) is None
    habits = seen([SYSTEM, ASK], ANSWER, [SYSTEM, ASK, ANSWER, MORE], habits)
    assert expected(habits, [SYSTEM, next_glued], ANSWER)[0] == (SYSTEM, next_glued, ANSWER)


def test_other_words_for_a_message_make_the_next_one_unknown() -> None:
    """Until a message comes back as it was."""
    habits = seen([SYSTEM, ASK], ANSWER, [SYSTEM, say("user", "Somewhere else."), ANSWER, MORE])
    assert history_after(habits, [SYSTEM, MORE], ANSWER, is_synthetic) is None
    result = Message("tool", (TextBlock("A tree."),))
    assert expected(habits, [SYSTEM, ASK, CALL, result], ANSWER)[0][-1] == ANSWER


@pytest.mark.parametrize(
    ("answer", "echo"),
    [
        (ANSWER, say("assistant", "A hill.")),
        (say("assistant", "\n\nA hill.\n"), say("assistant", "A hill.")),
        (CALL, Message("assistant", (ToolCallBlock("own1", "look", "{}"),))),
    ],
    ids=["thinking is stripped", "text is trimmed", "calls are renamed"],
)
def test_an_answer_is_expected_as_it_came_back(answer: Message, echo: Message) -> None:
    """The next answer of that kind too; an id that the client makes up cannot be known."""
    habits = seen([SYSTEM, ASK], answer, [SYSTEM, ASK, echo, MORE])
    assert habits.renames_calls == (answer is CALL)
    if not habits.renames_calls:
        assert echoed(habits, answer) == echo
    # an answer without any of it shows nothing
    plain = say("assistant", "Yes.")
    assert seen([SYSTEM, ASK], plain, [SYSTEM, ASK, plain, MORE], habits) == habits


def test_an_answer_that_did_not_come_back_shows_nothing() -> None:
    """Asked again, edited, or another conversation."""
    habits = seen([SYSTEM, ASK, note("one")], ANSWER, [SYSTEM, ASK, ANSWER, MORE])
    for now in ([SYSTEM, ASK, note("one")], [SYSTEM, MORE], [SYSTEM, ASK, say("assistant", "A lake."), MORE], []):
        assert seen([SYSTEM, ASK], ANSWER, now, habits) == habits


def test_what_is_known_stays_small() -> None:
    """Openings that were never seen again leave, the oldest first."""
    habits = Habits()
    for number in range(3 * MAX_OPENINGS):
        asked = [SYSTEM, ASK, say("user", f"{number} is new")]
        habits = seen(asked, ANSWER, [SYSTEM, ASK, ANSWER, MORE], habits)
    assert len(habits.leaves) == MAX_OPENINGS
    assert habits.leaves[-1] == (("user", f"{3 * MAX_OPENINGS - 1} is new"), True)
