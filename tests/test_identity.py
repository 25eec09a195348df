"""Which conversation a turn continues, and what it is given back of it: nobody's words reach another one's prompt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvserve.canonical.rules import DEFAULT_RULES, select
from kvserve.core import (
    Message,
    RequestId,
    Role,
    SamplingParams,
    SessionHint,
    TextBlock,
    ThinkingBlock,
    TokenSequence,
    ToolCallBlock,
    ToolResultBlock,
    Turn,
    Written,
)
from kvserve.identity.conversations import Conversations, RememberedTurn
from kvserve.identity.reading import RecognisedTurn
from kvserve.identity.recognise import IdentitySettings
from kvserve.sessions.archive import Archive
from kvserve.sessions.seen import pack_ids
from kvserve.sessions.stores import StoreLimits

SYSTEM = Message("system", (TextBlock("You are careful. " * 20),))


def said(role: Role, text: str) -> Message:
    return Message(role, (TextBlock(text),))


def asked(*messages: Message, session: str | None = "s", **hint: Any) -> Turn:
    """A request of a client that names its session; what others have to show is in test_provenance.py."""
    return Turn(RequestId("r"), "test", None, SamplingParams(), messages=messages, session=SessionHint(session, **hint))


def answered(
    conversations: Conversations, turn: Turn, answer: Message | None, ids: tuple[int, ...] = (7, 8)
) -> RecognisedTurn:
    """Read a turn, and remember it with this answer (None: the client left before there was one)."""
    reading = conversations.read(turn)
    written = Written(answer, (5,), ids, opens_reasoning=False) if answer is not None else None
    prompt = TokenSequence(tuple(range(100)))
    packed = pack_ids(prompt.ids)
    conversations.remember(reading, RememberedTurn(turn.request_id, turn.session, prompt, (), {}, written, packed))
    return reading


class Restarting(Conversations):
    """A server that is started anew before every request: it knows what the one before left on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        super().__init__(IdentitySettings(DEFAULT_RULES), self._archive())

    def read(self, turn: Turn) -> RecognisedTurn:
        self.close()
        super().__init__(IdentitySettings(DEFAULT_RULES), self._archive())
        return super().read(turn)

    def _archive(self) -> Archive:
        return Archive(self._folder, max_bytes=1 << 30, report=pytest.fail)


@pytest.fixture(params=["one life", "many lives"])
def conversations(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Conversations]:
    if request.param == "one life":
        yield Conversations(IdentitySettings(DEFAULT_RULES))
    else:
        restarting = Restarting(tmp_path)
        yield restarting
        restarting.close()


def test_an_answer_gets_its_thinking_and_tokens_back(conversations: Conversations) -> None:
    """Echoed without thinking, an answer is what the model wrote; its emitted ids come with it."""
    wrote = Message("assistant", (ThinkingBlock("Hm."), TextBlock("Done.")))
    answered(conversations, asked(SYSTEM, said("user", "Do it.")), wrote)
    reading = conversations.read(
        asked(SYSTEM, said("user", "Do it."), said("assistant", "Done."), said("user", "And?"))
    )
    assert reading.messages[2] == wrote
    assert [written.ids for written in reading.written_messages if written] == [(7, 8)]
    assert (
        "thinking" in reading.effects.replayed and reading.num_known_messages == 3 and not reading.effects.num_rejected
    )


def test_the_same_words_in_two_conversations_never_swap_their_thinking(conversations: Conversations) -> None:
    """ "Done." after two different questions has two different thoughts."""
    for word in ("one", "two"):
        wrote = Message("assistant", (ThinkingBlock(f"Thinking of {word}."), TextBlock("Done.")))
        answered(conversations, asked(SYSTEM, said("user", word)), wrote)
    for word in ("one", "two"):
        reading = conversations.read(asked(SYSTEM, said("user", word), said("assistant", "Done."), said("user", "?")))
        assert reading.messages[2].blocks[0] == ThinkingBlock(f"Thinking of {word}.")


