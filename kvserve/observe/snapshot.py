"""What `/metrics` and the dashboard read of a server: one look at it, as numbers to scrape and as a page's values.

It joins rooms and decides nothing. No prompt's text passes through here: of a difference only its place is told, unless
the operator allows the text; of a session's id only what a file name may show.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal

from kvserve.core import JsonObject
from kvserve.explain.causes import NO_MISS
from kvserve.explain.explanation import Explanation
from kvserve.observe.activity import Activity
from kvserve.observe.metrics import Reading
from kvserve.observe.reports import explanation_body
from kvserve.observe.trace import session_label
from kvserve.requests.request_facts import RunningFacts
from kvserve.sessions.lineage import Branch, BranchId, SessionView

MAX_SESSIONS = 40
MAX_BRANCHES = 200
MAX_MISSES = 20


@dataclass(frozen=True, slots=True)
class Look:
    """A server at one moment, in seconds since the epoch: the bodies of `/health` and `/v1/cache` (None while no model
    answers), its sessions, and the requests that wait for another model."""

    health: JsonObject
    cache: JsonObject | None
    sessions: Sequence[SessionView]
    seen_at: float
    waiting: Sequence[RunningFacts] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One number of `/health` or `/v1/cache` as a metric; `path` leads to it."""

    name: str
    help: str
    kind: Literal["counter", "gauge"]
    path: tuple[str, ...]


ACCOUNTS = (
    ("live", "KV of running requests, with padding and places ahead"),
    ("copies", "What of it is there twice at the most"),
    ("kept", "KV that is kept in RAM"),
    ("write_queue", "KV that waits for the disk and is nowhere else in RAM"),
    ("read_ahead", "KV that was read from the disk and not taken yet"),
    ("records", "Records of conversations and prompts"),
    ("image_features", "What a vision tower made of images"),
    ("buffers", "Freed buffers that MLX holds"),
)


def _account_row(name: str, help: str) -> Row:
    return Row(f"memory_{name}_bytes", f"{help}.", "gauge", ("memory", "accounts", name, "num_bytes"))


HEALTH_ROWS: tuple[Row, ...] = (
    Row("num_requests_running", "Requests that prefill or decode.", "gauge", ("num_running",)),
    Row("num_requests_prefilling", "Requests whose prompt is being computed.", "gauge", ("num_prefilling",)),
    Row("num_requests_decoding", "Requests whose answer is being written.", "gauge", ("num_decoding",)),
    Row("num_requests_waiting", "Requests that wait for a place or for a model.", "gauge", ("num_waiting",)),
    Row("model_swaps", "Times that another model took the place of one.", "counter", ("num_swaps",)),
    Row("active_memory_bytes", "Memory that MLX uses.", "gauge", ("active_memory_bytes",)),
    Row("memory_bytes", "Memory that grows with work, all accounts.", "gauge", ("memory", "total_bytes")),
    Row("memory_budget_bytes", "What all accounts may have together.", "gauge", ("memory", "budget_bytes")),
    *(_account_row(*each) for each in ACCOUNTS),
    Row("open_connections", "Open client connections.", "gauge", ("num_open_connections",)),
    Row("uptime_seconds", "Seconds since the start.", "gauge", ("uptime_seconds",)),
)

CACHE_ROWS: tuple[Row, ...] = (
    Row("ram_bytes", "KV that is kept in RAM.", "gauge", ("ram_bytes",)),
    Row("max_ram_bytes", "RAM for kept KV and for that of running requests.", "gauge", ("max_ram_bytes",)),
    Row("live_bytes", "KV of running requests.", "gauge", ("live_bytes",)),
    Row("disk_bytes", "KV of this model that is kept on disk.", "gauge", ("disk_bytes",)),
    Row("total_disk_bytes", "KV of all models that is kept on disk.", "gauge", ("disk", "total_bytes")),
    Row("max_disk_bytes", "Disk space that KV of all models may take.", "gauge", ("disk", "max_bytes")),
    Row("disk_hits", "Prompts of which a part came back from disk.", "counter", ("disk", "num_hits")),
    Row("disk_restored_tokens", "Tokens whose KV came back from disk.", "counter", ("disk", "num_restored_tokens")),
    Row("disk_read_bytes", "Bytes of KV read from disk.", "counter", ("disk", "num_read_bytes")),
    Row("disk_written_bytes", "Bytes of KV written to disk.", "counter", ("disk", "num_written_bytes")),
    Row(
        "disk_written_bytes_per_turn",
        "Bytes of KV written to disk per answer, since the start.",
        "gauge",
        ("disk", "written_bytes_per_turn"),
    ),
    Row(
        "disk_last_day_written_bytes",
        "Bytes of KV written to disk in the last 24 hours, at most since the start.",
        "gauge",
        ("disk", "last_day_written_bytes"),
    ),
    Row("disk_evicted", "Records that have left the disk.", "counter", ("disk", "num_evicted")),
    Row("disk_errors", "Records that could not be read or written.", "counter", ("num_disk_faults",)),
    Row("segments", "Stored runs of KV.", "gauge", ("num_segments",)),
    Row("checkpoints", "Stored states of layers that cannot be cut.", "gauge", ("num_checkpoints",)),
    Row("entries", "Stored ends of conversations.", "gauge", ("num_entries",)),
    Row("sessions", "Known sessions.", "gauge", ("num_sessions",)),
    Row("branches", "Known branches of sessions.", "gauge", ("num_branches",)),
    Row("record_bytes", "Records of what the model has read and written.", "gauge", ("record_bytes",)),
    Row("evicted_tokens", "Tokens whose KV has left the cache.", "counter", ("num_evicted_tokens",)),
    Row("evicted_checkpoints", "States that have left the cache.", "counter", ("num_evicted_checkpoints",)),
    Row("warmed_tokens", "Tokens that were computed ahead of requests.", "counter", ("num_warmed_tokens",)),
    Row(
        "warmed_used_tokens",
        "Tokens of them that a request started from.",
        "counter",
        ("warming", "num_used_tokens"),
    ),
    Row(
        "warmed_wasted_tokens",
        "Tokens of them that were computed in vain.",
        "counter",
        ("warming", "num_wasted_tokens"),
    ),
    Row("warming_seconds", "Time that was spent on it.", "counter", ("warming", "seconds")),
    Row("warming_jobs_waiting", "Prefixes that are to be computed ahead.", "gauge", ("warming", "num_jobs_waiting")),
    Row("warming_jobs_failed", "Prefixes that could not be computed.", "counter", ("warming", "num_jobs_failed")),
    Row("vlm_retreat", "Cuts that would have divided an image.", "counter", ("counters", "vlm_retreat")),
    Row("hybrid_trim_miss", "Prompts for which a checkpoint was missing.", "counter", ("counters", "hybrid_trim_miss")),
    Row(
        "exact_key_rejected_by_model_lcp",
        "Requests whose key matched where the model's tokens did not, and no rule says why.",
        "counter",
        ("counters", "exact_key_rejected_by_model_lcp"),
    ),
)


