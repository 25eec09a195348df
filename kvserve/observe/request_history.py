"""The requests that ended last and sums of the time before, kept over a restart. It knows numbers and names, whose a
request was, and no word of it.

A request with its names belongs to somebody and is forgotten with them; the sums are nobody's and stay.
"""

import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from kvserve.core.keeping import Scope
from kvserve.observe.ended_requests import EndedRequest, from_json
from kvserve.observe.history_file import HistoryFile, StoredRows
from kvserve.observe.trace import session_label

MAX_REQUESTS = 2_000
KEEP_SECONDS = 7 * 86_400.0
TIDY_SECONDS = 600.0
"""How often requests that are too old are dropped; whoever asks sees none of them before that."""

MINUTE_SECONDS = 60
RANGES: Mapping[str, tuple[int, int]] = {"hour": (3_600, 60), "day": (86_400, 600), "week": (7 * 86_400, 3_600)}
"""What may be looked at: seconds, and seconds of one step."""


@dataclass(slots=True)
class MinuteSums:
    """The requests that ended within a minute, or a step of several, that begins `minute` minutes after the epoch."""

    minute: int
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    seconds_saved: float = 0.0
    num_prefilled_tokens: int = 0

    def add(self, other: "MinuteSums") -> None:
        """Another part of the same time."""
        self.num_requests += other.num_requests
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_cached_tokens += other.num_cached_tokens
        self.num_generated_tokens += other.num_generated_tokens
        self.seconds_saved += other.seconds_saved
        self.num_prefilled_tokens += other.num_prefilled_tokens


@dataclass(frozen=True, slots=True)
class _HistoryRow:
    """A request, and the number of its row; None: it has none."""

    ended: EndedRequest
    row: int | None


