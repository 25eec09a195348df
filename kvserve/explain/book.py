"""The explanations of the last requests, for whoever sent them and asks later, and how often an identity promised too
much.
"""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from itertools import islice

from kvserve.core import AGENTS, NOBODY, Drafting, Principal, RequestId
from kvserve.core.keeping import Scope
from kvserve.errors import Conflict
from kvserve.explain.explanation import Explanation

NUM_NAMED = 3
"""How many requests are named to whoever gave the beginning of several ids."""


@dataclass(frozen=True, slots=True)
class Explained:
    """A request that is over: why so much of it was reused, who sent it, in which session, and what drafts did for it
    (`tokens_per_step` None: nothing). `ended_at`: when, by `time.monotonic`."""

    explanation: Explanation
    principal: Principal = NOBODY
    session: str | None = None
    drafting: Drafting = Drafting()
    tokens_per_step: float | None = None
    ended_at: float = field(default_factory=time.monotonic)

    def is_shown_to(self, key: str) -> bool:
        """Whether who has the key with this digest may read it: an agent is everybody's who knows its name."""
        return self.principal == AGENTS or self.principal.key == key

    def belongs_to(self, scope: Scope) -> bool:
        """Whether who sent it is meant."""
        return scope.covers(str(self.principal), self.session)

    def without_text(self) -> "Explained":
        """The same without the words around a difference."""
        return replace(self, explanation=replace(self.explanation, first_difference=None))


class ExplanationBook:
    """At most `max_entries` explanations, the oldest goes first. `num_rejections`: requests whose canonical key matched
    where the model's tokens did not, and no rule says why. Safe for several threads.

    An explanation quotes a prompt: it is there for the key that the request came with. Whoever asks by a request's id
    names no user, so users of one key are not told apart.
    """

    def __init__(self, max_entries: int = 1_000) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._entries: OrderedDict[RequestId, Explained] = OrderedDict()
        self.num_rejections = 0

    def put(self, explained: Explained) -> None:
        """A request is over."""
        explanation = explained.explanation
        with self._lock:
            self._entries[explanation.request_id] = explained
            self.num_rejections += explanation.is_rejection
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def get(self, request_id: str, key: str) -> Explained | None:
        """A request of the key with this digest, by its id or by a beginning of it that no other request of that key
        has; None where it is forgotten, another key's, or never was. Raises Conflict where several begin like that."""
        with self._lock:
            whole = self._entries.get(RequestId(request_id))
            shown = [each for each in self._entries.values() if each.is_shown_to(key)]
        if whole is not None and whole.is_shown_to(key):
            return whole
        found = [each for each in shown if request_id and each.explanation.request_id.startswith(request_id)]
        if len(found) > 1:
            named = ", ".join(each.explanation.request_id for each in found[-NUM_NAMED:][::-1])
            raise Conflict(
                f"{len(found)} requests begin with {request_id!r}: give more of the id. The newest are {named}.",
                param="request_id",
            )
        return found[0] if found else None

    def last(self, key: str) -> Explained | None:
        """The newest request that came with the key of this digest and named no user: who asks for it knows no id."""
        with self._lock:
            return next((each for each in reversed(self._entries.values()) if each.principal == Principal(key)), None)

    def newest(self, max_count: int) -> list[Explanation]:
        """The last explanations of everybody, the newest first: for the operator."""
        with self._lock:
            return [each.explanation for each in islice(reversed(self._entries.values()), max_count)]

    def forget(self, scope: Scope) -> int:
        """Forget the requests of those who are meant. Returns how many there were."""
        with self._lock:
            gone = [request_id for request_id, each in self._entries.items() if each.belongs_to(scope)]
            for request_id in gone:
                del self._entries[request_id]
        return len(gone)

    def clear(self) -> None:
        """Forget everything but the count."""
        with self._lock:
            self._entries.clear()
