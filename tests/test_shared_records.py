"""Records of conversations between servers: another one reads a conversation as the first would have, and nobody's
words reach another's prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.remote_forgetting import clear, is_record_of, remove
from kvserve.cache.remote_keys import RecordKeys
from kvserve.canonical.canonicalise import canonicalise
from kvserve.canonical.rules import DEFAULT_RULES
from kvserve.core import (
    Message,
    Principal,
    SessionHint,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolSpec,
    Turn,
    Written,
)
from kvserve.core.keeping import Scope
from kvserve.identity.conversations import Conversations
from kvserve.identity.owner import AGENT_SESSION
from kvserve.identity.reading import RecognisedTurn
from kvserve.identity.recognise import IdentitySettings
from kvserve.identity.shared_records import SharedRecords
from kvserve.remote.shared_rows import SharedRows
from kvserve.remote.shared_server import SharedServer, Task
from kvserve.sessions.shared_row import SharedRow, packed, secret_key
from kvserve.sessions.tool_layouts import AddedTools, ToolLayout
from tests.canonical.versions import Version, echoes, versions
from tests.laws import num_examples
from tests.remote.fake_redis import FakeRedis
from tests.test_identity import SYSTEM, answered, asked, said

SECRET = secret_key("the secret of these servers")


class AtOnce(SharedServer):
    """A shared server without threads: what is asked is done at once."""

    def ask(self, task: Task) -> None:
        for _ in task.steps:
            pass
        task.end()


@dataclass
class Site:
    """One server's conversations, and its part of the shared cache."""

    redis: FakeRedis
    secret: bytes = SECRET
    fingerprint: str = "a model"
    settings: IdentitySettings = IdentitySettings(DEFAULT_RULES)
    readable: set[int] = field(default_factory=lambda: set(range(100)))

    def __post_init__(self) -> None:
        server = AtOnce("redis://fake", self.redis.link, lambda _: None)
        server.breaker.succeeded()
        self.rows = SharedRows(server, 3600)
        self.conversations = Conversations(self.settings, awaits_archive=True)
        keys = RecordKeys.of(self.fingerprint, self.secret)
        self.shared = self.conversations.shared = SharedRecords(self.rows, keys, self.secret)

    def answer(self, turn: Turn, answer: Message | None, ids: tuple[int, ...] = (7, 8)) -> RecognisedTurn:
        """A turn that the model answered, and that was sent."""
        self.read(turn)
        reading = answered(self.conversations, turn, answer, ids)
        self.send()
        return reading

    def send(self) -> None:
        while (task := self.rows.next_put()) is not None:
            assert not any(task.steps)

    def read(self, turn: Turn) -> RecognisedTurn:
        def is_readable(written: Written) -> bool:
            return self.readable >= {*written.ids, *written.prefix_ids}

        return self.conversations.bring(turn, is_readable)


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis()


def thought(text: str, thinking: str, *calls: str) -> Message:
    blocks = [ToolCallBlock(f"id{number}", "look", arguments) for number, arguments in enumerate(calls)]
    return Message("assistant", (ThinkingBlock(thinking), TextBlock(text), *blocks))


WROTE = thought("Done.", "Hm.", '{"b":  1, "a": 2}')
ECHO = Message("assistant", (TextBlock("Done."), ToolCallBlock("another", "look", '{"a":2,"b":1}')))
DO_IT, AND = said("user", "Do it."), said("user", "And?")


def is_known(reading: RecognisedTurn) -> bool:
    """Whether the answer to the first question is what the model wrote, but for the id of its call."""
    return reading.messages[2].blocks[0] == ThinkingBlock("Hm.") and reading.written_messages[0] is not None


def test_another_server_reads_what_the_first_would_have_read(redis: FakeRedis) -> None:
    """An answer without its thinking, and with its call written anew, is what the model wrote, with its ids."""
    one, other = Site(redis), Site(redis)
    one.answer(asked(SYSTEM, DO_IT), WROTE)
    again = asked(SYSTEM, DO_IT, ECHO, AND)
    there, here = other.read(again), one.read(again)
    assert is_known(there) and there.messages == here.messages and there.written_messages == here.written_messages
    assert there.num_known_messages == here.num_known_messages == 3
    totals = other.shared.totals()
    assert (totals.num_conversations, totals.num_messages, totals.num_refused, totals.num_reads) == (1, 3, 0, 1)


