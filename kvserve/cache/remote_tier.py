"""The shared cache behind the local disk, for one model: what its rows are brought from there, and what of theirs goes
there. What is local stays the truth: everything that is read is put among the local files first, and everything that is
sent has been written there.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.disk_blob import partition_of_first
from kvserve.cache.disk_records import Entry
from kvserve.cache.disk_store import FolderStore
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.remote_fetch import Fetch, FetchCounts
from kvserve.cache.remote_keys import RemoteKeys
from kvserve.cache.remote_path import saved_seconds
from kvserve.cache.remote_sending import NoPath, SendCounts, Sending, path_to
from kvserve.cache.token_run import TokenRun
from kvserve.core import Unshared
from kvserve.remote.room import RemoteRoom
from kvserve.remote.shared_server import SharedServer, SharedState, Steps, Task

LOOKS_WORTH = 20.0
"""A look costs at most this part of what it can save."""

MIN_ASKED_TOKENS = 32
MAX_QUEUED = 4096
SETTLE_SECONDS = 0.3
"""A blob waits so long for its user to be noted, and for the blob behind it, whose path it is on."""

ORPHAN_SECONDS = 10.0
"""What has no user by then is nobody's: a guess. It goes with the first that somebody uses."""


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """What the shared cache has given and taken, and how it was measured to be."""

    place: str
    state: SharedState
    fetched: FetchCounts
    sent: SendCounts
    num_queued: int
    num_dropped: int
    latency_seconds: float | None
    read_bytes_per_second: float | None
    write_bytes_per_second: float | None
    break_even_bytes_per_second: float | None
    faults: dict[str, int]


