"""Hears when turns are over, and has what follows them computed while nobody asks for anything: next-turn warming.

It joins rooms per process and has a thread of its own, so that no answer waits for a guess. What is guessed is
`next_turn_predictor.py`'s, when it is computed the engine's.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from kvserve.core import RequestId
from kvserve.engine.warming import Warming, WarmJob
from kvserve.requests.served_model import ServedModel
from kvserve.requests.turn_facts import FinishedTurn, Observer, WatchedTurn
from kvserve.warming.next_turn_predictor import NextTurnPredictor, Over, over, turn_before

QUIET_SECONDS = 0.05
"""For so long nobody asks for anything before a guess is made: a client that goes on at once shares no core with it."""

MAX_PENDING = 16
MAX_JOBS = 256


class SpeculativePrefill:
    """The guesses for one process, newest turn first. Safe for several threads.

    `find` gives the loaded model of a name, None where another one is loaded; `report` takes lines for a person.
    """

    def __init__(self, find: Callable[[str], ServedModel | None], report: Callable[[str], None]) -> None:
        self._find = find
        self._report = report
        self._predictor = NextTurnPredictor()
        self._changed = threading.Condition()
        self._running: dict[RequestId, WatchedTurn] = {}
        self._quiet_since = 0.0
        self._pending: OrderedDict[RequestId, Over] = OrderedDict()
        self._jobs: OrderedDict[RequestId, Warming] = OrderedDict()
        self._guessing: RequestId | None = None
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    # --- web threads --------------------------------------------------------------------------------------------------

    def beside(self, observer: Observer) -> Observer:
        """An observer that tells this one too."""

        def started(running: WatchedTurn) -> None:
            self.started(running)
            observer.started(running)

        def finished(finished: FinishedTurn) -> None:
            self.finished(finished)
            observer.finished(finished)

        return replace(observer, finished=finished, started=started)

    def started(self, running: WatchedTurn) -> None:
        """Somebody wants something: guesses wait."""
        with self._changed:
            self._running[running.request_id] = running

    def finished(self, finished: FinishedTurn) -> None:
        """A turn is over, and the one after it may be guessed; not where its owner was forgotten since it came."""
        request_id = finished.turn.request_id
        with finished.turn.keeping as may_keep, self._changed:
            running = self._running.pop(request_id, None)
            self._quiet_since = time.monotonic()
            turn = over(finished, running) if running is not None and may_keep else None
            if turn is not None and not self._is_stopping:
                self._pending[request_id] = turn
                self._begin()
            while len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)
            self._changed.notify_all()

    def forget(self) -> None:
        """The same, and what clients were seen to do: what they add to messages are words too."""
        self.clear()
        self._predictor.forget_clients()

    def clear(self) -> None:
        """Forget conversations and their guesses."""
        with self._changed:
            self._predictor.clear()
            self._guessing = None
            for request_id in [*self._pending, *self._jobs]:
                self._drop(request_id)

    @property
    def num_pending(self) -> int:
        """Turns that are over and whose next one is still to be guessed."""
        with self._changed:
            return len(self._pending) + (self._guessing is not None)

    def stop(self) -> None:
        """End the thread; idempotent."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _drop(self, request_id: RequestId) -> None:
        if self._guessing == request_id:
            self._guessing = None
        self._pending.pop(request_id, None)
        if (job := self._jobs.pop(request_id, None)) is not None:
            job.cancel()

    def _begin(self) -> None:
        """Have a thread; a server that is never asked needs none."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvserve-next-turns", daemon=True)
            self._thread.start()

    # --- the thread of its own ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._guess_next():
            pass

    def _guess_next(self) -> bool:
        """Guess once; False at the end. Whoever waits for the next turn holds nothing of the last one: a turn has the
        pictures as they were sent."""
        turn = self._next()
        if turn is None:
            return False
        try:
            self._guess(turn)
        except Exception as error:  # noqa: BLE001 - a guess that fails must not be the last one
            self._report(f"The next turn could not be guessed: {type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._guessing = None
        return True

    def _next(self) -> Over | None:
        """The newest turn, once nobody has asked for anything for a moment; None at the end."""
        with self._changed:
            while not self._is_stopping:
                is_free = bool(self._pending) and not self._running
                wait_seconds = QUIET_SECONDS - (time.monotonic() - self._quiet_since)
                if is_free and wait_seconds <= 0:
                    self._guessing, turn = self._pending.popitem()
                    return turn
                self._changed.wait(wait_seconds if is_free else None)
        return None

    def _guess(self, turn: Over) -> None:
        if (before := turn_before(turn)) is not None:
            with self._changed:
                self._drop(before.request_id)  # what was to come next is there
        served = self._find(turn.model)
        if served is None:
            return
        with served.keeping(turn.turn) as may_keep:
            job = self._predictor.job_after(turn, served) if may_keep else None
            if job is not None:
                self._warm(turn, job, served)

    def _warm(self, turn: Over, job: WarmJob, served: ServedModel) -> None:
        """Have it computed, unless the turn was dropped meanwhile."""
        with self._changed:
            for request_id in [each for each, warming in self._jobs.items() if warming.result is not None]:
                del self._jobs[request_id]  # there is nothing to cancel, and its tokens may be many
            if self._guessing == turn.turn.request_id and not self._is_stopping:
                self._jobs[turn.turn.request_id] = served.engine.warm(job)
                while len(self._jobs) > MAX_JOBS:
                    self._jobs.popitem(last=False)