def test_what_was_brought_is_known_here_from_then_on(redis: FakeRedis) -> None:
    """It is not read again, outlives the shared cache, and goes on there with what was said here."""
    one, other, third = Site(redis), Site(redis), Site(redis)
    one.answer(asked(SYSTEM, DO_IT), WROTE)
    other.answer(asked(SYSTEM, DO_IT, ECHO, AND), thought("More.", "Ah."))
    more = [SYSTEM, DO_IT, ECHO, AND, said("assistant", "More."), said("user", "On.")]
    assert third.read(asked(*more)).messages[4] == thought("More.", "Ah.")
    assert one.read(asked(*more)).messages[4] == thought("More.", "Ah."), "only what is behind is read"
    redis.values.clear()
    assert is_known(other.read(asked(*more)))
    assert [site.shared.totals().num_reads for site in (one, other, third)] == [1, 1, 1]


def test_what_is_new_here_is_not_asked_for(redis: FakeRedis) -> None:
    """No answer in it, or the last one known here: no request waits."""
    one = Site(redis)
    one.answer(asked(SYSTEM, DO_IT), WROTE)
    one.answer(asked(SYSTEM, DO_IT, ECHO, AND), thought("More.", "Ah."))
    assert one.shared.totals().num_reads == 0


def test_only_a_request_that_is_served_asks_for_it(redis: FakeRedis) -> None:
    """Counting a prompt, looking at one and guessing one do not."""
    one, other = Site(redis), Site(redis)
    one.answer(asked(SYSTEM, DO_IT), WROTE)
    again = asked(SYSTEM, DO_IT, ECHO, AND)
    assert not is_known(other.conversations.read(again)) and other.shared.totals().num_reads == 0


def test_tools_stand_where_the_first_server_had_them(redis: FakeRedis) -> None:
    """Those that came in later stand where they came, all in the order in which they were read, whatever is sent."""
    one, other, alone = Site(redis), Site(redis), Site(FakeRedis())
    x, y, z = (ToolSpec(name, None, {}) for name in "xyz")
    more, last = [SYSTEM, DO_IT, ECHO, AND], [said("assistant", "More."), said("user", "On.")]
    one.answer(replace(asked(SYSTEM, DO_IT), tools=(x, y)), WROTE)
    one.answer(replace(asked(*more), tools=(x, y, z)), said("assistant", "More."))
    again = replace(asked(*more, *last), tools=(z, y, x))
    there, here, elsewhere = (site.read(again) for site in (other, one, alone))
    assert (there.tools, there.later) == (here.tools, here.later) == ((x, y), (z,))
    assert there.rendered == here.rendered and elsewhere.tools == (z, y, x)


@pytest.mark.parametrize(
    "turn",
    [
        asked(SYSTEM, DO_IT, ECHO, AND, session="another"),
        asked(SYSTEM, DO_IT, ECHO, AND, principal=Principal("key", "user")),
        asked(SYSTEM, DO_IT, ECHO, AND, session=None),
        asked(SYSTEM, DO_IT, ECHO, AND, is_shared_id=True),
        asked(SYSTEM, DO_IT, ECHO, AND, ttl_seconds=0.0),
        asked(SYSTEM, DO_IT, ECHO, AND, cache_mode="prefix"),
        asked(SYSTEM, said("user", "Do that."), ECHO, AND),
        asked(SYSTEM, DO_IT, said("assistant", "Done!"), AND),
    ],
)
def test_nobody_elses_is_brought(turn: Turn, redis: FakeRedis) -> None:
    """Nor to who wants nothing kept, nor what was said after other words."""
    one, other = Site(redis), Site(redis)
    one.answer(asked(SYSTEM, DO_IT), WROTE)
    reading = other.read(turn)
    assert reading.messages == turn.messages and not any(reading.written_messages)
    assert other.shared.totals().num_reads == 0 or not turn.session.leaves_no_record


@pytest.mark.parametrize(
    "hint",
    [
        {"session": None},
        {"is_shared_id": True},
        {"ttl_seconds": 0.0},
        {"cache_mode": "prefix"},
        {"session": f"{AGENT_SESSION}its-name"},
    ],
)
def test_what_is_not_one_clients_own_is_not_sent(hint: Mapping[str, Any], redis: FakeRedis) -> None:
    """Nor an agent's, which stays with its history, nor what is not to be kept."""
    one = Site(redis)
    one.answer(asked(SYSTEM, DO_IT, **hint), WROTE)
    assert redis.keys() == []
    one.answer(asked(SYSTEM, DO_IT), WROTE)
    assert len(redis.keys("r")) == 3


@pytest.mark.parametrize(
    "other", [{"secret": secret_key("another secret")}, {"fingerprint": "another model"}, {"readable": {5, 7}}]
)
def test_servers_that_differ_share_nothing(other: Mapping[str, Any], redis: FakeRedis) -> None:
    """Another secret, another model; tokens that this one does not have."""
    one, differing = Site(redis), Site(redis, **other)
    one.answer(asked(SYSTEM, DO_IT), WROTE)
    assert not is_known(differing.read(asked(SYSTEM, DO_IT, ECHO, AND)))
    assert differing.rows.server.faults() == {}


