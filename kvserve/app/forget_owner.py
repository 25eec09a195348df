"""Forgets who is to be forgotten, everywhere: what is under way, guesses, drafts, records, KV, responses, explanations,
traces.

    forbid what is under way, and what comes until the end, to leave anything
    -> the shared cache -> responses -> memos, guesses and drafts -> records -> KV -> what was told of requests

It joins rooms per process; each of them knows how to forget its own.
"""

import contextlib
from functools import partial

from kvserve.app.model_pool import ModelPool
from kvserve.cache.shared_cache import SharedCache
from kvserve.core import JsonObject, Turn
from kvserve.core.keeping import Scope, UnderWay
from kvserve.engine.cache_records import ForgottenKv
from kvserve.errors import BadRequest, NotReady
from kvserve.identity.owner import belongs_to
from kvserve.observe.observability import Observability
from kvserve.protocols.responses_store import ResponseStore
from kvserve.warming.speculative_prefill import SpeculativePrefill

NO_SESSIONS = (
    "session: with CACHE_SESSION_PARTITIONING=false the sessions of a principal share their records and KV, so none "
    "can be forgotten alone. Forget the principal (?principal=NAME), or empty the cache (DELETE /v1/cache)."
)


class Forgetting:
    """The one that forgets, for one process. Any thread may call it."""

    def __init__(
        self,
        pool: ModelPool,
        next_turns: SpeculativePrefill | None,
        responses: ResponseStore,
        observability: Observability,
        shared: SharedCache | None,
        *,
        parts_sessions: bool,
    ) -> None:
        """`parts_sessions`: what is kept names the session that it came from, beside the principal. `shared`: the cache
        that other servers share, if there is one."""
        self._shared = shared
        self._parts_sessions = parts_sessions
        self._pool = pool
        self._next_turns = next_turns
        self._responses = responses
        self._observability = observability
        self._under_way = UnderWay()

    def begin(self, turn: Turn) -> None:
        """A turn has come: whoever forgets its owner from now on, or is about to, takes along what it leaves.
        Idempotent."""
        self._under_way.begin(turn.keeping, str(turn.session.principal), turn.session.session_id)

    def hear(self, scope: Scope) -> bool:
        """Forget whom another server was told to forget; whether all of it is gone here. What cannot be forgotten here,
        as sessions are not kept apart, was not written by this server under such a name either."""
        if scope.session is not None and not self._parts_sessions:
            return True
        return bool(self.forget(scope, is_heard=True)["is_done"])

    def clear(self) -> bool:
        """Forget everything that is kept; False where the dashboard's file or the shared cache may still hold some.
        Raises NotReady."""
        if self._shared is None:
            return self._clear()
        support = self._pool.loaded.engine.status.cache_support
        keeps_none = support is not None and not support.can_keep  # so it has none there either
        with self._shared.clearing() as is_gone:
            return self._clear() and (is_gone or keeps_none)

    def _clear(self) -> bool:
        served = self._pool.loaded
        is_unnamed = served.engine.digest.status.reason
        if is_unnamed or any(known.conversations.awaits_archive for known in self._pool.known()):
            self._pool.forget_records(Scope())  # which file of records is theirs is not known
        for known in self._pool.known():
            known.clear()
        is_done = self._observability.clear()
        if self._next_turns is not None:
            self._next_turns.clear()
        served.engine.clear_cache()
        return is_done

    def forget(self, scope: Scope, *, is_heard: bool = False) -> JsonObject:
        """Forget what is kept of those who are meant; what of them is under way, or comes meanwhile, is answered and
        leaves nothing. Returns how much that was; `is_done`: it is gone from every file, also from those of models that
        are not loaded. Raises BadRequest where a session is meant and none is known by its name: half of it would
        stay. `is_heard`: another server was told, and tells this one."""
        if scope.session is not None and not self._parts_sessions:
            raise BadRequest(NO_SESSIONS, param="session")
        with self._under_way.forgetting(scope):  # around all else: nothing is added to what goes
            if self._shared is None:
                return self._forget(scope)
            with self._shared.forgetting(scope, is_heard=is_heard) as is_gone:  # nor brought back from there
                gone = self._forget(scope)
            return {**gone, "is_done": gone["is_done"] and is_gone}

    def _forget(self, scope: Scope) -> JsonObject:
        # first: a request that is being read has what it goes on from before it begins
        num_responses = self._responses.forget(scope)
        if self._next_turns is not None:
            self._next_turns.forget()
        for known in self._pool.known():
            known.clear_memos()
            if known.drafts is not None:
                known.drafts.forget(scope)
        gone = self._pool.forget_records(scope)
        kept = ForgottenKv(is_done=False)  # as long as the engine does not say otherwise
        with contextlib.suppress(NotReady):
            kept = self._pool.loaded.engine.forget(partial(belongs_to, scope=scope))
        told = self._observability.forget(scope)
        return {
            **told,
            "num_sessions": sum(each.num_sessions for each in gone),
            "num_messages": sum(each.num_messages for each in gone),
            "num_tokens": kept.num_tokens,
            "ram_bytes": kept.num_ram_bytes,
            "disk_bytes": kept.num_disk_bytes,
            "is_done": bool(told["is_done"]) and kept.is_done and all(each.is_done for each in gone),
            "num_responses": num_responses,
        }
