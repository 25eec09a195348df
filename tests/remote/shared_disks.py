"""Disk tiers that share one fake Redis server, without threads of it: each step is made where a test wants it."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from kvserve.cache.disk_store import FolderStore
from kvserve.cache.remote_fetch import Fetch
from kvserve.cache.remote_tier import RemoteTier
from kvserve.core import Unshared
from kvserve.remote.shared_server import SharedServer
from tests.cache.disks import HASHER, WAIT_SECONDS, Disk, named
from tests.remote.fake_redis import FakeRedis

USER = "key.user/session"


class SharedDisk(AbstractContextManager["SharedDisk"]):
    """A disk and its part of the shared cache."""

    def __init__(self, folder: Path, redis: FakeRedis) -> None:
        self.disk = Disk(folder)
        self.server = SharedServer("redis://fake", redis.link, lambda _: None)
        self.server.breaker.succeeded()
        store = self.disk.store
        assert isinstance(store, FolderStore)
        self.remote = RemoteTier(self.server, self.disk.tier, store, HASHER, "cpu", 3600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.disk.tier.close(WAIT_SECONDS)

    def say(
        self,
        ids: Sequence[int],
        *,
        states: Sequence[int] = (),
        user: str = USER,
        is_based: bool = False,
        sends: bool = True,
    ) -> None:
        """Write a prompt to disk, used by somebody, and send what is new of it."""
        assert self.disk.say(ids, states=states, is_based=is_based)
        run, chain = named(ids)
        self.disk.tier.index.use(run, chain, {user: run.end})
        if sends:
            self.send()

    def send(self) -> None:
        """Send all that is offered."""
        for entry, _ in list(self.remote._queue.values()):
            for _ in self.remote._steps(entry):
                pass
        self.remote._queue.clear()

    def begin(self, ids: Sequence[int], *, room_bytes: float = math.inf, **how: bool) -> Fetch | Unshared:
        run, chain = named(ids)
        return self.remote.begin(run, chain, 0, room_bytes, **{"needs_checkpoints": False} | how)

    def fetch(self, ids: Sequence[int], *, room_bytes: float = math.inf, **how: bool) -> Fetch:
        """Bring what is there of a prompt to disk."""
        fetch = self.begin(ids, room_bytes=room_bytes, **how)
        assert isinstance(fetch, Fetch)
        for _ in fetch.steps(self.server.asks_link):
            pass
        fetch.end()
        assert self.disk.tier.flush(WAIT_SECONDS) and fetch.is_over
        return fetch