class RequestHistory:
    """At most `max_requests`, the newest, none older than a week. `folder` None keeps them until the process ends. Safe
    for several threads. Only `open`, `forget`, `clear` and `close` wait for the disk."""

    def __init__(
        self,
        folder: Path | None,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        self._clock = clock
        self._max_requests = max_requests
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, _HistoryRow] = OrderedDict()
        self._steps: dict[str, dict[int, MinuteSums]] = {name: {} for name in RANGES}
        self._num_rows = 0
        self._turns: OrderedDict[str, int] = OrderedDict()
        self._tidied_at = clock()
        self._salt = secrets.token_bytes(16)
        self._file: HistoryFile | None = None
        if folder is not None:
            self._file = HistoryFile(
                folder, report, put_all=self._put_all, expire=self._expire, make_room=self._make_room
            )

    def open(self) -> None:
        """Take in what earlier processes have left."""
        if self._file is not None:
            self._file.open(self._take)

    # --- what is added ------------------------------------------------------------------------------------------------

    def add(self, ended: EndedRequest, *, on_disk: bool) -> None:
        """A request is over; its names go to the file only where they may."""
        with self._lock:
            self._tidy()
            if ended.request_id in self._requests:
                self._drop(ended.request_id)
            turn = self._turns.get(ended.conversation, 0) + 1
            self._keep(replace(ended, turn=turn), on_disk=on_disk)
            self._shrink(self._max_requests)

    def count(self, sums: MinuteSums) -> None:
        """The numbers of a request, whoever sent it."""
        with self._lock:
            self._tidy()
            for name, steps in self._steps.items():
                begin = _begin(sums.minute, name)
                if begin not in steps:
                    self._tidy_steps(name)
                    steps[begin] = MinuteSums(begin)
                steps[begin].add(sums)
                self._put_step(name, steps[begin])

    # --- what is asked ------------------------------------------------------------------------------------------------

    @property
    def salt(self) -> bytes:
        """Goes into digests of what was said, so that nobody finds out by guessing."""
        return self._salt

    def newest(self) -> list[EndedRequest]:
        """All that are kept, the newest first."""
        with self._lock:
            self._tidy()
            oldest = self._clock() - KEEP_SECONDS
            return [each.ended for each in reversed(self._requests.values()) if each.ended.ended_at >= oldest]

    def sums(self, name: str) -> list[MinuteSums]:
        """One of `RANGES` until now, the oldest step first; steps in which nothing ended are not there."""
        with self._lock:
            oldest, newest = self._bounds(name)
            steps = self._steps[name]
            return [replace(steps[begin]) for begin in sorted(steps) if oldest <= begin <= newest]

    # --- what goes ----------------------------------------------------------------------------------------------------

    def forget(self, scope: Scope) -> bool:
        """Forget the requests of those who are meant; the sums stay. False where a file may still hold them."""
        label = session_label(scope.session) if scope.session is not None else None
        return self._forget(
            lambda each: label in (None, each.session) and scope.principal in (None, each.principal),
        )

    def clear(self) -> bool:
        """Forget all requests; the sums stay. False where a file may still hold them."""
        return self._forget(lambda each: True)

    def _forget(self, is_meant: Callable[[EndedRequest], bool]) -> bool:
        self.open()  # a file that was given up holds what earlier processes and this one have left
        with self._lock:
            for name in [name for name, each in self._requests.items() if is_meant(each.ended)]:
                self._drop(name)
            known = {each.ended.conversation for each in self._requests.values()}
            for name in [name for name in self._turns if name not in known]:
                del self._turns[name]
        return self._file is None or self._file.erase()

    def close(self) -> None:
        """Write what is left; what comes later is kept in memory only."""
        if self._file is not None:
            self._file.close()

    # --- bounds; the lock is held -------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        now = self._clock()
        if 0 <= now - self._tidied_at < TIDY_SECONDS:
            return
        self._tidied_at = now
        for name in [name for name, each in self._requests.items() if each.ended.ended_at < now - KEEP_SECONDS]:
            self._drop(name)
        for name in self._steps:
            self._tidy_steps(name)

    def _tidy_steps(self, name: str) -> None:
        oldest, newest = self._bounds(name)
        for begin in [begin for begin in self._steps[name] if not oldest <= begin <= newest]:
            del self._steps[name][begin]
            if self._file is not None:
                self._file.drop("step", _step_key(name, begin))

    def _bounds(self, name: str) -> tuple[int, int]:
        """The first and the last step of a range, by the clock of now: it may have been wrong before."""
        num_seconds, step_seconds = RANGES[name]
        newest = _begin(int(self._clock()) // MINUTE_SECONDS, name)
        return newest - (num_seconds - step_seconds) // MINUTE_SECONDS, newest

    def _shrink(self, num_requests: int) -> None:
        while len(self._requests) > num_requests:
            self._drop(next(iter(self._requests)))

    # --- rows; the lock is held ---------------------------------------------------------------------------------------

    def _keep(self, ended: EndedRequest, *, on_disk: bool) -> None:
        row = self._num_rows if on_disk else None
        self._requests[ended.request_id] = _HistoryRow(ended, row)
        self._count_turn(ended)
        if row is not None:
            self._num_rows += 1
            self._put(ended, row)

    def _count_turn(self, ended: EndedRequest) -> None:
        self._turns[ended.conversation] = max(ended.turn, self._turns.get(ended.conversation, 0))
        self._turns.move_to_end(ended.conversation)
        while len(self._turns) > self._max_requests:
            self._turns.popitem(last=False)

    def _put(self, ended: EndedRequest, row: int) -> None:
        if self._file is not None:
            self._file.put("ended request", _key(row), lambda: ended.as_json().encode())

    def _drop(self, name: str) -> None:
        gone = self._requests.pop(name)
        if gone.row is not None and self._file is not None:
            self._file.drop("ended request", _key(gone.row))

    def _put_step(self, name: str, sums: MinuteSums) -> None:
        if self._file is not None:
            body = json.dumps(astuple(sums)).encode()
            self._file.put("step", _step_key(name, sums.minute), lambda: body)

    # --- the file -----------------------------------------------------------------------------------------------------

    def _take(self, rows: StoredRows) -> None:
        """What the file holds comes before what this process has seen. Raises ValueError, and has changed nothing."""
        now = self._clock()
        stored = [(int.from_bytes(key), from_json(body)) for key, body in sorted(rows.get("ended request", ()))]
        steps = [(key, _sums_of(key, body)) for key, body in rows.get("step", ())]
        salts = [body for _, body in rows.get("salt", ())]
        with self._lock:
            seen, self._requests = self._requests, OrderedDict()
            for row, ended in stored:
                at = min(ended.ended_at, now)  # a clock that was wrong does not keep it for ever
                self._requests[ended.request_id] = _HistoryRow(replace(ended, ended_at=at), row)
                self._count_turn(ended)
            self._num_rows = stored[-1][0] + 1 if stored else 0
            for name, each in seen.items():
                if name in self._requests:
                    self._drop(name)
                self._keep(each.ended, on_disk=each.row is not None)
            for name, own in self._steps.items():
                for sums in own.values():
                    self._put_step(name, sums)
                for key, sums in steps:
                    if key == _step_key(name, sums.minute):
                        own.setdefault(sums.minute, sums)
            if salts:
                self._salt = salts[0]
            elif self._file is not None:
                self._file.put("salt", b"", lambda: self._salt)
            self._tidied_at = now - TIDY_SECONDS
            self._tidy()
            self._shrink(self._max_requests)

    def _put_all(self) -> None:
        """Everything, into a new file."""
        with self._lock:
            for each in self._requests.values():
                if each.row is not None:
                    self._put(each.ended, each.row)
            for name, steps in self._steps.items():
                for sums in steps.values():
                    self._put_step(name, sums)
            if self._file is not None:
                self._file.put("salt", b"", lambda: self._salt)

    def _expire(self) -> None:
        with self._lock:
            self._tidy()

    def _make_room(self) -> None:
        with self._lock:
            self._shrink(len(self._requests) // 2)


def _begin(minute: int, name: str) -> int:
    step = RANGES[name][1] // MINUTE_SECONDS
    return minute // step * step


def _key(number: int) -> bytes:
    return number.to_bytes(8)


def _step_key(name: str, begin: int) -> bytes:
    return f"{name} {begin}".encode()


def _sums_of(key: bytes, body: bytes) -> MinuteSums:
    """Raises ValueError."""
    values = json.loads(body)
    is_whole = isinstance(values, list) and len(values) == 7 and all(isinstance(each, int | float) for each in values)
    if not is_whole:
        raise ValueError(f"these are no sums: {key!r}")
    return MinuteSums(*values)
