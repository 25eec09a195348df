"""Which branches a session's conversations have, and where each left another. Content decides; a session id is a hint.

    main      s - u - a - u - a - u - a        a strict append moves a branch's tip
    rewound           `- u'- a'                anything else begins a branch where it leaves the one it shares most with
    helper    s'- u"- a"                       another conversation under the same id moves no tip

This file knows chain digests and token offsets, neither messages nor what is kept for them.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import NewType

from kvserve.sessions.journal import UNWRITTEN, Journal, Rows, number_key
from kvserve.sessions.message_rows import digest_of, dump, items, number, parse, seconds, text_of

SessionKey = NewType("SessionKey", str)
BranchId = NewType("BranchId", int)

HINT_TOKENS = 128
NAMED = "id:"
"""The prefix of the key of a session with a name."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A line of conversation. It left `parent_id` (which may be dropped by now; None: it shares nothing) after
    `fork_message_index` messages, at `fork_token_offset` of its own model tokens. `last_used` is in the caller's
    seconds."""

    branch_id: BranchId
    parent_id: BranchId | None
    fork_message_index: int
    fork_token_offset: int
    num_turns: int
    num_messages: int
    num_tokens: int
    last_used: float


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session and its branches, least recently used first."""

    key: SessionKey
    branches: tuple[Branch, ...]
    last_used: float


@dataclass(frozen=True, slots=True)
class LineageTotals:
    """How many sessions and branches are known."""

    num_sessions: int
    num_branches: int


@dataclass(slots=True)
class _Line:
    """`until` is when the branch's row may be dropped, in seconds since the epoch; None: it has no row."""

    branch: Branch
    chains: list[bytes]
    until: float | None = None


@dataclass(slots=True)
class _Session:
    lines: OrderedDict[BranchId, _Line] = field(default_factory=OrderedDict)
    holders: dict[bytes, dict[BranchId, None]] = field(default_factory=dict)
    last_used: float = 0.0


def session_key(session_id: str | None, ids: Sequence[int]) -> SessionKey:
    """The client's id, else a hash of the first 128 model tokens: a hint, which two windows may share."""
    if session_id:
        return SessionKey(f"{NAMED}{session_id}")
    return SessionKey(f"tokens:{hashlib.sha256(array('I', ids[:HINT_TOKENS]).tobytes()).hexdigest()[:16]}")


