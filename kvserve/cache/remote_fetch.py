"""What one waiting row is brought from the shared cache: a look, then the blobs that are worth it, each verified and
put among the local files, where it is found like any other.

    engine thread                     asks thread                           disk thread
    begin; advance, or give up        look, rule, parts; rule again         writes the file, adopts it

It never waits for a row; whoever waits has its own bounds.
"""

import time
from dataclasses import dataclass
from threading import Lock
from typing import Literal

from kvserve.cache.block_hash import HashChain
from kvserve.cache.disk_blob import DamagedBlob, OtherChecksum, unpack_blob
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.remote_keys import PART_BYTES, RemoteKeys, num_parts
from kvserve.cache.remote_look import RemoteFound, look
from kvserve.cache.remote_path import MIN_GAIN_TOKENS, RemoteBlob, RemoteGoal, remote_goals, saved_seconds
from kvserve.cache.token_run import TokenRun
from kvserve.core import Unshared, UnsharedReason
from kvserve.remote.redis_link import Link, LinkRefusal
from kvserve.remote.shared_server import SharedServer, Steps

LOOK_SECONDS = 0.5
SILENT_SECONDS = 1.0
UNKNOWN_SECONDS = 5.0
"""A row waits so long where it is not known how long computing takes."""

STEP_SECONDS = 0.1
MAX_STEP_PARTS = 16
MAX_IN_HAND = 2
"""So many blobs were read at most that the disk has not taken yet."""

HAND_SECONDS = 0.002

type Outcome = Literal["nothing", "declined", "given up", "read"]
"""What became of it: there is nothing; computing is as fast; it was broken off; all that was worth it is here."""


@dataclass(slots=True, eq=False)
class FetchCounts:
    """What all fetches of a model together have found and brought; the asks thread counts."""

    num_looks: int = 0
    num_found: int = 0
    num_hits: int = 0
    num_declined: int = 0
    num_given_up: int = 0
    num_read: int = 0
    num_read_bytes: int = 0
    num_restored_tokens: int = 0
    longest_wait_seconds: float = 0.0
    look_seconds: float | None = None


