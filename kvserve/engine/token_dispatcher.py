"""Carries what rows have to say to whoever reads it, so that a step wakes one thread instead of one per stream: those
would all ask for the interpreter's lock, and for a core, just when the next step needs them.

For the same reason tokens do not go out as soon as they are known, when the engine thread is about to describe the next
step to MLX, in Python: they wait until it has, and are read while the device computes.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

type Delivery = Callable[[], None]
"""It must neither block nor raise."""


class Carry(Protocol):
    """Has deliveries made in the order in which they are given; `may_wait`: the next departure is soon enough."""

    def __call__(self, deliver: Delivery, *, may_wait: bool) -> None: ...


def call_now(deliver: Delivery, *, may_wait: bool) -> None:
    """Without a courier."""
    deliver()


class Courier:
    """Deliveries in the order in which they were given, made on a thread of its own. `carry` and `depart` belong to one
    thread, `stop` delivers what is left."""

    def __init__(self) -> None:
        self._bag: list[Delivery] = []
        self._departed: queue.SimpleQueue[list[Delivery] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvserve-courier", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def carry(self, deliver: Delivery, *, may_wait: bool) -> None:
        """Have this called on the courier's thread: soon, or (`may_wait`) behind the next departure."""
        self._bag.append(deliver)
        if not may_wait:
            self.depart()

    def depart(self) -> None:
        """What was given is delivered from now on."""
        if self._bag:
            bag, self._bag = self._bag, []
            self._departed.put(bag)

    def stop(self) -> None:
        """Deliver what was given and end. Idempotent."""
        self.depart()
        self._departed.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (bag := self._departed.get()) is not None:
            for deliver in bag:
                deliver()
            del bag, deliver  # rows hang on them, with the pictures of their requests: none waits here for the next one


class Departing:
    """A model's module whose every pass is an occasion to depart, once its own part, by far the longest, is described.
    Samplers and logits processors follow; the device computes meanwhile, and from then on without Python."""

    def __init__(self, module: Any, depart: Callable[[], None]) -> None:
        self._module = module
        self._depart = depart

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns, not evaluated yet."""
        logits = self._module(*args, **kwargs)
        self._depart()
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
