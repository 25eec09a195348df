"""Laws of identity and truth together: what is known canonically is the model's own prefix, and nothing else is.

Conversations of any length with spans of every kind; the last request may leave spans out, move them, or edit. What it
should read is said by the table of the tests (`may_be_as_seen`), tokens come from a real template and tokenizer.
"""

from dataclasses import dataclass
from itertools import product, takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.canonical.canonicalise import canonicalise
from kvserve.canonical.rules import DEFAULT_RULES
from kvserve.core import (
    Message,
    RequestId,
    SamplingParams,
    SessionHint,
    TextBlock,
    ThinkingBlock,
    TokenSequence,
    Turn,
)
from kvserve.identity.conversations import Conversations, RememberedTurn
from kvserve.identity.reading import RecognisedTurn
from kvserve.identity.recognise import IdentitySettings
from kvserve.sessions.seen import pack_ids
from tests.canonical.versions import Version, echoes, may_be_as_seen, user, versions
from tests.laws import num_examples
from tests.prompt.turns import Talk, family, in_odd_tokens, num_common

FAMILY = "qwen3_5"
"""Its template keeps past thinking, so it writes history as it wrote it before."""

SYSTEM = Message("system", (TextBlock("You are careful."),))
TURNS = st.lists(echoes() | versions(), min_size=1, max_size=3)
"""Of each turn what the client sends of it now, and what it sent when the turn was new."""


@dataclass(frozen=True)
class Played:
    """A conversation that was led with the words as they were first sent, and a request with what they are now."""

    seen: tuple[Message, ...]
    seen_ids: tuple[int, ...]
    sent: tuple[Message, ...]
    reading: RecognisedTurn
    read_ids: tuple[int, ...]
    starts: tuple[int, ...]


def asked(messages: list[Message]) -> Turn:
    return Turn(RequestId("r"), "test", None, SamplingParams(), messages=tuple(messages), session=SessionHint("s"))


def stripped(message: Message) -> Message:
    """As a client echoes an answer that shows no thinking."""
    return Message(message.role, tuple(block for block in message.blocks if not isinstance(block, ThinkingBlock)))


def play(turns: list[tuple[Version, Version]]) -> Played:
    """The conversation, its last request, and that request's tokens beside those for the words first sent."""
    conversations = Conversations(IdentitySettings(DEFAULT_RULES))
    talk = Talk(family(FAMILY), tools=())
    talk.messages.append(SYSTEM)
    sent = [SYSTEM]
    for number, (_, first) in enumerate(turns):
        talk.messages.append(first.message())
        reading = conversations.read(asked([*map(stripped, talk.messages)]))
        assert reading.messages == tuple(talk.messages), "a history that did not move is read as it was"
        prompt = talk.stitched()
        talk.answer(in_odd_tokens(talk.family.tokenizer, f"Thought {number}.\n</think>\n\nAnswer {number}."))
        name, ids, written = RequestId(f"r{number}"), TokenSequence(prompt.ids), talk.writings[-1]
        packed = pack_ids(prompt.ids)
        exchanged = RememberedTurn(name, SessionHint("s"), ids, prompt.message_starts, {}, written, packed)
        conversations.remember(reading, exchanged)
    for (now, _), answer in zip(turns, [m for m in talk.messages if m.role == "assistant"], strict=True):
        sent += [now.message(), stripped(answer)]
    sent.append(user("And now?"))
    talk.say("And now?")
    seen, seen_ids = tuple(talk.messages), talk.stitched().ids
    reading = conversations.read(asked(sent))
    talk.messages, talk.writings = list(reading.messages), list(reading.written_messages)
    read = talk.stitched()
    return Played(seen, seen_ids, tuple(sent), reading, read.ids, tuple(start.offset for start in read.message_starts))


def is_as_seen(now: Version, first: Version) -> bool:
    """Whether a past message must be read as it was: nothing moved in it but what its rules' policies put back."""
    return [line for line in now.lines if isinstance(line, str)] == [
        line for line in first.lines if isinstance(line, str)
    ] and all(
        mine.text() == theirs.text() or may_be_as_seen(mine, theirs, True)
        for mine, theirs in zip(now.slots(), first.slots(), strict=True)
    )


@given(TURNS)
@settings(max_examples=num_examples(30), deadline=None)
def test_the_canonical_prefix_is_the_models_own(turns: list[tuple[Version, Version]]) -> None:
    """Up to where the canonical histories part every message has the identity of what was sent and, unless a policy
    renders it as sent, the very tokens that the model saw; nothing behind it is anything but what was sent."""
    played = play(turns)
    num_known = played.reading.num_known_messages
    same = [canonicalise(a).digest == canonicalise(b).digest for a, b in zip(played.sent, played.seen, strict=True)]
    parting = len(list(takewhile(bool, same[:-1])))  # the newest message was read by nobody
    assert num_known == parting
    for read, sent in zip(played.reading.messages, played.sent, strict=True):
        assert canonicalise(read).digest == canonicalise(sent).digest
    assert played.reading.messages[num_known + 1 :] == played.sent[num_known + 1 :]
    assert played.reading.effects.num_rejected == 0
    pairs = zip(played.reading.messages, played.seen, strict=True)
    num_equal = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if num_equal == len(played.seen):
        assert played.read_ids == played.seen_ids
    else:
        common = num_common(played.read_ids, played.seen_ids)
        assert played.starts[num_equal] <= common < len(played.read_ids)


@given(TURNS)
@settings(max_examples=num_examples(30), deadline=None)
def test_the_model_reads_what_was_sent_or_what_a_policy_puts_back(turns: list[tuple[Version, Version]]) -> None:
    """A clock, an edit or an added reminder in history is read as it is now, whatever is known of the conversation."""
    read = play(turns).reading.messages[1::2]
    for message, (now, first) in zip(read, turns, strict=False):
        said = [
            [mine.text(), theirs.text()] if may_be_as_seen(mine, theirs, True) else [mine.text()]
            for mine, theirs in zip(now.slots(), first.slots(), strict=True)
        ]
        assert message in [now.message(list(texts)) for texts in product(*said)]


@given(TURNS)
@settings(max_examples=num_examples(30), deadline=None)
def test_what_nobody_edited_costs_no_token(turns: list[tuple[Version, Version]]) -> None:
    """As many messages from the beginning are read as they were as the policies promise, thinking included."""
    played = play(turns)
    num_kept = len(list(takewhile(lambda pair: is_as_seen(*pair), turns)))
    end = 1 + 2 * num_kept
    assert played.reading.messages[:end] == played.seen[:end]
    assert num_common(played.read_ids, played.seen_ids) >= played.starts[end]
