"""The client's end of a row: who reads what has arrived, and on which thread."""

import threading
from collections.abc import Callable

import pytest

from kvserve.core import (
    GenerationDone,
    GenerationEvent,
    GenerationFailed,
    GenerationRequest,
    GenerationTiming,
    PrefillProgress,
    RequestId,
    SamplingParams,
    TokenDelta,
    TokenSequence,
)
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.token_dispatcher import TokenDispatcher
from kvserve.errors import EngineFailure

PATIENCE_SECONDS = 60.0
DONE = GenerationDone("length", 3, 0, 2, GenerationTiming(0.0, 0.0, 0.0))
REQUEST = GenerationRequest(RequestId("r"), TokenSequence((1, 2, 3)), 8, SamplingParams(), frozenset())


class Consumer:
    """Waits for tokens on a thread of its own, and reads them wherever it is told to."""

    def __init__(self, generation: RequestHandle, goes_on: Callable[[], bool] = lambda: True) -> None:
        self.seen: list[GenerationEvent] = []
        self.threads: list[str] = []
        self._generation = generation
        self._batches = generation.batches(0)
        self._goes_on = goes_on
        self._num_inside = 0
        self.thread = threading.Thread(target=self._run, name="owner", daemon=True)
        self.thread.start()

    def join(self) -> None:
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        self._read()
        while not isinstance(self.seen[-1] if self.seen else None, GenerationDone | GenerationFailed):
            self._generation.wait(PATIENCE_SECONDS, self._read_elsewhere)
            self._read()

    def _read_elsewhere(self) -> bool:
        self._read()
        return self._goes_on()

    def _read(self) -> None:
        self._num_inside += 1
        assert self._num_inside == 1, "two threads read at once"
        for event in next(self._batches):
            self.seen.append(event)
            self.threads.append(threading.current_thread().name)
        self._num_inside -= 1


def wait_until_idle(generation: RequestHandle) -> None:
    """Until its own thread waits, so that a token is read where it arrives."""
    limit = threading.Event()
    for _ in range(int(PATIENCE_SECONDS * 100)):
        with generation._news:
            if generation._reader is not None:
                return
        limit.wait(0.01)
    raise AssertionError("nobody waits")


def test_tokens_are_read_on_the_thread_that_brings_them_and_the_end_on_its_own() -> None:
    """A reader that waits is not woken for a token; progress of the prompt, the end and errors are its own affair."""
    generation = RequestHandle(REQUEST)
    consumer = Consumer(generation)
    wait_until_idle(generation)
    for event in (PrefillProgress(1, 3, 0), TokenDelta(7), TokenDelta(8)):
        generation.put(event)
        wait_until_idle(generation)
    generation.put(DONE)
    consumer.join()
    assert consumer.seen == [PrefillProgress(1, 3, 0), TokenDelta(7), TokenDelta(8), DONE]
    assert consumer.threads == ["owner", "MainThread", "MainThread", "owner"]


def test_a_reader_that_cannot_go_on_there_goes_on_on_its_own_thread() -> None:
    """False wakes the owner, and until it waits again nothing is read elsewhere."""
    generation = RequestHandle(REQUEST)
    consumer = Consumer(generation, lambda: False)
    for token in range(3):
        wait_until_idle(generation)
        generation.put(TokenDelta(token))
    wait_until_idle(generation)
    generation.put(GenerationFailed(EngineFailure("row failed")))
    consumer.join()
    assert consumer.seen[:3] == [TokenDelta(0), TokenDelta(1), TokenDelta(2)]
    assert consumer.threads == ["MainThread"] * 3 + ["owner"]


@pytest.mark.parametrize("goes_on", [True, False])
def test_every_event_is_read_once_and_in_order_whoever_reads(goes_on: bool) -> None:
    """Many rows, one dispatcher, no pause: two threads never read one row at once."""
    dispatcher = TokenDispatcher()
    dispatcher.start()
    consumers = [Consumer(RequestHandle(REQUEST, dispatcher.dispatch), lambda: goes_on) for _ in range(8)]
    for token in range(500):
        for consumer in consumers:
            consumer._generation.put(TokenDelta(token))
    for consumer in consumers:
        consumer._generation.put(DONE)
    for consumer in consumers:
        consumer.join()
        assert consumer.seen == [*map(TokenDelta, range(500)), DONE]
    dispatcher.stop()


def test_a_wait_ends_while_another_thread_reads_only_after_it() -> None:
    """The owner's patience may end in the middle of a read elsewhere: it goes on when that one is over."""
    generation = RequestHandle(REQUEST)
    is_inside, may_leave, has_ended = threading.Event(), threading.Event(), threading.Event()

    def read() -> bool:
        is_inside.set()
        assert may_leave.wait(PATIENCE_SECONDS)
        return True

    def own() -> None:
        generation.wait(0.05, read)
        has_ended.set()

    threads = [threading.Thread(target=own), threading.Thread(target=lambda: generation.put(TokenDelta(1)))]
    threads[0].start()
    while generation._reader is None and not has_ended.is_set():
        threading.Event().wait(0.001)
    threads[1].start()
    if is_inside.wait(1.0):  # else the patience was over first, which proves nothing and harms nothing
        assert not has_ended.wait(0.3)
    may_leave.set()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("end", [lambda row: row.finish("stop"), lambda row: row.fail(EngineFailure("row failed"))])
def test_a_rows_place_is_free_before_its_client_hears_of_the_end(end: Callable[[Row], None]) -> None:
    """A client that comes again at once finds it, also where the queue was full, and a look at the counts is true."""
    order: list[str] = []
    end(Row(RequestHandle(REQUEST, lambda _, may_wait: order.append("told")), lambda: order.append("free")))
    assert order == ["free", "told"]


def test_a_row_that_begins_again_is_waited_for_as_at_first() -> None:
    """Long waits are for rows that write: one whose batch broke is prefilled again."""
    generation = RequestHandle(REQUEST)
    batches = generation.batches(0)
    for event, patience in ((PrefillProgress(1, 3, 0), 0.1), (TokenDelta(7), 1.0), (PrefillProgress(1, 3, 0), 0.1)):
        generation.put(event)
        next(batches)
        assert generation._longest_wait(0.1) == patience