class RemoteTier:
    """`begin` and `end` belong to the engine thread, `offer` to the disk thread, `next_put` to the puts thread. `end`
    sends what waits, so many seconds at most, and leaves."""

    def __init__(
        self, server: SharedServer, tier: DiskTier, store: FolderStore, hasher: BlockHasher, device: str, seconds: int
    ) -> None:
        self._server = server
        self._tier = tier
        self._store = store
        self._device = device
        self._seconds = seconds
        self._lock = threading.Lock()
        self._queue: dict[str, tuple[Entry, float]] = {}
        self._fetches: list[Fetch] = []
        self._num_dropped = 0
        self._bytes_per_token: float | None = None
        self._is_closed = False
        self._room = RemoteRoom()
        self.fetched, self.sent = FetchCounts(), SendCounts()
        self._sending = Sending(server, tier.index, hasher, store, self.sent)
        self.end: Callable[[float], None] = lambda _: self.close()
        tier.worker.on_written = self.offer

    def keys(self, partition: str) -> RemoteKeys:
        return RemoteKeys.of(self._tier.index.model, self._device, partition, self._seconds)

    # --- the engine thread --------------------------------------------------------------------------------------------

    def begin(
        self, run: TokenRun, chain: HashChain, known: int, room_bytes: float, *, needs_checkpoints: bool
    ) -> Fetch | Unshared:
        """Begin to look for what is there of a prompt beyond `known` tokens; or why not: a look costs more than it can
        save, or nothing is asked now."""
        num_tokens = run.end - 1 - known
        if not self._server.is_open:
            state = self._server.state
            return Unshared("lying" if state == "lying" else "away" if state in ("down", "connecting") else "paused")
        rate, look_seconds = self._tier.worker.prefill_rate, self.fetched.look_seconds
        is_dear = rate and look_seconds and num_tokens / rate < LOOKS_WORTH * look_seconds
        if num_tokens < MIN_ASKED_TOKENS or is_dear:
            return Unshared("too short")
        fetch = Fetch(
            self._server,
            self._tier,
            self.keys(chain.partition),
            self.fetched,
            run=run,
            chain=chain,
            known=known,
            room_bytes=room_bytes,
            needs_checkpoints=needs_checkpoints,
        )
        self._fetches = [each for each in self._fetches if not each.has_ended] + [fetch]
        self._server.ask(Task(fetch.steps(self._server.asks_link), fetch.end))
        return fetch

    def forbid(self) -> None:
        """Somebody is being forgotten: nothing that is being read may come to disk any more. From any thread."""
        for fetch in tuple(self._fetches):
            fetch.forbid()

    @property
    def num_hand_bytes(self) -> int:
        """Bytes that were read and that the disk has not taken yet. From any thread."""
        return sum(fetch.num_hand_bytes for fetch in tuple(self._fetches))

    def close(self) -> None:
        """Nothing more is read or sent."""
        self.forbid()
        self._is_closed = True
        with self._lock:
            self._queue.clear()

    # --- sending ------------------------------------------------------------------------------------------------------

    def offer(self, entry: Entry) -> None:
        """A blob is on disk: it is to be sent, with what is before it. On the disk thread."""
        with self._lock:
            if self._is_closed:
                return
            for name in self._before(entry):
                del self._queue[name]
            while len(self._queue) >= MAX_QUEUED:
                del self._queue[next(iter(self._queue))]
                self._num_dropped += 1
            self._queue[entry.name] = entry, time.monotonic()
        self._server.nudge()

    def _before(self, entry: Entry) -> list[str]:
        """Those in the queue that are on the path to this one."""
        parent, start = entry.head.parent, entry.start
        return [
            name
            for name, (each, _) in self._queue.items()
            if name in (parent, entry.name)
            or (each.head.kind == "checkpoint" and each.head.parent == parent and each.start <= start)
        ]

    @property
    def num_queued(self) -> int:
        """Blobs that wait to be sent; each stands for the path to it."""
        return len(self._queue)

    def next_put(self) -> Task | None:
        """What is to be sent next. On the puts thread; raises LinkFailed."""
        entry = self._take()
        if entry is None:
            return None
        self._room.look(self._server.puts_link)
        return Task(self._steps(entry))

    def _take(self) -> Entry | None:
        now = time.monotonic()
        with self._lock:
            for name, (entry, offered_at) in self._queue.items():
                if now - offered_at < SETTLE_SECONDS:
                    return None  # and so are those behind it
                if entry.users or entry.is_forgotten or now - offered_at > ORPHAN_SECONDS:
                    del self._queue[name]
                    return entry
        return None

    def _steps(self, entry: Entry) -> Steps:
        try:
            if not entry.users:
                return
            path = path_to(entry, self._tier.index, self._store)
            if not self._is_welcome(path.num_bytes, entry.head.tokens.end, max(blob.num_bytes for blob in path.blobs)):
                return
            partition = partition_of_first(path.segments[0].parent) or ""
            link, keys = self._server.puts_link, self.keys(partition)
            yield from self._sending.steps(link, keys, path, dict(entry.users))
        except (NoPath, OSError):  # forgotten or evicted here meanwhile, or refused there
            return

    def _is_welcome(self, num_bytes: int, num_tokens: int, largest: int) -> bool:
        """Whether it is worth its room: reading it back beats computing it, and the server can hold it."""
        self._bytes_per_token = num_bytes / max(1, num_tokens)
        rates = self._server.rates
        saved = saved_seconds(
            num_tokens,
            num_bytes,
            self._tier.worker.prefill_rate,
            rates.read_bytes_per_second,
            rates.latency_seconds or 0.0,
        )
        if saved <= 0 or not self._room.takes(largest):
            self._server.measure()
            self.sent.num_not_worth += 1
            return False
        if self._room.is_full(largest):
            self._server.fill(f"{self._room.used_bytes / 1e9:.1f} of {(self._room.limit_bytes or 0) / 1e9:.1f} GB")
            return False
        return True

    def stats(self) -> RemoteStats:
        """From any thread."""
        rates, rate = self._server.rates, self._tier.worker.prefill_rate
        return RemoteStats(
            place=self._server.place,
            state=self._server.state,
            fetched=self.fetched,
            sent=self.sent,
            num_queued=self.num_queued,
            num_dropped=self._num_dropped,
            latency_seconds=rates.latency_seconds,
            read_bytes_per_second=rates.read_bytes_per_second,
            write_bytes_per_second=rates.write_bytes_per_second,
            break_even_bytes_per_second=self._bytes_per_token * rate if self._bytes_per_token and rate else None,
            faults=self._server.faults(),
        )
