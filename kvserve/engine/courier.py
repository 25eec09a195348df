"""Carries what rows have to say to whoever reads it, so that a step wakes one thread instead of one per stream: those
would all ask for the interpreter's lock, and for a core, just when the next step needs them.
"""

import queue
import threading
from collections.abc import Callable


def call_now(deliver: Callable[[], None]) -> None:
    """Without a courier."""
    deliver()


class Courier:
    """Deliveries in the order in which they were given. `carry` belongs to one thread, `stop` delivers what is left."""

    def __init__(self) -> None:
        self._deliveries: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvserve-courier", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def carry(self, deliver: Callable[[], None]) -> None:
        """Have this called soon, on the courier's thread. It must neither block nor raise."""
        self._deliveries.put(deliver)

    def stop(self) -> None:
        """Deliver what was given and end. Idempotent."""
        self._deliveries.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (deliver := self._deliveries.get()) is not None:
            deliver()
            del deliver  # a row hangs on it, with the pictures of its request: none waits here for the next one