def written(message: Message) -> Written:
    return Written(message, (5,), (7, 8), opens_reasoning=False)


CHAINS = tuple(bytes([number]) * 32 for number in range(9))
AT_AN_ANSWER = ToolLayout((CHAINS[0],), (AddedTools(CHAINS[2], (CHAINS[1],)),))


@pytest.mark.parametrize(
    ("index", "row"),
    [
        (1, SharedRow(CHAINS[0], said("user", "Do another thing."))),
        (1, SharedRow(CHAINS[0], said("assistant", "Do it."))),
        (1, SharedRow(CHAINS[0], None, written(said("assistant", "Do it.")))),
        (2, SharedRow(CHAINS[0], None, written(thought("Done and gone.", "Hm.", '{"a":2,"b":1}')))),
        (2, SharedRow(CHAINS[0], None, written(thought("Done.", "Hm.", '{"a":2,"b":2}')))),
        (2, SharedRow(CHAINS[0], None, written(thought("Done.", "Hm.")))),
        (2, SharedRow(CHAINS[0], thought("Gone.", "Hm.", '{"a":2,"b":1}'), written(WROTE))),
        (2, SharedRow(CHAINS[0], WROTE, written(thought("Gone.", "Hm.", '{"a":2,"b":1}')))),
        (2, SharedRow(CHAINS[0], None, written(WROTE), (AT_AN_ANSWER,))),
    ],
)
def test_what_is_signed_and_says_something_else_is_refused(index: int, row: SharedRow, redis: FakeRedis) -> None:
    """As a faulty server, or one with other rules, may do: what the client sends is read."""
    one, other = Site(redis), Site(redis)
    one.answer(asked(SYSTEM, DO_IT), WROTE)
    sent = asked(SYSTEM, DO_IT, ECHO, AND)
    key = row_keys(one, sent)[index]
    if row.layouts:
        place = replace(AT_AN_ANSWER.added[0], place=bytes.fromhex(key.split(":")[-1]))
        row = replace(row, layouts=(replace(AT_AN_ANSWER, added=(place,)),))
    redis.values[key] = {row.field: packed(row, SECRET, key)}
    reading = other.read(sent)
    assert reading.messages == sent.messages and not any(reading.written_messages)
    assert other.shared.totals().num_refused == 1 and other.rows.server.faults() == {}


def test_words_that_nobody_has_to_keep_are_in_no_row(redis: FakeRedis) -> None:
    """What every client sends again, and no rule touches, is not there."""
    one = Site(redis)
    one.answer(asked(SYSTEM, said("user", "A question of mine.")), WROTE)
    bodies = [body for key in redis.keys("r") for body in redis.values[key].values()]
    assert len(bodies) == 3 and not any(b"careful" in body or b"question" in body for body in bodies)
    assert any(b"Hm." in body for body in bodies)


def test_two_servers_that_wrote_different_things_are_not_guessed_between(redis: FakeRedis) -> None:
    """The same words with other thinking: whichever the client was given, neither comes back."""
    for thinking in ("Hm.", "Ah."):
        Site(redis).answer(asked(SYSTEM, DO_IT), thought("Done.", thinking))
    sent = asked(SYSTEM, DO_IT, said("assistant", "Done."), AND)
    assert Site(redis).read(sent).messages == sent.messages
    assert [len(redis.values[key]) for key in redis.keys("r")].count(2) == 1


def test_what_who_has_not_heard_yet_sends_of_the_forgotten_is_not_taken_in(redis: FakeRedis) -> None:
    """One server has forgotten a session, another one ends a turn of it before it hears."""
    unaware, aware = Site(redis), Site(redis)
    turn = asked(SYSTEM, DO_IT, ECHO, AND)
    unaware.answer(asked(SYSTEM, DO_IT), WROTE)
    assert is_known(aware.read(turn))
    remove(aware.rows.server.puts_link, Scope("s"))
    aware.rows.drop(lambda key: is_record_of(key, Scope("s")))
    aware.conversations.forget(session="s")
    unaware.answer(turn, said("assistant", "More."))
    assert redis.keys("r") and not is_known(aware.read(turn))
    remove(unaware.rows.server.puts_link, Scope("s"))
    assert not is_known(aware.conversations.read(turn)) and redis.keys("r") == []


