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
        self.forbidden: set[str] = set()  # commands that this user may not give
        self._last = 0

    def link(self, silent_seconds: float = 1.0) -> "FakeLink":
        return FakeLink(self)

    def keys(self, kind: str = "") -> list[str]:
        """All keys, or those of a kind: b, m, u, i, r."""
        return sorted(key for key in self.values if not kind or (key.split(":") + [""] * 4)[3] == kind)

    def answer(self, command: Command) -> Any:
        name, *rest = command
        with self.lock:
            return self.refusal(command) or getattr(self, f"_{str(name).lower()}")(*rest)

    def refusal(self, command: Command) -> LinkRefusal | None:
        """What is refused before it is looked at, in a transaction too."""
        if command[0] in self.forbidden:
            return LinkRefusal("refused", f"NOPERM User default has no permissions to run the '{command[0]}' command")
        if self.is_full and command[0] in ("SET", "HSET"):
            return LinkRefusal("full", "OOM command not allowed when used memory > 'maxmemory'.")
        return None

    def execute(self, queued: Sequence[Command]) -> list[Any]:
        """All of a transaction; nobody sees a part of it."""
        with self.lock:
            return [self.answer(command) for command in queued]

    def _ping(self) -> bytes:
        return b"PONG"

    def _get(self, key: str) -> Any:
        return self.values.get(key)

    def _mget(self, *keys: str) -> list[Any]:
        return [value if isinstance(value := self.values.get(key), bytes) else None for key in keys]

    def _getrange(self, key: str, start: int, end: int) -> bytes:
        return bytes(self.values.get(key, b""))[start : end + 1]

    def _set(self, key: str, value: Any, *options: Any) -> Any:
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

    def _hset(self, key: str, field: str, value: bytes) -> Any:
        if not isinstance(self.values.setdefault(key, {}), dict):
            return LinkRefusal("strange", "WRONGTYPE Operation against a key holding the wrong kind of value")
        self.values[key][field] = value
        return 1

    def _exec(self) -> LinkRefusal:
        return LinkRefusal("strange", "ERR EXEC without MULTI")

    def _hgetall(self, key: str) -> Any:
        fields = self.values.get(key, {})
        if not isinstance(fields, dict):
            return LinkRefusal("strange", "WRONGTYPE Operation against a key holding the wrong kind of value")
        return [part for field, value in fields.items() for part in (field.encode(), value)]

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
        queued: list[Command] | None = None
        is_aborted, replies = False, list[Any]()
        for command in commands:
            refusal = self._redis.refusal(command)
            if command[0] == "MULTI" and refusal is None:
                queued, is_aborted = [], False
                replies.append(b"OK")
            elif queued is None:
                replies.append(self._redis.answer(command))
            elif command[0] == "EXEC":
                abort = LinkRefusal("strange", "EXECABORT Transaction discarded because of previous errors.")
                replies.append(refusal or (abort if is_aborted else self._redis.execute(queued)))
                queued = None
            else:
                is_aborted |= refusal is not None
                queued.append(command)
                replies.append(refusal or b"QUEUED")
        return replies

    def hang_up(self) -> None:
        self._is_hung_up.set()

    def wait_for_hang_up(self, seconds: float) -> None:
        """As a server that is silent: waits until the other thread hangs up."""
        self._is_hung_up.wait(seconds)
        raise LinkFailed("timed_out", "hung up")

    def close(self) -> None:
        pass
