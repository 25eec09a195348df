"""Calls the readers of all streams on one thread, so that a step wakes one thread, not one per stream: those would all
ask for the interpreter's lock, and for a core, just when the next step needs them.

For the same reason tokens wait until the engine thread has described the next step to MLX, in Python; they are read
while the device computes.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

type Delivery = Callable[[], None]
"""It must neither block nor raise."""


class Dispatch(Protocol):
    """Has deliveries made in the order in which they are given, at once or (`may_wait`) with the next ones."""

    def __call__(self, deliver: Delivery, *, may_wait: bool) -> None: ...


def call_now(deliver: Delivery, *, may_wait: bool) -> None:
    """Without a dispatcher."""
    deliver()


class TokenDispatcher:
    """Deliveries in the order in which they were given, made on a thread of its own. `dispatch` and `send` belong to
    one thread, `stop` delivers what is left."""

    def __init__(self) -> None:
        self._waiting: list[Delivery] = []
        self._sent: queue.SimpleQueue[list[Delivery] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvserve-dispatcher", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def dispatch(self, deliver: Delivery, *, may_wait: bool) -> None:
        """Have this called on the dispatcher's thread: soon, or (`may_wait`) when the next `send` comes."""
        self._waiting.append(deliver)
        if not may_wait:
            self.send()

    def send(self) -> None:
        """Deliver what was given, from now on."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._sent.put(waiting)

    def stop(self) -> None:
        """Deliver what was given and end. Idempotent."""
        self.send()
        self._sent.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (sent := self._sent.get()) is not None:
            for deliver in sent:
                deliver()
            del (
                sent,
                deliver,
            )  # rows hang on them, with the pictures of their requests: none waits here for the next one


class SendingModule:
    """A model's module that sends waiting tokens in each pass, once its own part, by far the longest, is described.
    Samplers and logits processors follow; the device computes meanwhile, and from then on without Python."""

    def __init__(self, module: Any, send_tokens: Callable[[], None]) -> None:
        self._module = module
        self._send_tokens = send_tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns, not evaluated yet."""
        logits = self._module(*args, **kwargs)
        self._send_tokens()
        return logits

    def send(self) -> None:
        """Send them now: something is to be waited for before the next pass."""
        self._send_tokens()

    def taken(self, ids: Any) -> Any:
        """The ids (rows,) that the newest pass has taken: these."""
        return ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