def readings(look: Look) -> Iterator[Reading]:
    """The numbers that a server tells of itself. What it has not got, such as a disk, it does not tell."""
    yield Reading("up", "1 once a model answers.", "gauge", int(look.cache is not None))
    for rows, body in ((HEALTH_ROWS, look.health), (CACHE_ROWS, look.cache)):
        for row in rows:
            if (value := _value(body, row.path)) is not None:
                yield Reading(row.name, row.help, row.kind, value)


def _value(body: JsonObject | None, path: Sequence[str]) -> float | None:
    found: object = body
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def dashboard_body(
    look: Look,
    *,
    now: float,
    activity: Activity,
    explanations: Sequence[Explanation],
    last_of_branch: Mapping[BranchId, Explanation],
    shows_text: bool,
) -> JsonObject:
    """One event of `/dashboard/events`. `explanations` come newest first; `now` in seconds since the epoch."""
    times = activity.first_token_times()
    running = activity.running()
    begun = {facts.request_id for facts in running}  # the look came first: what waited then may run by now
    waiting = [facts for facts in look.waiting if facts.request_id not in begun]
    misses = islice((each for each in explanations if each.cause not in NO_MISS), MAX_MISSES)
    return {
        "time": round(now, 3),
        "health": look.health,
        "cache": look.cache,
        "history": [_columns(asdict(bucket)) for bucket in activity.history()],
        "first_token_seconds": asdict(times) if times is not None else None,
        "running": [_running(facts) for facts in (*running, *waiting)],
        "sessions": _sessions(look, last_of_branch),
        "misses": [_miss(each, shows_text) for each in misses],
        "causes": _causes(explanations),
        "shows_text": shows_text,
    }


def _columns(bucket: Mapping[str, Any]) -> list[Any]:
    """Time, requests, prompt, cached and generated tokens: a list, as an hour has hundreds of them."""
    return list(bucket.values())


def _running(facts: RunningFacts) -> JsonObject:
    session = session_label(facts.session) if facts.session is not None else None
    return {**asdict(facts), "session": session, "seconds": round(facts.seconds, 2)}


def _causes(explanations: Sequence[Explanation]) -> JsonObject:
    counts: dict[str, int] = {}
    for explanation in explanations:
        counts[explanation.cause] = counts.get(explanation.cause, 0) + 1
    return counts


def _miss(explanation: Explanation, shows_text: bool) -> JsonObject:
    body = dict(explanation_body(explanation))
    place = body["first_difference"]
    if isinstance(place, dict) and not shows_text:
        body["first_difference"] = {name: value for name, value in place.items() if name not in ("before", "after")}
    return body


def _sessions(look: Look, last_of_branch: Mapping[BranchId, Explanation]) -> list[JsonObject]:
    """The sessions that were used last, newest first, each with its branches in the order in which they began."""
    shown: list[JsonObject] = []
    num_branches = 0
    for view in reversed(look.sessions):
        if len(shown) >= MAX_SESSIONS or num_branches >= MAX_BRANCHES:
            break
        num_branches += len(view.branches)
        branches = sorted(view.branches, key=lambda branch: branch.branch_id)
        shown.append(
            {
                "name": _session_name(view),
                "idle_seconds": round(look.seen_at - view.last_used, 1),
                "branches": [
                    _branch(branch, look.seen_at, last_of_branch.get(branch.branch_id)) for branch in branches
                ],
            }
        )
    return shown


def _session_name(view: SessionView) -> str:
    kind, _, name = view.key.partition(":")
    return session_label(name.partition("/")[2] or name) if kind == "id" else f"unnamed {name}"  # less its principal


def _branch(branch: Branch, seen_at: float, last: Explanation | None) -> JsonObject:
    return {
        "id": branch.branch_id,
        "parent": branch.parent_id,
        "fork_message": branch.fork_message_index,
        "fork_token": branch.fork_token_offset,
        "num_turns": branch.num_turns,
        "num_messages": branch.num_messages,
        "num_tokens": branch.num_tokens,
        "idle_seconds": round(seen_at - branch.last_used, 1),
        "last": None
        if last is None
        else {
            "request_id": last.request_id,
            "cause": last.cause,
            "tier": last.reuse.tier,
            "source": last.source,
            "num_prompt_tokens": last.num_prompt_tokens,
            "num_cached_tokens": last.num_cached_tokens,
        },
    }
