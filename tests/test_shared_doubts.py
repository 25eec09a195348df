"""What one server does not put back no other one that shares its records does: of several answers at one place, of
several senders of one message."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.core import Message
from kvserve.sessions import shared_row
from kvserve.sessions.shared_row import secret_key
from tests.canonical.texts import LEADING
from tests.laws import num_examples
from tests.remote.fake_redis import FakeRedis
from tests.test_identity import SYSTEM, answered, asked, said
from tests.test_shared_records import AND, DO_IT, SECRET, Site, thought

DONE = said("assistant", "Done.")
ECHOED = asked(SYSTEM, DO_IT, DONE, AND)


@pytest.fixture
def redis() -> FakeRedis:
    return FakeRedis()


def flushed(redis: FakeRedis, _: Site) -> None:
    redis.values.clear()


def evicted(redis: FakeRedis, site: Site) -> None:
    """The path is gone on this server too; what was written there it still knows."""
    redis.values.clear()
    site.conversations._stores.turns.clear()


def kept(*_: object) -> None:
    pass


@pytest.mark.parametrize("meanwhile", [kept, flushed, evicted])
def test_an_answer_that_one_server_doubts_no_other_puts_back(
    meanwhile: Callable[[FakeRedis, Site], None], redis: FakeRedis
) -> None:
    """Also where the first of the two is not there any more: then the other one's row says so."""
    one, other, third = Site(redis), Site(redis), Site(redis)
    one.answer(asked(SYSTEM, DO_IT), thought("Done.", "Hm."))
    meanwhile(redis, one)
    one.answer(asked(SYSTEM, DO_IT), thought("Done.", "Ah."))
    assert other.read(ECHOED).messages == ECHOED.messages
    assert meanwhile is evicted or one.read(ECHOED).messages == ECHOED.messages
    redis.values.clear()
    other.answer(ECHOED, said("assistant", "More."))
    on = asked(SYSTEM, DO_IT, DONE, AND, said("assistant", "More."), AND)
    assert third.read(on).messages == on.messages and third.shared.totals().num_messages == 5


def test_a_doubt_stays_on_a_server_that_heard_of_it(redis: FakeRedis) -> None:
    """Also once it has evicted the path: what was written there does not come back."""
    one, other = Site(redis), Site(redis)
    for thinking in ("Hm.", "Ah."):
        one.answer(asked(SYSTEM, DO_IT), thought("Done.", thinking))
        if thinking == "Hm.":
            redis.values.clear()
    other.read(ECHOED)
    other.conversations._stores.turns.clear()
    redis.values.clear()
    assert other.read(ECHOED).messages == ECHOED.messages


def test_two_answers_that_wait_to_be_sent_are_both_told(redis: FakeRedis) -> None:
    """The path that goes on from the first does not take its place."""
    one, other = Site(redis), Site(redis)
    for thinking in ("Hm.", "Ah."):
        turn = asked(SYSTEM, DO_IT)
        one.read(turn)
        answered(one.conversations, turn, thought("Done.", thinking), (7, 8))
    assert one.rows.num_queued == 2
    one.send()
    assert other.read(ECHOED).messages == one.read(ECHOED).messages == ECHOED.messages


def from_sender(name: str) -> Message:
    return said("user", LEADING["conversation_info"](name, "2") + "Hi")


@pytest.mark.parametrize("is_flushed", [True, False])
def test_a_message_that_two_senders_sent_has_none_of_them(is_flushed: bool, redis: FakeRedis) -> None:
    """Where a client leaves the sender out, no server says which it was; where there was one, each does."""
    one, other, known = Site(redis), Site(redis), Site(FakeRedis())
    for site, name in ((one, "ann"), (one, "bob"), (known, "ann")):
        site.answer(asked(SYSTEM, from_sender(name)), DONE)
        if is_flushed and name == "ann" and site is one:
            redis.values.clear()
    sent = asked(SYSTEM, said("user", "Hi"), DONE, AND)
    for site in (one, other):
        assert site.read(sent).messages[1].text == "Hi"
    assert "ann" in Site(known.redis).read(sent).messages[1].text


