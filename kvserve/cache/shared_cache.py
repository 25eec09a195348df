"""The shared cache of a process, whatever models it serves: their tiers, the rows of their conversations, who is
forgotten, here and by other servers.

It is there as long as the process is; a model's tier as long as that model is loaded.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.disk_store import FolderStore
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.remote_forgetting import clear, heard, is_record_of, newest, remove, remove_rows, tell
from kvserve.cache.remote_keys import RecordKeys
from kvserve.cache.remote_tier import RemoteTier
from kvserve.core.keeping import Scope
from kvserve.remote.shared_rows import AGAIN_SECONDS, SharedRows
from kvserve.remote.shared_server import SharedServer, Steps, Task

FORGET_SECONDS = 10.0
RETRY_SECONDS = 30.0
MAX_RETRIES = 10
MAX_TTL_SECONDS = 30 * 86_400
POLL_SECONDS = 0.02


class SharedCache:
    """`ttl_seconds`: what is not used for so long goes there too. `remembered` reads and `remember` writes the place up
    to which others' forgetting was heard, None for never."""

    def __init__(
        self,
        server: SharedServer,
        ttl_seconds: float,
        remembered: Callable[[], str | None],
        remember: Callable[[str], None],
    ) -> None:
        self.server = server
        self._seconds = max(1, int(min(ttl_seconds, MAX_TTL_SECONDS)))
        self._remembered, self._remember = remembered, remember
        self._name = secrets.token_hex(8)
        self._tiers: list[RemoteTier] = []
        self._record_spaces = set[str]()
        self.rows = SharedRows(server, self._seconds)
        self._lock = threading.Lock()
        self._on_heard: Callable[[Scope], bool] = lambda _: True
        self._place: str | None = None
        self._again: deque[tuple[float, Scope]] = deque()
        self._retry_at, self._num_retries = 0.0, 0
        self.num_heard = 0
        server.hear = self._hear

    def start(self, on_heard: Callable[[Scope], bool]) -> None:
        """Begin; `on_heard` forgets here whom another server was told to forget, and says whether all of it is gone."""
        self._on_heard = on_heard
        self.server.start(self._next_put)

    def open_tier(self, tier: DiskTier, store: FolderStore, hasher: BlockHasher, device: str) -> RemoteTier:
        """What a model that is loaded now has of it. `device`: what kind of device computes its KV."""
        opened = RemoteTier(self.server, tier, store, hasher, device, self._seconds)
        opened.end = partial(self._close_tier, opened)
        with self._lock:
            self._tiers.append(opened)
        return opened

    def open_records(self, fingerprint: str, secret: bytes) -> RecordKeys:
        """Where the records are of a model under a template, which this fingerprint stands for, signed so."""
        keys = RecordKeys.of(fingerprint, secret)
        with self._lock:
            self._record_spaces.add(keys.space)
        return keys

    def _close_tier(self, tier: RemoteTier, seconds: float) -> None:
        """The model leaves; what it has on disk is sent first, for so long at most."""
        until = time.monotonic() + seconds
        while self.server.is_open and time.monotonic() < until:
            if not (tier.num_queued or self.rows.num_queued or self.server.is_putting):
                break
            time.sleep(POLL_SECONDS)
        tier.close()
        with self._lock:
            if tier in self._tiers:
                self._tiers.remove(tier)

    def close(self) -> None:
        """End the threads."""
        self.server.close()

    @property
    def num_queued(self) -> int:
        """Blobs of all models, and paths of conversations, that wait to be sent."""
        with self._lock:
            return self.rows.num_queued + sum(tier.num_queued for tier in self._tiers)

    def _next_put(self) -> Task | None:
        if (rows := self.rows.next_put()) is not None:
            return rows
        with self._lock:
            tiers = tuple(self._tiers)
        task = next((task for tier in tiers if (task := tier.next_put()) is not None), None)
        return None if task is None else Task(self._with_rows(task.steps), task.end)

    def _with_rows(self, steps: Steps) -> Steps:
        """What a conversation needs goes between two steps of a large blob; who is to be forgotten, and what others
        forgot, between two paths. Raises LinkFailed."""
        for seconds in steps:
            while (rows := self.rows.next_put()) is not None:
                yield from rows.steps
                self.server.hear_soon()
                yield 0.0
            yield seconds

    # --- forgetting ---------------------------------------------------------------------------------------------------

    @contextmanager
    def forgetting(self, scope: Scope, *, is_heard: bool = False) -> Iterator[bool]:
        """Within the block nothing is read from there nor sent: what is local is forgotten meanwhile. Gives
        whether it is gone there. `is_heard`: another server has told; then this is the puts thread."""
        with self.server.paused():
            self._forbid(scope)
            if is_heard:
                remove(self.server.puts_link, scope)
                self._forbid(scope)
                yield True
            else:
                is_told: list[bool] = []
                is_gone = self.server.first(lambda: self._forget(scope, is_told), FORGET_SECONDS)
                self._forbid(scope)
                yield is_gone

    def _forget(self, scope: Scope, is_told: list[bool]) -> None:
        """`is_told` remembers that the others were told, however often the removal is tried. Raises LinkFailed."""
        link = self.server.puts_link
        if not is_told:
            tell(link, scope, self._name)
            is_told.append(True)
        remove(link, scope)
        self._again.append((time.monotonic() + AGAIN_SECONDS, scope))

    def _remove_again(self) -> None:
        """The rows of whom we had forgotten: a server that was ended before it heard may have sent some since. Raises
        LinkFailed."""
        now = time.monotonic()
        due = [scope for at, scope in self._again if at <= now]
        if due:
            remove_rows(self.server.puts_link, due)
        for _ in due:
            self._again.popleft()

    @contextmanager
    def clearing(self) -> Iterator[bool]:
        """Within the block, in which all is emptied here, nothing is read from there nor sent. What the loaded models
        have there is removed first; gives whether it is gone. Where a model's is, is not known before it has a name."""
        with self._lock:
            models = {tier.keys("").model for tier in self._tiers}
            spaces = models | self._record_spaces
        with self.server.paused():
            self._forbid(Scope())
            is_gone = bool(models) and self.server.first(lambda: self._clear(spaces), FORGET_SECONDS)
            self._forbid(Scope())
            yield is_gone

    def _clear(self, spaces: set[str]) -> None:
        for space in spaces:
            clear(self.server.puts_link, space)

    def _forbid(self, scope: Scope) -> None:
        self.rows.drop(lambda key: is_record_of(key, scope))
        with self._lock:
            tiers = tuple(self._tiers)
        for tier in tiers:
            tier.forbid()

    def _hear(self) -> None:
        """Forget whom others were told to forget. On the puts thread; raises LinkFailed."""
        self._remove_again()
        if self._place is None:
            self._place = self._remembered()
            if self._place is None:
                self._heard_to(newest(self.server.puts_link))
        if time.monotonic() < self._retry_at or self._place is None:
            return
        for told in heard(self.server.puts_link, self._place):
            if told.by != self._name and not self._is_forgotten(told.scope):
                return
            self._heard_to(told.place)

    def _is_forgotten(self, scope: Scope) -> bool:
        """Whether all of it is gone here, or was tried often enough."""
        self.num_heard += not self._num_retries
        is_gone = self._on_heard(scope)
        if not is_gone and self._num_retries >= MAX_RETRIES:
            self.server.note("not_forgotten", f"tried for {MAX_RETRIES * RETRY_SECONDS / 60:.0f} min")
            is_gone = True
        if is_gone:
            self._num_retries = 0
            return True
        self._num_retries += 1
        self._retry_at = time.monotonic() + RETRY_SECONDS
        return False

    def _heard_to(self, place: str) -> None:
        self._place = place
        self._remember(place)
