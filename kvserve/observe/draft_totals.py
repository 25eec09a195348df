"""What drafts did, as JSON objects: for one request, and for all that ended since the start. The names are an
interface: scripts read them. It knows counts, never a token.
"""

import threading
from collections import Counter

from kvserve.core import Drafted, Drafting, DraftSource, JsonObject
from kvserve.requests.request_facts import RequestFacts


def speculation_body(drafting: Drafting, tokens_per_step: float | None) -> JsonObject | None:
    """What drafts did for a request; None where nothing was drafted."""
    return _body(drafting, tokens_per_step) if tokens_per_step is not None else None


def _body(drafting: Drafting, tokens_per_step: float | None) -> JsonObject:
    return {
        "num_drafted_tokens": drafting.num_drafted_tokens,
        "num_accepted_tokens": drafting.num_accepted_tokens,
        "num_steps": drafting.num_steps,
        "tokens_per_step": round(tokens_per_step, 2) if tokens_per_step is not None else None,
        "seconds_saved": round(drafting.seconds_saved, 3),
        "by_source": {
            source: {"num_drafted_tokens": each.num_tokens, "num_accepted_tokens": each.num_accepted}
            for source, each in sorted(drafting.by_source.items())
        },
    }


class DraftTotals:
    """The requests for which something was drafted, added up. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_drafted: Counter[DraftSource] = Counter()
        self._num_accepted: Counter[DraftSource] = Counter()
        self._num_steps = 0
        self._num_tokens = 0.0
        self._seconds_saved = 0.0
        self._num_failures = 0

    def add_failure(self) -> None:
        """What was done for the drafts of an answer raised something."""
        with self._lock:
            self._num_failures += 1

    def add(self, facts: RequestFacts) -> None:
        """A request is over."""
        drafting = facts.drafting
        if facts.tokens_per_step is None:
            return
        with self._lock:
            for source, each in drafting.by_source.items():
                self._num_drafted[source] += each.num_tokens
                self._num_accepted[source] += each.num_accepted
            self._num_steps += drafting.num_steps
            self._num_tokens += facts.tokens_per_step * drafting.num_steps
            self._seconds_saved += drafting.seconds_saved

    def body(self) -> JsonObject:
        """What `GET /v1/cache` and the dashboard show of it."""
        with self._lock:
            by_source = {
                source: Drafted(count, self._num_accepted[source]) for source, count in self._num_drafted.items()
            }
            drafting = Drafting(by_source, self._num_steps, self._seconds_saved)
            tokens_per_step = self._num_tokens / self._num_steps if self._num_steps else None
            return {**_body(drafting, tokens_per_step), "num_failures": self._num_failures}
