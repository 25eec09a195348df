"""What other threads put in for the engine thread, and who waits for the end of what: until the engine thread has
emptied it for the last time, or the ranks that compute together are lost. It knows no model.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from kvserve.engine.engine_start import EngineCall
from kvserve.engine.ranks.place import RanksLost
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.scheduler import Scheduler
from kvserve.errors import NotReady, QueueFull, RankLost, RequestError


class Inbox:
    """Rows and calls, in the order in which they came; None wakes the engine thread. For any thread."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Row | EngineCall | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._handles: set[RequestHandle] = set()
        self._asked: set[Future[Any]] = set()
        self._lost = ""
        self._is_closed = False
        self.num_open = 0
        """Rows that were let in and have not ended."""

    def let_in(self, most: int) -> None:
        """Count one more row. Raises QueueFull where there are so many already."""
        with self._lock:
            if self.num_open >= most:
                raise QueueFull(f"{self.num_open} requests are open already; try again later.", retry_after_seconds=5)
            self.num_open += 1

    def ended(self, handle: RequestHandle) -> None:
        """A row that was let in is over."""
        with self._lock:
            self.num_open -= 1
            self._handles.discard(handle)

    def put(self, item: Row | EngineCall | None) -> None:
        """Put an item in. Raises NotReady, or RankLost, for what nobody will take out any more."""
        with self._lock:
            if self._lost or self._is_closed:
                raise self.refusal()
            if isinstance(item, Row):
                self._handles.add(item.handle)
            self._items.put(item)

    def ask[T](self, question: Callable[[Scheduler], T]) -> "Future[T]":
        """Put a question in, to be asked between two steps of the engine: its answer, or why there is none, which comes
        though the engine's thread never does. Raises as `put` does."""
        answer: Future[T] = Future()

        def call(scheduler: Scheduler | None) -> None:
            if scheduler is None:
                self._settle(answer, self.refusal())
                return
            try:
                self._settle(answer, question(scheduler))
            except RanksLost as lost:
                self._settle(answer, RankLost(str(lost)))
                raise
            except Exception as error:  # noqa: BLE001 - it belongs to the caller, not to the rows
                self._settle(answer, error)

        with self._lock:
            self._asked.add(answer)
        try:
            self.put(call)
        except (NotReady, RankLost):
            self._asked.discard(answer)
            raise
        return answer

    def _settle(self, answer: "Future[Any]", found: object) -> None:
        """Give an answer, unless it was given: whoever asked was told that the ranks are lost."""
        with self._lock:
            self._asked.discard(answer)
            if answer.done():
                return
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

    @property
    def lost(self) -> str:
        """Why the ranks do not compute together any more; empty while they do."""
        return self._lost

    def refusal(self) -> RequestError:
        """What is said to those who come too late."""
        if self._lost:
            return RankLost(self._lost)
        return NotReady("The server is shutting down.", retry_after_seconds=10)

    def wake(self) -> None:
        """Wake the engine thread, if there is one."""
        self._items.put(None)

    def get(self, timeout: float) -> Row | EngineCall | None:
        """The next item, waiting for it so long at most. Raises queue.Empty."""
        return self._items.get(timeout=timeout)

    def get_nowait(self) -> Row | EngineCall | None:
        """The next item. Raises queue.Empty."""
        return self._items.get_nowait()

    def take_calls(self, scheduler: Scheduler) -> None:
        """Do what was put in. Nobody puts a row in for the engine of a follower."""
        while not self._items.empty():
            if (item := self._items.get_nowait()) is not None and not isinstance(item, Row):
                item(scheduler)

    def empty(self) -> bool:
        return self._items.empty()

    def lose(self, reason: str) -> bool:
        """Tell all who wait that the ranks do not compute together any more. False where that is known."""
        with self._lock:
            if self._lost or self._is_closed:
                return False
            self._lost, handles, asked = reason, list(self._handles), list(self._asked)
        for handle in handles:
            handle.lose(RankLost(reason))
        for answer in asked:
            self._settle(answer, RankLost(reason))
        return True

    def closed(self) -> Iterator[Row | EngineCall]:
        """Take nothing in any more; what is left."""
        with self._lock:
            self._is_closed = True
        while not self._items.empty():
            if (item := self._items.get_nowait()) is not None:
                yield item