def test_two_answers_to_one_question_are_not_guessed_between(conversations: Conversations) -> None:
    """The same words with two different thoughts: nobody knows which of them is meant, so nothing is put back."""
    for thought in ("This.", "That."):
        wrote = Message("assistant", (ThinkingBlock(thought), TextBlock("Done.")))
        answered(conversations, asked(SYSTEM, said("user", "Do it.")), wrote)
    reading = conversations.read(asked(SYSTEM, said("user", "Do it."), said("assistant", "Done."), said("user", "?")))
    assert reading.messages[2] == said("assistant", "Done.") and reading.written_messages == (None,)


def test_thinking_comes_back_when_its_path_was_evicted(conversations: Conversations) -> None:
    """What the model wrote outlives the messages around it: an echo of it is restored, its tokens come with it."""
    wrote = Message("assistant", (ThinkingBlock("Hm."), TextBlock("Done.")))
    answered(conversations, asked(SYSTEM, said("user", "Do it.")), wrote)
    conversations._stores.turns.shrink(0.0)
    reading = conversations.read(asked(SYSTEM, said("user", "Do it."), said("assistant", "Done."), said("user", "?")))
    assert reading.num_known_messages == 0 and reading.messages[2] == wrote
    assert [written.ids for written in reading.written_messages if written] == [(7, 8)]


def test_two_answers_whose_paths_were_evicted_restore_nothing(conversations: Conversations) -> None:
    """That there were two is remembered as long as what they said."""
    for thought in ("This.", "That."):
        wrote = Message("assistant", (ThinkingBlock(thought), TextBlock("Done.")))
        answered(conversations, asked(SYSTEM, said("user", "Do it.")), wrote)
    conversations._stores.turns.shrink(0.0)
    reading = conversations.read(asked(SYSTEM, said("user", "Do it."), said("assistant", "Done."), said("user", "?")))
    assert reading.messages[2] == said("assistant", "Done.") and reading.written_messages == (None,)


def test_other_thinking_is_rendered_as_sent(conversations: Conversations) -> None:
    """A client that sends thinking of its own means it."""
    wrote = Message("assistant", (ThinkingBlock("Hm."), TextBlock("Done.")))
    answered(conversations, asked(SYSTEM, said("user", "Do it.")), wrote)
    other = Message("assistant", (ThinkingBlock("Oh."), TextBlock("Done.")))
    reading = conversations.read(asked(SYSTEM, said("user", "Do it."), other, said("user", "And?")))
    assert reading.messages[2] == other


def test_a_senders_name_never_reaches_another_chat(conversations: Conversations) -> None:
    """Two chats begin with the same words from two senders; stripped of its block, neither gets the other's."""

    def greeting(sender: str) -> Message:
        block = 'Conversation info (untrusted metadata):\n```json\n{\n  "sender": "SENDER"\n}\n```\n\nhi'
        return said("user", block.replace("SENDER", sender))

    hello = said("assistant", "Hello! It is good to hear from you again, what shall we do? " * 7)
    for sender in ("Ann", "Bob"):
        answered(conversations, asked(SYSTEM, greeting(sender), session=None), hello)
    reading = conversations.read(asked(SYSTEM, said("user", "hi"), hello, said("user", "Who am I?"), session=None))
    assert reading.messages[1] == said("user", "hi")


def test_a_block_that_the_client_takes_off_is_put_back(conversations: Conversations) -> None:
    """The control: with one sender only, the stripped message is rendered as the model read it."""
    block = said("user", 'Conversation info (untrusted metadata):\n```json\n{\n  "sender": "Ann"\n}\n```\n\nhi')
    hello = said("assistant", "Hello! It is good to hear from you again, what shall we do? " * 7)
    answered(conversations, asked(SYSTEM, block, session=None), hello)
    reading = conversations.read(asked(SYSTEM, said("user", "hi"), hello, said("user", "Who am I?"), session=None))
    assert reading.messages[1] == block and reading.effects.replayed == {"conversation_info"}


