"""A failure costs what the name of its border says, and whoever is to hear of it hears it in words."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from kvserve.core import GenerationFailed, TokenSequence
from kvserve.engine.borders import (
    ShortMemory,
    costs_no_row,
    costs_the_disk_only,
    engine_outlives,
    finding,
    guarded,
    row_fails_alone,
)
from kvserve.engine.disk_cache import DiskCache
from kvserve.engine.rows import RequestHandle, Row
from kvserve.errors import EngineFailure, MemoryExhausted
from tests.engine.engines import prompt_of, request
from tests.engine.test_disk_writing import kept

type Border = Callable[[Callable[[str], None]], AbstractContextManager[None]]

OUT_OF_MEMORY = RuntimeError("[malloc] Unable to allocate 1 bytes.")


def a_row() -> Row:
    return Row(RequestHandle(request(prompt_of(3), 1)), lambda: None)


@pytest.mark.parametrize(
    ("border", "words"),
    [
        (lambda tell: costs_no_row(tell, "Not kept"), ["Not kept: KeyError: 'a'"]),
        (lambda tell: engine_outlives(tell, "It failed"), ["It failed: KeyError: 'a'"]),
        (lambda tell: engine_outlives(tell, "It failed", tell), ["It failed: KeyError: 'a'", "KeyError: 'a'"]),
        (costs_the_disk_only, ["KeyError: 'a'"]),
    ],
)
def test_what_is_raised_is_told_and_the_work_goes_on(border: Border, words: list[str]) -> None:
    """Whatever it is, but for what ends the process. Nothing is told of work that does not fail."""
    told: list[str] = []
    with border(told.append):
        pass
    assert told == []
    with border(told.append):
        raise KeyError("a")
    assert told == words
    with pytest.raises(KeyboardInterrupt), border(told.append):
        raise KeyboardInterrupt
    assert told == words


@pytest.mark.parametrize(("error", "heard"), [(OUT_OF_MEMORY, MemoryExhausted), (KeyError("a"), EngineFailure)])
def test_a_row_that_fails_tells_its_client_before_it_leaves(error: Exception, heard: type[Exception]) -> None:
    """What an allocation needed is told as such, anything else as the engine's failure."""
    row, left = a_row(), list[bool]()
    memory = ShortMemory(lambda _num_bytes: None, lambda num_tokens: num_tokens, lambda _line: None)
    with row_fails_alone(row, memory, lambda: left.append(row.is_over)):
        raise error
    [end] = next(row.handle.batches(1))
    assert isinstance(end, GenerationFailed) and type(end.error) is heard
    assert left == [True]


def test_a_rows_own_code_that_fails_is_not_asked_again() -> None:
    """The row is marked with its first failure, and the batch goes on with what stands in for it."""
    row, asked = a_row(), list[int]()

    def own(number: int) -> str:
        asked.append(number)
        if number == 2:
            raise KeyError(number)
        return "own"

    call = guarded(row, own, lambda _number: "instead")
    assert [call(number) for number in (1, 2, 3)] == ["own", "instead", "instead"]
    assert asked == [1, 2] and isinstance(row.failure, KeyError)


def test_a_trial_that_fails_is_a_finding() -> None:
    """What it gives, or its error, which holds nothing of what was tried."""

    def fails() -> int:
        raise KeyError("a")

    assert finding(lambda: 7) == 7
    found = finding(fails)
    assert isinstance(found, KeyError) and found.__traceback__ is None


def test_where_the_disk_fails_a_row_starts_from_what_ram_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted, and the row waits for nothing; what leaves RAM leaves it."""

    def fails(*_: object, **__: object) -> None:
        raise KeyError("a")

    with kept(needs_checkpoints=False) as world:
        world.say(range(20), 1, "a")
        monkeypatch.setattr(DiskCache, "_begin", fails)
        pinned = world.cache.pin(TokenSequence((*range(30), 99)))
        assert pinned.is_settled and pinned.lease.num_tokens == 20 and not world.cache.advance(pinned)
        assert world.disk.faults == {"unreadable": 1}
