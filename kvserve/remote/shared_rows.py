"""Small rows in the shared server, each a field of a hash: sent behind whoever leaves them, read while a request waits,
for half a second at most. It knows names and bytes, not what a row says.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from kvserve.remote.redis_link import Command, Link, LinkFailed, LinkRefusal, Reply
from kvserve.remote.shared_server import HEAR_SECONDS, SharedServer, Steps, Task

READ_SECONDS = 0.5
"""So long a request waits for all its rows."""

SEND_SECONDS = 10.0
"""So long one bite of a path may take to be sent."""

AGAIN_SECONDS = HEAR_SECONDS + SEND_SECONDS + 3.0
"""By then every server has heard whom to forget, and removed what it sent before it did."""

FORGOTTEN_SECONDS = AGAIN_SECONDS + 5.0
"""So long nothing is read of whom we forgot: until others have heard it they may send what they know."""

ROWS_AT_ONCE = 64
BITE_BYTES = 256 * 2**10
"""A bite of a path is no larger, but for a single row; others go between two bites."""

REFRESHED_AT_ONCE = 1024
MAX_TRIES = 3
"""A path whose sending broke a connection so often is dropped: nothing behind it would ever be sent."""

KEYS_AT_ONCE = 64
"""So many hashes are read in one exchange; others may go between two."""

MAX_FIELDS = 8
"""A place where more was read or written is not gone on from."""

MAX_JOBS = 256
MAX_QUEUED_BYTES = 64 * 2**20
"""Paths that wait hold no more of what was said, also while the server is gone."""

MAX_NOTED = 131_072
SILENT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RowToSend:
    """A field of a hash. `mark` is equal for equal rows; `make` gives the field and its bytes once they are needed,
    None: nothing is to be sent. `num_bytes`: about so much of memory it holds meanwhile."""

    key: str
    mark: int
    make: Callable[[], tuple[str, bytes] | None]
    num_bytes: int = 0


type _Made = tuple[RowToSend, str, bytes]


@dataclass(slots=True, eq=False)
class _Job:
    """A path that waits to be sent, until then at most."""

    rows: tuple[RowToSend, ...]
    until: float
    num_bytes: int
    num_failures: int = 0


@dataclass(slots=True, eq=False)
class RowCounts:
    """What was sent and read; at `num_crowded` places there were more than `MAX_FIELDS`. Each number
    has one thread that counts it, or is counted under the lock."""

    num_sent: int = 0
    num_sent_bytes: int = 0
    num_dropped: int = 0
    num_reads: int = 0
    num_given_up: int = 0
    num_crowded: int = 0


class SharedRows:
    """All rows of a process. `seconds`: what nobody sends or refreshes for so long goes there. Any thread may call
    `send` and `read`; `next_put` belongs to the puts thread."""

    def __init__(self, server: SharedServer, seconds: int) -> None:
        self.server = server
        self.counts = RowCounts()
        self._seconds = seconds
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._noted: dict[str, int] = {}
        self._num_drops = 0
        self._forgotten: list[tuple[float, Callable[[str], bool]]] = []

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, rows: Sequence[RowToSend]) -> None:
        """Have the rows of a path there: those that are not are sent, the others stay for longer. Waits for nothing."""
        if not rows:
            return
        marks = {row.key: row.mark for row in rows}
        with self._lock:
            # the path that this one goes on from, unless it says of a message what this one does not
            for job in [job for job in self._jobs if all(marks.get(row.key) == row.mark for row in job.rows)]:
                self._jobs.remove(job)
            num_bytes = sum(row.num_bytes for row in rows)
            self._jobs.append(_Job(tuple(rows), time.monotonic() + self._seconds, num_bytes))
            self._bound()
        self.server.nudge()

    @property
    def num_queued(self) -> int:
        """Paths that wait to be sent."""
        return len(self._jobs)

    def next_put(self) -> Task | None:
        """The path that is to be sent next. On the puts thread."""
        with self._lock:
            self._bound()
            return Task(self._steps(self._jobs[0])) if self._jobs else None

    def _bound(self) -> None:
        """Drop what would be gone there by now, and of too much the oldest. Under the lock."""
        now, num_bytes = time.monotonic(), sum(job.num_bytes for job in self._jobs)
        while self._jobs:
            is_over = len(self._jobs) > MAX_JOBS or num_bytes > MAX_QUEUED_BYTES
            if not is_over and self._jobs[0].until > now:
                return
            num_bytes -= self._jobs.popleft().num_bytes
            self.counts.num_dropped += 1

    def _steps(self, job: _Job) -> Steps:
        """A bite in each step. What was taken is noted: a path that is broken off goes on there. Raises LinkFailed;
        then it is tried again, but not for ever."""
        num_refused = 0
        try:
            waiting = deque((yield from self._missing(job)))
            while waiting and self._is_queued(job):
                bite = self._bite(waiting)
                num_refused += (refused := self._put(bite))
                if bite and refused == len(bite):
                    break
                if waiting:
                    yield 0.0
        except LinkFailed:
            job.num_failures += 1
            if job.num_failures >= MAX_TRIES:
                self._leaves(job, is_dropped=True)
            raise
        self._leaves(job, is_dropped=num_refused > 0)

    def _is_queued(self, job: _Job) -> bool:
        """Not where somebody was forgotten between two bites, or the path has gone on."""
        with self._lock:
            return job in self._jobs

    def _leaves(self, job: _Job, *, is_dropped: bool) -> None:
        with self._lock:
            self.counts.num_dropped += is_dropped
            if job in self._jobs:
                self._jobs.remove(job)

    def _missing(self, job: _Job) -> Generator[float, None, list[RowToSend]]:
        """The rows that are not there, in order; the others stay for longer."""
        with self._lock:
            noted = [row.key for row in job.rows if self._noted.get(row.key) == row.mark]
        kept = set[str]()
        for first in range(0, len(noted), REFRESHED_AT_ONCE):
            keys = noted[first : first + REFRESHED_AT_ONCE]
            commands = [("EXPIRE", key, self._seconds) for key in keys]
            replies = self.server.puts_link.run(commands, time.monotonic() + SEND_SECONDS)
            kept.update(key for key, reply in zip(keys, replies, strict=True) if reply == 1)
            yield 0.0
        return [row for row in job.rows if row.key not in kept]

    def _bite(self, waiting: deque[RowToSend]) -> list[_Made]:
        """The first of these, as many as go in one exchange."""
        bite, num_bytes = list[_Made](), 0
        while waiting and len(bite) < ROWS_AT_ONCE:
            found = self.server.survived(waiting[0].make, None)
            if found is not None and bite and num_bytes + len(found[1]) > BITE_BYTES:
                break
            row = waiting.popleft()
            if found is not None:
                bite.append((row, *found))
                num_bytes += len(found[1])
        return bite

    def _put(self, bite: Sequence[_Made]) -> int:
        """Send these, each with the time after which it goes, or none; returns how many the server refused."""
        if not bite:
            return 0
        commands: list[Command] = [("MULTI",)]
        for row, field, body in bite:
            commands += [("HSET", row.key, field, body), ("EXPIRE", row.key, self._seconds)]
        link, until = self.server.puts_link, time.monotonic() + SEND_SECONDS
        begun, *_, done = replies = link.run([*commands, ("EXEC",)], until)
        if isinstance(begun, LinkRefusal):  # each was done by itself then, the time perhaps not
            link.run([("UNLINK", row.key) for row, _, _ in bite], until)
        if isinstance(done, LinkRefusal):
            self.server.is_refused(next(reply for reply in replies if isinstance(reply, LinkRefusal)))
            return len(bite)
        if not isinstance(done, list) or len(done) != 2 * len(bite):
            raise LinkFailed("strange", "a transaction has other replies than commands")
        return self._note_taken(bite, done)

    def _note_taken(self, bite: Sequence[_Made], replies: Sequence[Reply]) -> int:
        """Note what is there now; returns how many were refused."""
        refusals = [reply for reply in replies[::2] if isinstance(reply, LinkRefusal)]
        if refusals:
            self.server.is_refused(refusals[0])
        with self._lock:
            if len(self._noted) + len(bite) > MAX_NOTED:
                self._noted.clear()
            for (row, _, body), reply in zip(bite, replies[::2], strict=True):
                if not isinstance(reply, LinkRefusal):
                    self._noted[row.key] = row.mark
                    self.counts.num_sent += 1
                    self.counts.num_sent_bytes += len(body)
        return len(refusals)

    def drop(self, is_meant: Callable[[str], bool]) -> None:
        """What waits to be sent under keys that are meant is not sent, what is being read is not given, and nothing of
        them is read for a while: who has not heard yet may send it again. From any thread."""
        now = time.monotonic()
        with self._lock:
            self._num_drops += 1
            lately = [each for each in self._forgotten if each[0] > now]
            self._forgotten = [*lately, (now + FORGOTTEN_SECONDS, is_meant)]
            for job in [job for job in self._jobs if is_meant(job.rows[0].key)]:
                self._jobs.remove(job)
            for key in [key for key in self._noted if is_meant(key)]:
                del self._noted[key]

    def _is_forgotten(self, key: str) -> bool:
        """Whether nothing is read there yet. Under the lock."""
        now = time.monotonic()
        return any(until > now and is_meant(key) for until, is_meant in self._forgotten)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, keys: Sequence[str]) -> list[Mapping[str, bytes]]:
        """The fields of each of these hashes, up to the first that is not there or did not come in time."""
        if not keys or not self.server.is_open:
            return []
        with self._lock:
            num_drops = self._num_drops
            if self._is_forgotten(keys[0]):  # all of one conversation
                return []
        reading = _RowReading(self.server, keys)
        self.server.ask(Task(reading.steps(self.server.asks_link), reading.has_ended.set, is_urgent=True))
        is_late = not reading.has_ended.wait(READ_SECONDS)
        reading.is_over = True
        if is_late:
            self.server.hang_up(READ_SECONDS if reading.has_begun else SILENT_SECONDS)
        with self._lock:
            found = list(reading.found) if num_drops == self._num_drops else []
            counts = self.counts
            counts.num_reads += 1
            counts.num_given_up += is_late
            counts.num_crowded += reading.is_crowded
        return found


class _RowReading:
    """One request's; `found` grows on the asks thread."""

    def __init__(self, server: SharedServer, keys: Sequence[str]) -> None:
        self._server = server
        self._keys = keys
        self._until = time.monotonic() + READ_SECONDS
        self.found: list[Mapping[str, bytes]] = []
        self.has_begun = self.is_over = self.is_crowded = False
        self.has_ended = threading.Event()

    def steps(self, link: Link) -> Steps:
        """Raises LinkFailed."""
        for first in range(0, len(self._keys), KEYS_AT_ONCE):
            if self.is_over:
                return
            self.has_begun = True
            replies = link.run([("HGETALL", key) for key in self._keys[first : first + KEYS_AT_ONCE]], self._until)
            for reply in replies:
                fields = self._fields(reply)
                if not fields:
                    return
                self.found.append(fields)
            yield 0.0

    def _fields(self, reply: Reply) -> Mapping[str, bytes]:
        """What a hash holds; nothing for what is none."""
        if isinstance(reply, list) and all(isinstance(each, bytes) for each in reply):
            names = [name.decode("ascii", "backslashreplace") for name in reply[::2]]
            self.is_crowded = len(names) > MAX_FIELDS
            return {} if self.is_crowded else dict(zip(names, reply[1::2], strict=False))
        if isinstance(reply, LinkRefusal):  # a right that we lack, or another program's value
            self._server.is_refused(reply)
        else:
            self._server.lied("a row of a conversation is something else")
        return {}