def test_two_clients_under_one_session_id_do_not_mix(conversations: Conversations) -> None:
    """Content decides: each goes on from its own messages, and the branches have no parent in common."""
    for name in ("ann", "bob"):
        answered(conversations, asked(said("user", name), session="s"), said("assistant", f"Hello {name}."))
    for name in ("ann", "bob"):
        turn = asked(said("user", name), said("assistant", f"Hello {name}."), said("user", "Go on."), session="s")
        assert conversations.read(turn).num_known_messages == 2
    assert (conversations.totals().num_sessions, conversations.totals().num_branches) == (1, 2)


def test_sub_agents_never_move_their_parents_record(conversations: Conversations) -> None:
    """Interleaved with two helpers that share its beginning, the parent goes on where it was."""
    history: list[Message] = [SYSTEM, said("user", "Plan.")]
    for turn in range(3):
        answer = Message("assistant", (ThinkingBlock(f"Thought {turn}."), TextBlock(f"Step {turn}.")))
        reading = answered(conversations, asked(*history, session="s"), answer, ids=(turn, turn))
        assert reading.num_known_messages == (len(history) - 1 if turn else 0)
        for helper in ("left", "right"):
            answered(
                conversations, asked(SYSTEM, said("user", f"{helper} {turn}"), session="s"), said("assistant", "ok")
            )
        history += [said("assistant", f"Step {turn}."), said("user", f"Then {turn}?")]
    reading = conversations.read(asked(*history, session="s"))
    assert [written.ids for written in reading.written_messages if written] == [(0, 0), (1, 1), (2, 2)]


def test_a_rewound_conversation_and_its_return(conversations: Conversations) -> None:
    """Back to the first turn with other words, then on with the old ones: both are known up to where they part."""
    first = [SYSTEM, said("user", "Begin."), said("assistant", "One."), said("user", "Two?")]
    answered(conversations, asked(*first[:2]), first[2])
    answered(conversations, asked(*first), said("assistant", "Two."))
    rewound = [*first[:3], said("user", "Three?")]
    assert conversations.read(asked(*rewound)).num_known_messages == 3
    answered(conversations, asked(*rewound), said("assistant", "Three."))
    assert conversations.read(asked(*first, said("assistant", "Two."), said("user", "Go on."))).num_known_messages == 5


def test_an_aborted_turn_that_is_sent_again(conversations: Conversations) -> None:
    """What was read stays known; what was not answered leaves no answer."""
    turn = asked(SYSTEM, said("user", "Begin."))
    answered(conversations, turn, None)
    again = answered(conversations, turn, said("assistant", "One."))
    assert again.num_known_messages == 2 and again.before is not None
    reading = conversations.read(asked(SYSTEM, said("user", "Begin."), said("assistant", "One."), said("user", "Two?")))
    assert reading.num_known_messages == 3


def test_partitions_keep_records_apart() -> None:
    """With partitioning, another session's record is not looked at; without it, content alone decides."""
    for is_partitioned, num_known in ((True, 0), (False, 2)):
        conversations = Conversations(IdentitySettings(DEFAULT_RULES, is_partitioned=is_partitioned))
        answered(conversations, asked(SYSTEM, said("user", "x"), session="a"), None)
        assert conversations.read(asked(SYSTEM, said("user", "x"), session="b")).num_known_messages == num_known


def test_cache_mode_prefix_puts_nothing_back(conversations: Conversations) -> None:
    """Only the verified prefix is wanted: messages are rendered as sent."""
    wrote = Message("assistant", (ThinkingBlock("Hm."), TextBlock("Done.")))
    answered(conversations, asked(SYSTEM, said("user", "Do it.")), wrote)
    messages = (SYSTEM, said("user", "Do it."), said("assistant", "Done."), said("user", "And?"))
    reading = conversations.read(asked(*messages, cache_mode="prefix"))
    assert reading.messages == messages and reading.written_messages == (None,) and not reading.num_known_messages


