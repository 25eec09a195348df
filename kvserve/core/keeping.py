"""Who is to be forgotten, and whether a request that is under way may still leave anything behind. It knows names and
nothing of what is kept.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary


@dataclass(frozen=True, slots=True)
class Scope:
    """Who is to be forgotten: a session, whichever principal's, a principal (by its name), or a session of a principal;
    None stands for any."""

    session: str | None = None
    principal: str | None = None

    def covers(self, principal: str, session: str | None) -> bool:
        """Whether what came from this principal (by its name) in this session is meant."""
        return self.session in (None, session) and self.principal in (None, principal)


class Keeping:
    """Whether what a request leaves may be kept. The request's own: whoever keeps something of it does so within a
    `with` block, which says whether it may; whoever forgets waits for such a block and finds what it left.

        with turn.keeping as may_keep:
            if may_keep: ...
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is submitted within a block asks again
        self._is_allowed = True

    def __enter__(self) -> bool:
        self._lock.acquire()
        return self._is_allowed

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def forbid(self) -> None:
        """From now on nothing may be kept; waits for what is just being kept."""
        with self._lock:
            self._is_allowed = False


class UnderWay:
    """The requests that may still leave something, and whose they are. A request is one of them for as long as anybody
    holds it: while it waits, runs, is told of, and while its next turn is guessed. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._whose: WeakKeyDictionary[Keeping, tuple[str, str | None]] = WeakKeyDictionary()
        self._being_forgotten: list[Scope] = []

    def begin(self, keeping: Keeping, principal: str, session: str | None) -> None:
        """A request has come, of a principal (by its name) in a session; idempotent. It may keep nothing where its
        owner is being forgotten: what goes is still there to be read."""
        with self._lock:
            self._whose[keeping] = principal, session
            is_meant = any(scope.covers(principal, session) for scope in self._being_forgotten)
        if is_meant:
            keeping.forbid()

    @contextmanager
    def forgetting(self, scope: Scope) -> Iterator[None]:
        """Those who are meant are forgotten within the block: whoever of them is under way or comes until its end may
        leave nothing. What they have left so far is all there when it begins."""
        with self._lock:
            self._being_forgotten.append(scope)
        try:
            self._forbid(scope)
            yield
        finally:
            with self._lock:
                self._being_forgotten.remove(scope)

    def _forbid(self, scope: Scope) -> None:
        """Without the lock: it waits for what is just being kept. Who begins meanwhile knows the scope already."""
        with self._lock:
            meant = [keeping for keeping, whose in self._whose.items() if scope.covers(*whose)]
        for keeping in meant:
            keeping.forbid()
