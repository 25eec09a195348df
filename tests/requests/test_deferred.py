"""A turn that waits for its place: silence, then its answer; whoever leaves is gone."""

from collections.abc import Callable, Iterator

import pytest

from kvserve.core import (
    AnswerEvent,
    ContentDelta,
    Finished,
    Message,
    RequestId,
    TextBlock,
    TokenSequence,
    Usage,
    Waiting,
)
from kvserve.errors import ModelUnavailable
from kvserve.requests.deferred import DeferredTurn

DONE = Finished("stop", Usage(3, 1, 2))


class Running:
    """A turn that has begun."""

    request_id = RequestId("r")
    num_prompt_tokens, num_marked_tokens, is_lost = 7, 5, True
    said, context = Message("assistant", (TextBlock("Hello"),)), TokenSequence((1, 2, 3))

    def __init__(self) -> None:
        self.is_cancelled = False

    def events(self, poll_seconds: float) -> Iterator[AnswerEvent]:
        yield from (ContentDelta("Hello"), DONE)

    def wait(self, seconds: float, read: Callable[[], bool]) -> None:
        self.is_waited_for = True

    def cancel(self) -> None:
        self.is_cancelled = True


class Place:
    """Free at the third question."""

    def __init__(self, error: Exception | None = None) -> None:
        self.running = Running()
        self.num_asked = self.num_left = 0
        self.error = error

    def begin(self) -> Running | None:
        self.num_asked += 1
        if self.num_asked < 3:
            return None
        if self.error is not None:
            raise self.error
        return self.running

    def leave(self) -> None:
        self.num_left += 1

    def turn(self) -> DeferredTurn:
        return DeferredTurn(RequestId("r"), self.begin, self.leave, num_prompt_tokens=9, num_marked_tokens=4)


def test_it_waits_and_then_says_what_the_turn_says() -> None:
    """Until it begins its numbers are those that were counted before; afterwards everything is the turn's."""
    place = Place()
    turn = place.turn()
    assert (turn.num_prompt_tokens, turn.num_marked_tokens, turn.is_lost) == (9, 4, False)
    assert (turn.said, turn.context) == (Message("assistant", ()), TokenSequence(()))
    assert list(turn.events(0)) == [Waiting(0, 9), Waiting(0, 9), ContentDelta("Hello"), DONE]
    assert place.num_left == 1 and not place.running.is_cancelled
    assert (turn.num_prompt_tokens, turn.num_marked_tokens, turn.is_lost) == (7, 5, True)
    assert (turn.said, turn.context) == (place.running.said, TokenSequence((1, 2, 3)))


def test_cancelled_while_it_waits_it_never_begins() -> None:
    """It says nothing more, and its place is free."""
    place = Place()
    turn = place.turn()
    events = turn.events(0)
    assert next(events) == Waiting(0, 9)
    turn.cancel()
    assert list(events) == [] and place.num_asked == 2 and place.num_left >= 1


def test_cancelled_before_anybody_asks_its_place_is_free() -> None:
    """As after a client that left before its headers went out."""
    place = Place()
    place.turn().cancel()
    assert place.num_left == 1 and place.num_asked == 0


def test_a_client_that_goes_while_it_waits_leaves_its_place() -> None:
    """Closing the iteration is leaving."""
    place = Place()
    events = place.turn().events(0)
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert place.num_left == 1


def test_cancelled_in_the_answer_the_turn_is_cancelled() -> None:
    """Whatever is under way hears of it."""
    place = Place()
    turn = place.turn()
    for event in turn.events(0):
        if isinstance(event, ContentDelta):
            turn.cancel()
    assert place.running.is_cancelled


def test_waiting_in_vain_is_an_error() -> None:
    """It goes to the client, and the place is free."""
    place = Place(ModelUnavailable("broken"))
    with pytest.raises(ModelUnavailable):
        list(place.turn().events(0))
    assert place.num_left == 1