def test_a_server_without_a_doubt_takes_no_other_ones_away(redis: FakeRedis) -> None:
    """One that wrote the same as the first did, and knows of nothing else, adds a row."""
    one, late, other = Site(redis), Site(redis), Site(redis)
    for thinking in ("Hm.", "Ah."):
        redis.values.clear()
        one.answer(asked(SYSTEM, DO_IT), thought("Done.", thinking))
    late.answer(asked(SYSTEM, DO_IT), thought("Done.", "Ah."))
    assert other.read(ECHOED).messages == ECHOED.messages


@pytest.mark.parametrize("thinking", ["Ah.", "Oh.", "So.", "No."])
def test_a_path_goes_on_from_what_was_read_last(thinking: str, redis: FakeRedis) -> None:
    """Behind an answer that is doubtful, and was read as the client sent it since, all is known as on the first server:
    here who sent a later message."""
    one, other = Site(redis), Site(redis)
    for each in ("Hm.", thinking):
        one.answer(asked(SYSTEM, DO_IT), thought("Done.", each))
    one.answer(asked(SYSTEM, DO_IT, DONE, from_sender("ann")), said("assistant", "More."))
    sent = asked(SYSTEM, DO_IT, DONE, said("user", "Hi"), said("assistant", "More."), AND)
    here, there = one.read(sent), other.read(sent)
    assert "ann" in here.messages[3].text and there.messages == here.messages


@settings(max_examples=num_examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Hm.", "Ah."]),
            st.sampled_from(["ann", "bob"]),
            st.sampled_from([("send", "flush"), (), ("send",), ("evict",)]),
        ),
        min_size=2,
        max_size=3,
    )
)
def test_no_server_puts_back_what_the_first_one_refuses_to(turns: list[tuple[str, str, tuple[str, ...]]]) -> None:
    """Whatever was said again, was sent in between and went from either of them: a message is read as the first server
    reads it, or as it was sent."""
    redis = FakeRedis()
    one, other = Site(redis), Site(redis)
    for thinking, name, events in turns:
        turn = asked(SYSTEM, from_sender(name))
        one.read(turn)
        answered(one.conversations, turn, thought("Done.", thinking), (7, 8))
        for event in events:
            {"send": one.send, "flush": redis.values.clear, "evict": one.conversations._stores.turns.clear}[event]()
    one.send()
    sent = asked(SYSTEM, said("user", "Hi"), DONE, AND)
    here, there = one.read(sent), other.read(sent)
    for read, known, message in zip(there.messages, here.messages, sent.messages, strict=True):
        assert read in (known, message)


# --- servers of another version --------------------------------------------------------------------------------------


def test_a_server_with_rows_of_another_form_meets_none_of_these(
    redis: FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no liar, nor is this one to it; each has its own."""
    one = Site(redis, secret=secret_key("ours"))
    one.answer(asked(SYSTEM, DO_IT), thought("Done.", "Hm."))
    monkeypatch.setattr(shared_row, "FORMAT", b"kvserve shared row of the future\0")
    other = Site(redis, secret=secret_key("ours"))
    other.answer(ECHOED, said("assistant", "More."))
    assert other.shared.totals().num_refused == 0 and other.rows.server.faults() == {}
    assert len(redis.keys("r")) == 3 + 5


def test_what_is_signed_and_cannot_be_read_is_no_lie(redis: FakeRedis) -> None:
    """It is refused and counted, and the server is asked on; what nobody has signed is a lie."""
    one, other = Site(redis), Site(redis)
    one.answer(asked(SYSTEM, DO_IT), thought("Done.", "Hm."))
    for key in redis.keys("r"):
        redis.values[key] = {"field": shared_row._signature(b"{}", SECRET, key, "field") + b"{}"}
    for _ in range(3):
        assert other.read(ECHOED).messages == ECHOED.messages
    assert other.shared.totals().num_refused == 3 and other.rows.server.faults() == {}
    for key in redis.keys("r"):
        redis.values[key] = {"field": 40 * b"x"}
    for _ in range(4):
        other.read(ECHOED)
    assert other.rows.server.faults() == {"damaged": 3} and other.rows.server.state == "lying"
