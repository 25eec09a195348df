"""Recorded sessions that are replayed with drafts: how they are divided, what is counted."""

from array import array

import pytest

from benchmarks.draft_fit import fitted
from benchmarks.draft_replay import FLOORS, SECONDS_BY_WIDTH, long_context, replay, table
from benchmarks.draft_sessions import Session, Step, halves, read_sessions
from benchmarks.recordings import shared_folder


def _session(client: str, origin: str, name: str, *steps: tuple[list[int], list[int]]) -> Session:
    said = tuple(Step(array("i", prompt), array("i", answer)) for prompt, answer in steps)
    return Session(client, client, origin, name, said)


def test_sessions_that_say_the_same_are_in_one_half() -> None:
    """Of each client every other origin is reported."""
    sessions = [
        *(_session("A", "one", "one"), _session("A", "two", "two"), _session("A", "one", "one again")),
        *(_session("B", "three", "three"), _session("A", "four", "four")),
    ]
    choosing, reported = halves(sessions)
    assert [each.name for each in choosing] == ["one", "one again", "three", "four"]
    assert [each.name for each in reported] == ["two"]


def test_steps_and_passes_are_those_that_the_drafts_left() -> None:
    """A copy of forty tokens takes fewer steps than tokens, other words one each."""
    copied = [*range(100, 140)]
    tallies = replay([_session("A", "a", "a", ([1, 2, *copied, 3, 4], copied), ([1, 2, 3], [*range(500, 510)]))])
    tally = tallies["A"]
    assert tally.num_tokens == 50
    assert 0 <= tally.num_steps - (50 - tally.accepted["conversation"]) <= 1  # the last draft ends with the answer
    assert tally.num_steps < 30
    assert tally.drafted["conversation"] >= tally.accepted["conversation"] > 20
    assert tally.pass_seconds < 50 * SECONDS_BY_WIDTH[1]
    assert len(list(table([tally]))) == 4


def test_weights_that_made_the_outcomes_are_found() -> None:
    """Outcomes that follow a curve give the curve back."""
    rows = [(1.0, place / 50, (place * 37 % 100) < (30 if place < 50 else 70)) for place in range(100)] * 20
    (bias, slope), loss = fitted(rows)
    assert bias < 0 < slope and loss < 0.65


@pytest.mark.long
@pytest.mark.skipif(shared_folder() is None, reason="the recordings are not here")
def test_recorded_sessions_keep_their_floors() -> None:
    """Tokens a step of every client that has one, on the sessions that chose nothing; chances promise what comes."""
    shared = shared_folder()
    assert shared is not None
    _, reported = halves(list(read_sessions(shared)))
    tallies = replay(reported)
    assert all(tallies[client].tokens_a_step >= floor for client, floor in FLOORS.items())
    promised = sum(sum(tally.expected.values()) for tally in tallies.values())
    assert promised == pytest.approx(sum(sum(tally.accepted.values()) for tally in tallies.values()), rel=0.1)
    assert long_context(reported).num_tokens > 0