class SessionIndex:
    """Bounded in sessions, branches per session and messages in all; the least recently used are dropped first.
    Thread-safe.

    `idle_seconds`: a session that was not used for so long is dropped; 0 = never.
    """

    def __init__(
        self,
        *,
        max_sessions: int = 256,
        max_branches_per_session: int = 64,
        max_messages: int = 200_000,
        idle_seconds: float = 1_800.0,
        journal: Journal = UNWRITTEN,
    ) -> None:
        self._max_sessions = max_sessions
        self._max_branches = max_branches_per_session
        self._max_messages = max_messages
        self._idle_seconds = idle_seconds
        self._journal = journal
        self._lock = threading.Lock()
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()
        self._next_id = 1
        self._num_messages = 0
        self._num_written = 0

    def advance(
        self,
        key: SessionKey,
        chains: Sequence[bytes],
        *,
        num_tokens: int,
        ends: Sequence[int],
        now: float,
        until: float | None = None,
    ) -> Branch:
        """Note an answered request; returns its branch as it is now.

        `chains[i]` names the conversation up to and with message i, the answer included; `ends[i]` is the offset in
        model tokens where that message ends. A conversation that continues a branch's tip moves it, one that ends
        inside a branch leaves it, any other begins a branch. `until`: its row is kept so long at least, in seconds
        since the epoch; None: this request is not written down. Raises ValueError for no message, or for ends that do
        not belong to the chains.
        """
        if not chains or len(chains) != len(ends):
            raise ValueError(f"{len(chains)} messages with {len(ends)} ends")
        first_ends: dict[bytes, int] = {}
        for chain, end in zip(chains, ends, strict=True):  # a message without identity repeats the chain
            first_ends.setdefault(chain, end)
        path, path_ends = list(first_ends), list(first_ends.values())
        with self._lock:
            self._drop_idle(now)
            session = self._sessions.setdefault(key, _Session())
            self._sessions.move_to_end(key)
            session.last_used = now
            line = self._line_for(session, path, path_ends, num_tokens)
            line.branch = replace(line.branch, num_turns=line.branch.num_turns + 1, last_used=now)
            session.lines.move_to_end(line.branch.branch_id)
            if until is not None:
                line.until = until if line.until is None else max(line.until, until)
                self._put(key, line)
            self._shrink(session)
            return line.branch

    def sessions(self, now: float) -> tuple[SessionView, ...]:
        """All sessions with their branches, least recently used first."""
        with self._lock:
            self._drop_idle(now)
            return tuple(
                SessionView(key, tuple(line.branch for line in session.lines.values()), session.last_used)
                for key, session in self._sessions.items()
            )

    def totals(self, now: float) -> LineageTotals:
        """How many sessions and branches there are."""
        with self._lock:
            self._drop_idle(now)
            return LineageTotals(len(self._sessions), sum(len(session.lines) for session in self._sessions.values()))

    def forget(self, is_gone: Callable[[SessionKey], bool]) -> int:
        """Delete these sessions; returns how many."""
        with self._lock:
            gone = [key for key in self._sessions if is_gone(key)]
            for key in gone:
                self._forget_session(key)
            return len(gone)

    def clear(self) -> None:
        """Delete all sessions. Branch ids are not given twice."""
        with self._lock:
            for key in list(self._sessions):
                self._forget_session(key)

    def load(self, rows: Rows) -> None:
        """Take in what was written down; this index must be empty. Raises ValueError for rows of another form."""
        found = [_stored_branch(key, body) for key, body in rows.get("branch", ())]
        next_ids = [int.from_bytes(body) for _, body in rows.get("counter", ())]
        with self._lock:
            self._next_id = max([self._next_id, *next_ids, *(stored.line.branch.branch_id + 1 for stored in found)])
            self._num_written = max((stored.serial + 1 for stored in found), default=0)
            for stored in sorted(found, key=lambda stored: stored.line.branch.branch_id):
                session, line = self._sessions.setdefault(stored.key, _Session()), stored.line
                session.lines[line.branch.branch_id] = line
                path, line.chains = line.chains, []
                self._append(session, line, path)
            for stored in sorted(found, key=lambda stored: stored.serial):
                session = self._sessions[stored.key]
                session.last_used = stored.line.branch.last_used
                session.lines.move_to_end(stored.line.branch.branch_id)
                self._sessions.move_to_end(stored.key)

    def put_all(self) -> None:
        """Tell the journal everything that has a row."""
        with self._lock:
            self._put_counter()
            for key, session in self._sessions.items():
                for line in session.lines.values():
                    if line.until is not None:
                        self._put(key, line)

    def expire(self, now: float) -> None:
        """Drop the branches whose rows have expired."""
        with self._lock:
            for key, session in list(self._sessions.items()):
                for branch_id, line in list(session.lines.items()):
                    if line.until is not None and line.until < now:
                        self._forget_branch(session, branch_id)
                if not session.lines:
                    self._forget_session(key)

    def _put(self, key: SessionKey, line: _Line) -> None:
        body = partial(_branch_body, key, line.branch, tuple(line.chains), line.until, self._num_written)
        self._num_written += 1
        self._journal.put("branch", number_key(line.branch.branch_id), body)

    def _put_counter(self) -> None:
        self._journal.put("counter", b"branch", partial(number_key, self._next_id))

    # --- branches -----------------------------------------------------------------------------------------------------

    def _line_for(self, session: _Session, path: list[bytes], ends: list[int], num_tokens: int) -> _Line:
        shared = next((index for index in range(len(path), 0, -1) if path[index - 1] in session.holders), 0)
        holders = list(session.holders[path[shared - 1]]) if shared else []
        tips = [branch_id for branch_id in holders if len(session.lines[branch_id].chains) == shared]
        if shared == len(path):
            return session.lines[holders[0]]
        if tips:
            line = session.lines[tips[0]]
        else:
            parent_id = holders[0] if holders else None
            fork_offset = ends[shared - 1] if shared else 0
            branch = Branch(BranchId(self._next_id), parent_id, shared, fork_offset, 0, 0, 0, 0.0)
            self._next_id += 1
            self._put_counter()
            line = session.lines[branch.branch_id] = _Line(branch, [])
        self._append(session, line, path)
        line.branch = replace(line.branch, num_messages=len(path), num_tokens=num_tokens)
        return line

    def _append(self, session: _Session, line: _Line, path: list[bytes]) -> None:
        for chain in path[len(line.chains) :]:
            session.holders.setdefault(chain, {})[line.branch.branch_id] = None
            line.chains.append(chain)
            self._num_messages += 1

    def _forget_branch(self, session: _Session, branch_id: BranchId) -> None:
        line = session.lines.pop(branch_id)
        if line.until is not None:
            self._journal.drop("branch", number_key(branch_id))
        self._num_messages -= len(line.chains)
        for chain in line.chains:
            holders = session.holders[chain]
            del holders[branch_id]
            if not holders:
                del session.holders[chain]

    # --- bounds -------------------------------------------------------------------------------------------------------

    def _shrink(self, current: _Session) -> None:
        """The branch in use is dropped last, and stays even where it alone is over the bound."""
        while len(current.lines) > self._max_branches:
            self._forget_branch(current, next(iter(current.lines)))
        while len(self._sessions) > self._max_sessions:
            self._forget_session(next(iter(self._sessions)))
        while self._num_messages > self._max_messages:
            key, oldest = next(iter(self._sessions.items()))
            if len(oldest.lines) > 1:
                self._forget_branch(oldest, next(iter(oldest.lines)))
            elif oldest is not current:
                self._forget_session(key)
            else:
                break

    def _forget_session(self, key: SessionKey) -> None:
        session = self._sessions.pop(key)
        for branch_id in list(session.lines):
            self._forget_branch(session, branch_id)

    def _drop_idle(self, now: float) -> None:
        while self._idle_seconds and self._sessions:
            key, oldest = next(iter(self._sessions.items()))
            if now - oldest.last_used <= self._idle_seconds:
                return
            self._forget_session(key)


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    """A row: the branch, its session, and its serial, which is higher at every write."""

    key: SessionKey
    line: _Line
    serial: int


def _branch_body(key: SessionKey, branch: Branch, chains: Sequence[bytes], until: float | None, serial: int) -> bytes:
    row = {"serial": serial, "session": key, **asdict(branch), "chains": [chain.hex() for chain in chains]}
    del row["branch_id"]  # is the key
    return dump({**row, "until": until})


def _stored_branch(key: bytes, body: bytes) -> _Stored:
    """Raises ValueError for a row of another form."""
    row = parse(body)
    parent_id = row.get("parent_id")
    branch = Branch(
        BranchId(int.from_bytes(key)),
        None if parent_id is None else BranchId(number(parent_id)),
        number(row.get("fork_message_index")),
        number(row.get("fork_token_offset")),
        number(row.get("num_turns")),
        number(row.get("num_messages")),
        number(row.get("num_tokens")),
        seconds(row.get("last_used")),
    )
    chains = [digest_of(chain) for chain in items(row.get("chains"))]
    line = _Line(branch, chains, seconds(row.get("until")))
    return _Stored(SessionKey(text_of(row.get("session"))), line, number(row.get("serial")))
