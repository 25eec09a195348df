"""How a process that computes a model with others learns that they do not any more."""

import threading


class RanksEnd:
    """`reason` is empty where rank 0 has ended as it was told to, or nothing has ended."""

    def __init__(self) -> None:
        self.reason = ""
        self.stopping = threading.Event()
        """Set at the end: the main thread's own event, once it waits for one."""

    def come(self, reason: str) -> None:
        """It has come; from any thread."""
        self.reason = reason and f"The ranks do not compute together any more: {reason}."
        self.stopping.set()