def test_switched_off_rules_put_nothing_back() -> None:
    """CACHE_CANONICALIZE_TOOL_CONTEXT=false: the key is what was sent, so lost thinking is another conversation."""
    conversations = Conversations(IdentitySettings(select({}, enabled=False)))
    wrote = Message("assistant", (ThinkingBlock("Hm."), TextBlock("Done.")))
    answered(conversations, asked(SYSTEM, said("user", "Do it.")), wrote)
    reading = conversations.read(
        asked(SYSTEM, said("user", "Do it."), said("assistant", "Done."), said("user", "And?"))
    )
    assert reading.messages[2] == said("assistant", "Done.") and reading.num_known_messages == 2


def test_a_key_that_lost_too_much_is_given_up() -> None:
    """CACHE_NORM_SAFETY_CHECK: more than a tenth of the prompt normalised away, the prompt itself is the key."""
    message = said("user", "Current time is" + " very late" * 60 + "\nhi")
    for checks, num_notes in ((True, 1), (False, 0)):
        conversations = Conversations(IdentitySettings(DEFAULT_RULES, checks_shortening=checks))
        reading = conversations.read(asked(message))
        assert len(reading.notes) == num_notes and bool(reading.effects.fired) is not checks


def test_write_contents_become_digests_and_stay_so() -> None:
    """NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT: what is rendered has no contents, and replay brings none back."""
    conversations = Conversations(IdentitySettings(DEFAULT_RULES, digests_writes=True))
    call = ToolCallBlock("c", "write", '{"path": "a", "content": "SECRET LINES"}')
    wrote = Message("assistant", (ThinkingBlock("Hm."), call))
    answered(conversations, asked(SYSTEM, said("user", "Write.")), wrote)
    result = Message("tool", (ToolResultBlock("c", (TextBlock("ok"),)),))
    history = (SYSTEM, said("user", "Write."), Message("assistant", (call,)), result)
    for _ in range(3):
        reading = answered(conversations, asked(*history), said("assistant", "Written."))
        assert "SECRET" not in repr(reading.rendered) and "sha256" in repr(reading.rendered)
        assert reading.rendered[2].blocks[0] == ThinkingBlock("Hm.") and not reading.effects.num_rejected


def test_what_was_put_back_beside_an_edit_is_put_back_again(conversations: Conversations) -> None:
    """A reminder that is gone from history comes back in each later request, also below a message that was edited."""
    reminder = "<system-reminder>\nThe to-do list is empty.\n</system-reminder>\n"
    rules = "<system-reminder>\nContents of /p/RULES.md (project):\n\nAnswer {}.\n</system-reminder>\n"
    reminded = Message("user", (TextBlock(reminder), TextBlock("Go on.")))
    done, plain, more = said("assistant", "Done."), said("user", "Go on."), said("user", "And?")

    def first(how: str) -> Message:
        return Message("user", (TextBlock(rules.format(how)), TextBlock("Begin.")))

    answered(conversations, asked(SYSTEM, first("in English"), done, reminded), said("assistant", "Yes."))
    talk = [SYSTEM, first("briefly"), done, plain, said("assistant", "Yes."), more]
    for number in range(3):
        reading = answered(conversations, asked(*talk), said("assistant", f"Part {number}."))
        assert reading.messages[1] == first("briefly") and reading.messages[3] == reminded
        talk += [said("assistant", f"Part {number}."), more]


def test_messages_are_remembered_within_the_setting() -> None:
    """What the records' bytes leave to them, however many are sent; without the setting far more would be."""
    limits = StoreLimits(max_bytes=2**20)
    few, many = (Conversations(IdentitySettings(DEFAULT_RULES, limits=each)) for each in (limits, StoreLimits()))
    for number in range(200):
        for conversations in (few, many):
            answered(
                conversations, asked(SYSTEM, said("user", f"{number} " * 500)), said("assistant", f"Yes {number}.")
            )
    assert 0 < few._familiar.num_bytes <= limits.familiar_bytes < many._familiar.num_bytes
