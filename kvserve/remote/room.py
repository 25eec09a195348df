"""How much room a Redis server has for what we send, by its own figures. Pure but for one exchange."""

import time

from kvserve.remote.redis_link import Link

LOOK_SECONDS = 10.0
EXCHANGE_SECONDS = 2.0
FULL_SHARE = 0.95
BLOB_SHARE = 8
"""A blob that would take more than so small a part of the room is not sent."""


class RemoteRoom:
    """Asked by one thread. A server that may not be asked has room until it says otherwise."""

    def __init__(self) -> None:
        self._looked_at = -LOOK_SECONDS
        self._evicts = True
        self.used_bytes = 0
        self.limit_bytes: int | None = None
        self.policy = ""

    def look(self, link: Link) -> None:
        """Ask, where the last answer is old. Raises LinkFailed."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        [reply] = link.run([("INFO", "memory")], now + EXCHANGE_SECONDS)
        if not isinstance(reply, bytes):
            return
        said = dict(line.split(":", 1) for line in reply.decode("utf-8", "replace").splitlines() if ":" in line)
        self.policy = said.get("maxmemory_policy", "")
        maximum, total = _number(said.get("maxmemory")), _number(said.get("total_system_memory"))
        self.used_bytes = _number(said.get("used_memory"))
        self._evicts = bool(maximum) and self.policy != "noeviction"
        self.limit_bytes = maximum or total // 2 or None  # a server without a bound shares its machine with others

    def takes(self, num_bytes: int) -> bool:
        """Whether a blob of this size is welcome at all."""
        return self.limit_bytes is None or num_bytes * BLOB_SHARE <= self.limit_bytes

    def is_full(self, num_bytes: int) -> bool:
        """Whether so much more is too much, and the server would not make room."""
        return (
            not self._evicts
            and self.limit_bytes is not None
            and self.used_bytes + num_bytes > FULL_SHARE * self.limit_bytes
        )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.strip().isdigit() else 0