def test_whoever_is_forgotten_is_in_no_row(redis: FakeRedis) -> None:
    """By session, by principal, by both; what waits to be sent neither."""
    users = {"one": Principal("k", "one"), "other": Principal("k", "other")}
    for scope, left in (
        (Scope(session="s"), 1),
        (Scope(principal=str(users["one"])), 2),
        (Scope("s", str(users["one"])), 3),
        (Scope("nobody's"), 4),
    ):
        one = Site(redis)
        for user in users.values():
            for session in ("s", "t"):
                if (user, session) != (users["other"], "t") or left > 1:
                    one.answer(asked(SYSTEM, DO_IT, session=session, principal=user), WROTE)
        remove(one.rows.server.puts_link, scope)
        assert len(redis.keys("r")) == 3 * left, scope
        clear(one.rows.server.puts_link, RecordKeys.of("a model", SECRET).space)
        assert redis.keys() == []


# --- laws ------------------------------------------------------------------------------------------------------------

FAULTS = ("kept", "gone", "flipped", "cut", "another place's", "another session's", "wrong type")
TURNS = st.lists(st.tuples(echoes() | versions(), st.sampled_from(["", "Hm.", "Ah, <b>."])), min_size=1, max_size=4)


def led(site: Site, turns: Sequence[tuple[tuple[Version, Version], str]], session: str) -> Turn:
    """A conversation as it was first said; and its next request, with the words as they are now."""
    history = [SYSTEM]
    for number, ((_, first), thinking) in enumerate(turns):
        wrote = thought(f"Answer {number} ", thinking, f'{{"n":  {number}, "a": 1}}')
        wrote = wrote if thinking else replace(wrote, blocks=wrote.blocks[1:])
        site.answer(asked(*history, first.message(), session=session), wrote, (10 + number, 8))
        echo = (TextBlock(f"Answer {number}"), ToolCallBlock("x", "look", f'{{"a": 1, "n": {number}}}'))
        history += [first.message(), Message("assistant", echo)]
    for number, ((now, _), _) in enumerate(turns):
        history[1 + 2 * number] = now.message()
    return asked(*history, AND, session=session)


def alter(redis: FakeRedis, key: str, other: str, fault: str, place: int) -> None:
    """Do to a row what the fault says; `other` is the same place of another session."""
    fields = redis.values[key]
    [(name, body)] = fields.items()
    if fault == "gone":
        del redis.values[key]
    elif fault == "flipped":
        at = place % len(body)
        fields[name] = body[:at] + bytes([body[at] ^ (1 << place % 8)]) + body[at + 1 :]
    elif fault == "cut":
        fields[name] = body[: place % len(body)]
    elif fault == "another place's":
        keys = [each for each in redis.keys("r") if each != key]
        redis.values[key] = dict(redis.values[keys[place % len(keys)]])
    elif fault == "another session's":
        redis.values[key] = dict(redis.values[other])
    elif fault == "wrong type":
        redis.values[key] = body


def row_keys(site: Site, turn: Turn) -> list[str]:
    identity = site.conversations.read(turn).identity
    key = RecordKeys.of("a model", SECRET).session(str(identity.owner.principal), identity.owner.session or "")
    return [key(place) for place in identity.chains[:-1]]


@settings(max_examples=num_examples(40), deadline=None)
@given(TURNS, st.data())
def test_a_prompt_is_the_first_servers_up_to_the_first_altered_row(
    turns: list[tuple[tuple[Version, Version], str]], data: st.DataObject
) -> None:
    """Behind it every message is as it was sent, so nothing is hidden, added or altered; where no row is altered the
    whole prompt is the first server's."""
    redis = FakeRedis()
    one, other, alone = Site(redis), Site(redis), Site(FakeRedis())
    turn = led(one, turns, "s")
    led(Site(redis), turns, "t")
    mine, theirs = row_keys(one, turn), row_keys(one, replace(turn, session=SessionHint("t")))
    first = data.draw(st.integers(0, len(mine)))
    fault = data.draw(st.sampled_from(FAULTS[1:]))
    faults = ["kept"] * first + [fault] * (len(mine) - first)
    if data.draw(st.booleans()):
        faults[first + 1 :] = [data.draw(st.sampled_from(FAULTS)) for _ in faults[first + 1 :]]
    there = [key in redis.values for key in mine]
    for key, copy, fault in zip(mine, theirs, faults, strict=True):
        if key in redis.values:
            alter(redis, key, copy, fault, data.draw(st.integers(0, 10_000)))
    reading, plain = other.read(turn), alone.read(turn)
    here = one.conversations.read(turn)
    is_sound = [fault == "kept" and was_there for fault, was_there in zip(faults, there, strict=True)]
    end = (*is_sound, False).index(False)
    assert reading.messages == (*here.messages[:end], *plain.messages[end:])
    known = sum(message.role == "assistant" for message in turn.messages[:end])
    assert reading.written_messages == (*here.written_messages[:known], *plain.written_messages[known:])
    assert plain.messages == turn.messages and not any(plain.written_messages)
    for read, sent in zip(reading.messages, turn.messages, strict=True):
        assert canonicalise(read).digest == canonicalise(sent).digest
