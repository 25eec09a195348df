"""What kvserve sees of its own requests and tells of them: request lines, traces, explanations, numbers.

    started -> runs, as others can watch it -> finished: counted, traced, and one line in the terminal

It joins rooms, and is where a request's text ends: numbers, sessions' names and causes go to `/metrics` and to the
dashboard; the text around a difference only where DASHBOARD_SHOW_TEXT allows it.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvserve.canonical.canonicalise import canonicalise, chain
from kvserve.core import JsonObject, Turn
from kvserve.core.keeping import Scope
from kvserve.errors import NotFound, RequestError
from kvserve.explain.book import Explained, ExplanationBook
from kvserve.explain.words import clause
from kvserve.identity.owner import belongs_to, is_telling
from kvserve.observe.dashboard import Activity, Look, Past, dashboard_body
from kvserve.observe.draft_totals import DraftTotals, speculation_body
from kvserve.observe.ended_requests import ended_request
from kvserve.observe.metrics import Metrics, Reading, readings
from kvserve.observe.overview import timeline
from kvserve.observe.reports import explanation_body, image_line, trace_fields
from kvserve.observe.request_history import MINUTE_SECONDS, MinuteSums, RequestHistory
from kvserve.observe.savings import Savings
from kvserve.observe.terminal import Terminal
from kvserve.observe.trace import TraceLimits, TraceLog
from kvserve.requests.answer_facts import raw_digests
from kvserve.requests.request_facts import RequestFacts
from kvserve.requests.turn_facts import FinishedTurn, Observer, WatchedTurn
from kvserve.sessions.digest_lru import DigestLru
from kvserve.sessions.lineage import BranchId

SESSION_HASH_TOKENS = 128
LOOK_SECONDS = 0.9
"""Whoever watches shares one look at the server in so many seconds: watching costs the same for one and for many."""

MAX_BRANCHES = 4_096


@dataclass(frozen=True, slots=True)
class Reader:
    """Which model has read something, and whose request it was (`Owner.name`)."""

    model: str
    owner: str


@dataclass(frozen=True, slots=True)
class ObservabilitySettings:
    """What the operator decides: traces and for how many days (0: for ever), explanations kept, whether the dashboard
    may show what was said, whether a line tells where the images of a prompt were cut, and the folder that has what the
    dashboard shows of earlier requests (None: in memory only)."""

    log_root: Path
    writes_traces: bool
    num_trace_days: int
    num_explanations: int
    shows_text: bool
    shows_image_cuts: bool = False
    history_folder: Path | None = None


class Observability:
    """Everything that one process knows of its requests besides serving them. Safe for several threads.

    `look` says how the server is at the moment; it may block for one step of the engine.
    """

    def __init__(self, settings: ObservabilitySettings, terminal: Terminal, look: Callable[[], Look]) -> None:
        self._settings = settings
        self._terminal = terminal
        self._look = look
        self._trace = TraceLog(
            settings.log_root,
            settings.writes_traces,
            time.time,
            terminal.error,
            TraceLimits(max_days=settings.num_trace_days),
        )
        self._explanations = ExplanationBook(settings.num_explanations)
        self._activity = Activity()
        self._metrics = Metrics(self._readings)
        self._drafts = DraftTotals()
        self._savings = Savings()
        self._history = RequestHistory(settings.history_folder, terminal.error)
        self._readers: DigestLru[Reader] = DigestLru()
        self._lock = threading.Lock()
        self._last_of_branch: OrderedDict[tuple[str, BranchId], Explained] = OrderedDict()
        self._looking = threading.Lock()
        self._seen_at = 0.0
        self._seen: JsonObject = {}

    def open(self) -> None:
        """Take in what earlier processes have kept of their requests; may wait for a process that is just ending."""
        self._history.open()

    # --- requests -----------------------------------------------------------------------------------------------------

    def observer(self) -> Observer:
        """Who hears of every request."""
        terminal = self._terminal
        return Observer(
            terminal.prefill, self.finished, self.started, terminal.awaits, self._other_model, self.drafts_failed
        )

    def started(self, running: WatchedTurn) -> None:
        """A request waits for the engine."""
        self._activity.begin(running)

    def finished(self, finished: FinishedTurn) -> None:
        """A request is over: count it, trace it, and write its line. Where its owner was forgotten since it came only
        numbers and the line are left of it."""
        explanation = finished.explanation
        saved = self._savings.seconds_saved(finished.facts)
        cause = clause(explanation) if explanation is not None else None
        facts = replace(finished.facts, cause=cause, seconds_saved=saved)
        finished = replace(finished, facts=facts)
        self._activity.end(facts)
        self._metrics.add(facts, explanation.cause if explanation is not None else None)
        self._drafts.add(facts)
        if facts.drafting.failure:
            self.drafts_failed(facts.drafting.failure)
        self._history.count(_sums(facts))
        with finished.turn.keeping as may_keep:
            if may_keep:
                self._keep(finished)
        self._terminal.request_line(facts)
        if (branch := finished.branch) is not None:
            key, parent = (facts.model, branch.branch_id), (facts.model, branch.parent_id)
            if self._savings.is_first_warm(facts, key, parent):
                self._terminal.warm(facts, branch.num_turns)
        if self._settings.shows_image_cuts and finished.prompt.tokens.images:
            self._terminal.note(image_line(facts, finished.prompt.tokens))

    def _keep(self, finished: FinishedTurn) -> None:
        """For those who ask later: why so much was reused, which model read it, and the trace."""
        explanation, facts = finished.explanation, finished.facts
        if explanation is not None:
            principal = finished.turn.session.principal
            explained = Explained(explanation, principal, facts.session, facts.drafting, facts.tokens_per_step)
            self._explanations.put(explained)
            self._note_branch(finished, explained.without_text())
        num_lost = explanation.num_lost_tokens if explanation is not None else 0
        ended = ended_request(
            finished,
            ended_at=time.time(),
            seconds_lost=self._savings.seconds_of(facts.model, num_lost),
            shows_text=self._settings.shows_text,
            salt=self._history.salt,
        )
        self._history.add(ended, on_disk=not finished.turn.session.wants_nothing_kept)
        self._readers.put(_left_digests(finished), Reader(facts.model, finished.owner.name))
        if self._settings.writes_traces and not finished.turn.session.wants_nothing_kept:
            session = facts.session or _first_tokens_hash(finished.prompt.tokens.ids)
            self._trace.write(session, "turn", str(finished.turn.session.principal), **trace_fields(finished))

    def drafts_failed(self, reason: str) -> None:
        """What was done for an answer's drafts failed, and nobody else may notice: counted, and a line."""
        self._drafts.add_failure()
        self._terminal.error(f"An answer is not drafted any further, or leaves nothing to draft from: {reason}")

    def refused(self, turn: Turn, model_name: str, error: RequestError) -> None:
        """A request was not taken: it has its line too."""
        facts = RequestFacts(turn.request_id, turn.protocol, model_name, error_status=error.status)
        self._metrics.add(facts, None)
        self._terminal.request_line(replace(facts, cause=str(error)))

    def answered_in_words(self, turn: Turn, model_name: str) -> None:
        """A request was answered without the model: it has its line too."""
        note = "answered in words: it needs tools that nobody runs here"
        facts = RequestFacts(turn.request_id, turn.protocol, model_name, finish_reason="stop", notes=(note,))
        self._metrics.add(facts, None)
        self._terminal.request_line(replace(facts, session=turn.session.session_id))

    def count_error(self, endpoint: str, status: int) -> None:
        """An error was answered, also one that no model heard of."""
        self._metrics.add_http_error(endpoint, status)

    def clear(self) -> bool:
        """Forget what was said of requests; numbers stay. False where a file may still hold it."""
        self._explanations.clear()
        self._readers.clear()
        self._savings.clear()
        is_done = self._history.clear()
        with self._lock:
            self._last_of_branch.clear()
        self._look_again()
        return is_done

    def forget(self, scope: Scope) -> JsonObject:
        """Forget what was said of the requests of those who are meant. Returns how much that was, and whether
        it is gone from every file (`is_done`); numbers stay."""
        num_explanations = self._explanations.forget(scope)
        with self._lock:
            for key in [key for key, last in self._last_of_branch.items() if last.belongs_to(scope)]:
                del self._last_of_branch[key]
        self._readers.forget(lambda reader: belongs_to(reader.owner, scope))
        is_done = self._history.forget(scope)
        num_files = self._trace.forget(scope)
        self._look_again()
        return {"num_explanations": num_explanations, "num_trace_files": num_files, "is_done": is_done}

    def close(self) -> None:
        """No request ends any more: close the file of those that did."""
        self._history.close()

    def _look_again(self) -> None:
        """Whoever watches sees nothing of what was there a moment ago; waits for who looks just now."""
        with self._looking:
            self._seen_at, self._seen = 0.0, {}

    def _other_model(self, model: str, digests: Sequence[bytes]) -> str | None:
        """Another model of this process, if the newest to read what one of these digests names was another one."""
        reader = self._readers.find(digests)
        return reader.model if reader is not None and reader.model != model else None

    def _note_branch(self, finished: FinishedTurn, explained: Explained) -> None:
        if finished.branch is None:
            return
        with self._lock:
            key = finished.facts.model, finished.branch.branch_id
            self._last_of_branch[key] = explained
            self._last_of_branch.move_to_end(key)
            while len(self._last_of_branch) > MAX_BRANCHES:
                self._last_of_branch.popitem(last=False)

    # --- what is asked of it ------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that wait for the engine or are computed."""
        return len(self._activity.running())

    @property
    def num_rejections(self) -> int:
        """The counter `exact_key_rejected_by_model_lcp`."""
        return self._explanations.num_rejections

    def speculation(self) -> JsonObject:
        """What drafts did since the start."""
        return self._drafts.body()

    def explain(self, request_id: str | None, key: str) -> JsonObject:
        """The body of GET /v1/cache/explain/{request_id} for the key with this digest; an answer's `id` will do, and
        the beginning of either; None is its newest request that is over. Raises NotFound, also for a request of another
        key, and Conflict where the beginning is that of several."""
        if request_id is None:
            found = self._explanations.last(key)
            if found is None:
                raise NotFound("No request of this key is over yet.")
        else:
            found = self._explanations.get(request_id.replace("_", "-").rpartition("-")[2], key)
            if found is None:
                kept = f"the last {self._settings.num_explanations} are, each to the key that it came with"
                raise NotFound(f"The request {request_id!r} is not known; {kept}.", param="request_id")
        speculation = speculation_body(found.drafting, found.tokens_per_step)
        ended = {"ended_seconds_ago": round(time.monotonic() - found.ended_at, 3), "principal": str(found.principal)}
        return {**explanation_body(found.explanation), "speculation": speculation, **ended}

    def metrics(self) -> bytes:
        """The body of GET /metrics."""
        return self._metrics.text()

    def dashboard(self) -> JsonObject:
        """What the dashboard shows, at most `LOOK_SECONDS` old."""
        with self._looking:
            if time.monotonic() - self._seen_at > LOOK_SECONDS:
                self._seen = self._snapshot()
                self._seen_at = time.monotonic()
            return self._seen

    def conversation(self, name: str) -> JsonObject:
        """The body of GET /dashboard/sessions/{name}: its turns. Raises NotFound."""
        turns = timeline(self._history.newest(), name)
        if not turns:
            raise NotFound(f"No conversation {name!r} is known.")
        return {"id": name, "turns": turns}

    def _snapshot(self) -> JsonObject:
        look = self._look()
        with self._lock:
            last_of_branch = {
                branch_id: last.explanation
                for (model, branch_id), last in self._last_of_branch.items()
                if model == look.health["model"]
            }
        return dashboard_body(
            look,
            now=time.time(),
            activity=self._activity,
            explanations=self._explanations.newest(self._settings.num_explanations),
            last_of_branch=last_of_branch,
            shows_text=self._settings.shows_text,
            past=Past.of(self._history),
        )

    def _readings(self) -> Iterable[Reading]:
        look = self._look()
        return readings(look.health, look.cache)


