"""A Redis server in memory, as far as the shared cache speaks to one, with the faults that a real one can show. It
counts exchanges. Its answers to each command are those of Redis 7 (tests/e2e/test_shared_tier.py has a real one)."""

import fnmatch
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvserve.remote.redis_link import Command, LinkFailed, LinkRefusal


class FakeRedis:
    """`on_run`: called before each exchange; may wait, or raise LinkFailed."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.expires: dict[str, float] = {}
        self.lock = threading.RLock()
        self.num_exchanges = 0
        self.commands: list[Command] = []
        self.on_run: Callable[[Sequence[Command]], None] = lambda _: None
        self.is_full = False
        self._last = 0

    def link(self, silent_seconds: float = 1.0) -> "FakeLink":
        return FakeLink(self)

    def keys(self, kind: str = "") -> list[str]:
        """All keys, or those of a kind: b, m, u, i."""
        return sorted(key for key in self.values if not kind or (key.split(":") + [""] * 4)[3] == kind)

    def answer(self, command: Command) -> Any:
        name, *rest = command
        with self.lock:
            return getattr(self, f"_{str(name).lower()}")(*rest)

    def _ping(self) -> bytes:
        return b"PONG"

    def _get(self, key: str) -> Any:
        return self.values.get(key)

    def _mget(self, *keys: str) -> list[Any]:
        return [value if isinstance(value := self.values.get(key), bytes) else None for key in keys]

    def _getrange(self, key: str, start: int, end: int) -> bytes:
        return bytes(self.values.get(key, b""))[start : end + 1]

    def _set(self, key: str, value: Any, *options: Any) -> Any:
        if self.is_full:
            return LinkRefusal("full", "OOM command not allowed when used memory > 'maxmemory'.")
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)
        if options:
            self.expires[key] = time.monotonic() + int(options[1])
        return b"OK"

    def _expire(self, key: str, seconds: int) -> int:
        if key not in self.values:
            return 0
        self.expires[key] = time.monotonic() + seconds
        return 1

    def _touch(self, *keys: str) -> int:
        return sum(key in self.values for key in keys)

    def _unlink(self, *keys: str) -> int:
        return sum(self.values.pop(key, None) is not None for key in keys)

    def _zadd(self, key: str, *pairs: Any) -> int:
        scores = self.values.setdefault(key, {})
        for score, member in zip(pairs[1::2], pairs[2::2], strict=True):
            scores[member] = max(int(score), scores.get(member, 0))
        return 1

    def _zrange(self, key: str, *_: Any) -> list[bytes]:
        return [part for member, score in self.values[key].items() for part in (member.encode(), str(score).encode())]

    def _zrem(self, key: str, *members: str) -> int:
        for member in members:
            self.values[key].pop(member, None)
        return len(members)

    def _scan(self, cursor: str, _match: str, pattern: str, *_: Any) -> list[Any]:
        return [b"0", [key.encode() for key in list(self.values) if fnmatch.fnmatchcase(key, pattern)]]

    def _xadd(self, key: str, *rest: Any) -> bytes:
        self._last += 1
        place = f"{self._last}-0".encode()
        self.values.setdefault(key, []).append([place, [str(each).encode() for each in rest[4:]]])
        return place

    def _xrange(self, key: str, since: str, *_: Any) -> list[Any]:
        first = int(since.strip("(").split("-")[0])
        return [row for row in self.values.get(key, []) if int(row[0].split(b"-")[0]) > first]

    def _xrevrange(self, key: str, *_: Any) -> list[Any]:
        return self.values.get(key, [])[-1:]

    def _info(self, _section: str) -> bytes:
        return b"used_memory:1000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\ntotal_system_memory:8000000000\r\n"


class FakeLink:
    def __init__(self, redis: FakeRedis) -> None:
        self._redis = redis
        self._is_hung_up = threading.Event()

    def run(self, commands: Sequence[Command], until: float) -> list[Any]:
        self._redis.num_exchanges += bool(commands)
        self._redis.commands += commands
        self._redis.on_run(commands)
        return [self._redis.answer(command) for command in commands]

    def hang_up(self) -> None:
        self._is_hung_up.set()

    def wait_for_hang_up(self, seconds: float) -> None:
        """As a server that is silent: waits until the other thread hangs up."""
        self._is_hung_up.wait(seconds)
        raise LinkFailed("timed_out", "hung up")

    def close(self) -> None:
        pass