class Fetch:
    """One row's. `known` tokens of its prompt are here already. The engine thread asks `is_over`, and may `leave`. Once
    it `has_ended` nothing of it comes to disk any more."""

    def __init__(
        self,
        server: SharedServer,
        tier: DiskTier,
        keys: RemoteKeys,
        counts: FetchCounts,
        *,
        run: TokenRun,
        chain: HashChain,
        known: int,
        room_bytes: float,
        needs_checkpoints: bool,
    ) -> None:
        self._server = server
        self._tier = tier
        self._keys = keys
        self._counts = counts
        self._run = run
        self._chain = chain
        self._known = known
        self._room_bytes = room_bytes
        self._needs_checkpoints = needs_checkpoints
        self._lock = Lock()
        self._began_at = self._news_at = time.monotonic()
        self._step_seconds = 0.0
        self._num_in_hand = 0
        self.outcome: Outcome = "nothing"
        self.num_brought_tokens = 0
        self.num_hand_bytes = 0
        self._num_there_tokens = 0
        self._reason: UnsharedReason | None = None
        self.has_begun = self.has_looked = self.is_over = self.is_forbidden = self.has_ended = False
        rate = tier.worker.prefill_rate
        seconds = (run.end - known) / rate if rate else UNKNOWN_SECONDS
        self._until = self._began_at + max(seconds, LOOK_SECONDS)

    # --- the row that waits -------------------------------------------------------------------------------------------

    def is_late(self) -> bool:
        """Whether a row should wait no longer: the look, or a step, or all of it takes too long."""
        now = time.monotonic()
        if not self.has_looked:
            return now - self._began_at > LOOK_SECONDS
        return now > self._until or self._is_silent(now)

    @property
    def news_at(self) -> float:
        """When something came last (`time.monotonic`)."""
        return self._news_at

    def _is_silent(self, now: float) -> bool:
        return now - self._news_at > SILENT_SECONDS + 2 * self._step_seconds

    def give_up(self) -> None:
        """The row has waited long enough; a server that is silent meanwhile is asked nothing more for a while."""
        self.outcome, self._reason = "given up", "slower"
        if not self.has_looked or self._is_silent(time.monotonic()):
            self._reason = "silent"
            is_looking = self.has_begun and not self.has_looked  # else it may be another row's step that takes so long
            self._server.hang_up(LOOK_SECONDS if is_looking else SILENT_SECONDS)
        self.leave()

    def leave(self) -> None:
        """The row waits no longer. What was read by now is kept."""
        with self._lock:
            if not self.is_over:
                self.is_over = True
                seconds = time.monotonic() - self._began_at
                self._counts.longest_wait_seconds = max(self._counts.longest_wait_seconds, seconds)

    def taken(self) -> int:
        """The row goes on: how many tokens it was brought."""
        self._counts.num_hits += self.num_brought_tokens > 0
        self._counts.num_restored_tokens += self.num_brought_tokens
        return self.num_brought_tokens

    @property
    def unshared(self) -> Unshared | None:
        """Why the row was brought nothing, or not all that is there; None where it was."""
        if self.outcome == "read" and self._reason is None:
            return None
        nothing: UnsharedReason = "not there" if self.has_looked and self.outcome == "nothing" else "silent"
        return Unshared(self._reason or nothing, self._num_there_tokens)

    def forbid(self) -> None:
        """Somebody is forgotten: nothing of it may come to disk any more."""
        self.is_forbidden, self._reason = True, "paused"
        self.leave()

    # --- the asks thread ----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """No step follows: the row goes on once the disk has taken what was read."""
        self._counts.num_given_up += self.outcome == "given up"
        self._tier.soon(self._end)

    def _end(self) -> None:
        """On the disk thread, behind all that was read."""
        self.leave()
        self.has_ended = True

    def steps(self, link: Link) -> Steps:
        """Raises LinkFailed."""
        if self.is_over:
            return
        self.has_begun = True
        goal = self._goal(self._looked(link))
        if goal is None:
            return
        self._counts.num_found += 1
        self.outcome = "given up"  # until all of it is here
        yield 0.0
        num_left = goal.num_bytes
        for blob in goal.blobs:
            data = bytearray()
            while len(data) < blob.num_bytes:
                if self.is_over or not self._is_worth(goal, num_left):
                    self._reason = self._reason or "slower"  # where the row left its reason is known
                    return
                if (step := self._read(link, blob, len(data) // PART_BYTES)) is None:
                    return
                data += step
                num_left -= len(step)
                yield 0.0
            if not self._put(blob, data, goal):
                return
            while self._num_in_hand >= MAX_IN_HAND and not self.is_over:
                yield HAND_SECONDS
        self.outcome = "read"

    def _looked(self, link: Link) -> RemoteFound:
        counts, started = self._counts, time.monotonic()
        counts.num_looks += 1
        model = self._tier.index.model
        found = look(link, self._keys, model, self._run, self._chain, self._known, started + LOOK_SECONDS)
        seconds = time.monotonic() - started
        counts.look_seconds = seconds if counts.look_seconds is None else 0.7 * counts.look_seconds + 0.3 * seconds
        if found.are_strange:
            self._server.lied("a path or a head")
            self._reason = None if found.path else "damaged"
        self._news_at = time.monotonic()
        self.has_looked = True
        return found

    def _goal(self, found: RemoteFound) -> RemoteGoal | None:
        """What to read so that the row starts soonest."""
        best, best_saved, has_any, is_too_large = None, 0.0, False, False
        names = {blob.name for blob in found.path if self._tier.index.head_of(blob.name) is not None}
        for goal in remote_goals(found.path, found.common, self._run, names, needs_checkpoints=self._needs_checkpoints):
            if goal.end - self._known < MIN_GAIN_TOKENS or not goal.blobs:
                continue
            self._num_there_tokens = max(self._num_there_tokens, goal.end)
            if goal.num_bytes > self._room_bytes:
                is_too_large = True
                continue
            has_any = True
            if (saved := self._saved(goal.end, goal.num_bytes)) > best_saved:
                best, best_saved = goal, saved
        if best is None:
            self._reason = "slower" if has_any else "no room" if is_too_large else self._reason
        if best is None and has_any:
            self.outcome = "declined"
            self._counts.num_declined += 1
            self._server.measure()
        return best

    def _saved(self, end: int, num_bytes: int) -> float:
        rates, prefill_rate = self._server.rates, self._tier.worker.prefill_rate
        latency = rates.latency_seconds or 0.0
        saved = saved_seconds(end - self._known, num_bytes, prefill_rate, rates.read_bytes_per_second, latency)
        return saved - num_bytes / rate if (rate := self._tier.read_rate) else saved

    def _is_worth(self, goal: RemoteGoal, num_left: int) -> bool:
        """Whether reading the rest beats computing it, at the rate that was measured by now; what is sunk is sunk."""
        return self._saved(goal.end, num_left) > 0

    def _read(self, link: Link, blob: RemoteBlob, first: int) -> bytes | None:
        """The next parts of a blob: as many as come in a moment. None where one of them is gone."""
        rates = self._server.rates
        num = int(STEP_SECONDS * (rates.read_bytes_per_second or 0) / PART_BYTES)
        last = min(first + max(1, min(num, MAX_STEP_PARTS)), num_parts(blob.num_bytes))
        num_bytes = min(last * PART_BYTES, blob.num_bytes) - first * PART_BYTES
        self._step_seconds = num_bytes / (rates.read_bytes_per_second or PART_BYTES)
        started = time.monotonic()
        until = started + SILENT_SECONDS + 4 * self._step_seconds
        replies = link.run([("GET", self._keys.part(blob.name, number)) for number in range(first, last)], until)
        self._server.rates.was_read(num_bytes, time.monotonic() - started)
        self._news_at = time.monotonic()
        parts = [reply for reply in replies if isinstance(reply, bytes)]
        if len(parts) < len(replies) or sum(map(len, parts)) != num_bytes:
            self._gone(link, blob, replies)
            return None
        self._counts.num_read_bytes += num_bytes
        return b"".join(parts)

    def _gone(self, link: Link, blob: RemoteBlob, replies: list[object]) -> None:
        """A blob that is not whole is of no use to anybody."""
        self._reason = "gone"
        is_lie = any(isinstance(reply, bytes | LinkRefusal) for reply in replies) and None not in replies
        if is_lie:
            self._reason = "damaged"
            self._server.lied(f"{blob.name}: a part has another length")
        else:
            self._server.note("missing", blob.name)
        self._unlink(link, blob)

    def _unlink(self, link: Link, blob: RemoteBlob) -> None:
        link.run(
            [("UNLINK", self._keys.path(blob.name), *self._keys.parts(blob.name, blob.num_bytes))],
            time.monotonic() + SILENT_SECONDS,
        )

    def _put(self, blob: RemoteBlob, data: bytearray, goal: RemoteGoal) -> bool:
        """Verify a blob, and hand it to the disk thread. False: it is not what it should be."""
        try:
            head = unpack_blob(data, blob.name).head
        except DamagedBlob as error:
            self._reason = "damaged"
            reason = f"{blob.name}: {error}"
            if isinstance(error, OtherChecksum):
                self._server.is_altered(blob.name, reason)
            else:
                self._server.lied(reason)
            self._unlink(self._server.asks_link, blob)
            return False
        self._hold(1, len(data))
        names = {each.name for each in goal.blobs}

        def bring() -> None:
            try:
                if self.is_forbidden:
                    return
                if not self._tier.worker.bring(head, data, names):
                    self._reason = "no room"
                    self.leave()  # no room: what follows could not stand without it
                    return
                self._counts.num_read += 1
                self.num_brought_tokens = max(self.num_brought_tokens, blob.end - self._known)
            finally:
                self._hold(-1, -len(data))

        self._tier.soon(bring)
        return True

    def _hold(self, num: int, num_bytes: int) -> None:
        with self._lock:
            self._num_in_hand += num
            self.num_hand_bytes += num_bytes