def _sums(facts: RequestFacts) -> MinuteSums:
    """The numbers of one request, which are nobody's."""
    tokens = facts.num_prompt_tokens, facts.num_cached_tokens, facts.num_completion_tokens
    saved = facts.seconds_saved or 0.0
    return MinuteSums(int(time.time()) // MINUTE_SECONDS, 1, *tokens, saved, facts.num_prefilled_tokens)


def _left_digests(finished: FinishedTurn) -> Sequence[bytes]:
    """By what a later request of the same client shows that this model has read what it sends. Where several clients
    share their records that is what the model answered, once it is enough: the question another one may ask as well."""
    owner, reading = finished.owner, finished.reading
    if reading is None:
        return raw_digests(finished.prompt.text, owner)
    identity = reading.identity
    if owner.is_one_client:
        return identity.chains[-1:]
    if not any(map(is_telling, [*(written.message for written in reading.written_messages if written), finished.said])):
        return ()
    return chain(owner.root, (*identity.canonical, canonicalise(finished.said, identity.rules)))[-1:]


def _first_tokens_hash(ids: tuple[int, ...]) -> str:
    """The session of a request that names none: conversations that begin alike share a file."""
    return hashlib.sha256(repr(ids[:SESSION_HASH_TOKENS]).encode()).hexdigest()[:16]
