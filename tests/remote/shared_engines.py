"""Engines that share one fake Redis server, each with a folder of its own."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvserve.cache import remote_fetch
from kvserve.cache.remote_tier import RemoteStats
from kvserve.cache.shared_cache import SharedCache
from kvserve.core.keeping import Scope
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.worker import Engine
from kvserve.remote.shared_server import SharedServer
from tests.engine.engines import running_engine
from tests.remote.fake_redis import FakeRedis

WAIT_SECONDS = 30.0


@contextmanager
def sharing_engine(
    redis: FakeRedis,
    folder: Path,
    family: str = "qwen3",
    *,
    pays: bool = True,
    on_heard: Callable[[Scope], bool] = lambda _: True,
    **settings: Any,
) -> Iterator[tuple[Engine, SharedCache]]:
    """`pays`: what is there is read and sent, however fast this machine computes."""
    shared = SharedCache(SharedServer("redis://fake", redis.link, lambda _: None), 3600, lambda: "0-0", lambda _: None)
    disk = DiskSettings(folder, max_bytes=None, min_free_bytes=0, ttl_hours=24)
    with pytest.MonkeyPatch.context() as patch:
        if pays:
            for module in ("remote_fetch", "remote_tier"):
                patch.setattr(f"kvserve.cache.{module}.saved_seconds", lambda num_tokens, *_: float(num_tokens))
            patch.setattr("kvserve.cache.remote_tier.LOOKS_WORTH", 0.0)
            patch.setattr(remote_fetch, "UNKNOWN_SECONDS", WAIT_SECONDS)
        patch.setattr("kvserve.cache.remote_tier.SETTLE_SECONDS", 0.01)
        shared.start(on_heard)
        try:
            with running_engine(family, disk=disk, shared=shared, **settings) as engine:
                wait_until(lambda: shared.server.is_open)
                yield engine, shared
        finally:
            shared.close()


def settle(engine: Engine, shared: SharedCache) -> None:
    """Wait until all of it is on disk, and there."""
    disk = engine._ask(lambda scheduler: scheduler.cache._disk)
    assert disk is not None and disk.tier.flush(WAIT_SECONDS)
    wait_until(lambda: not shared.num_queued and not shared.server.is_putting)


def stats_of(engine: Engine) -> RemoteStats:
    report = engine.cache_report().disk
    assert report is not None and report.remote is not None
    return report.remote


def wait_until(check: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not check():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)
