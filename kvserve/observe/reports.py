"""What kvserve tells of its own work: the bodies of `/v1/cache` and `/v1/cache/explain`, and a turn's trace line.

It turns values of the rooms into JSON objects and decides nothing. The names are an interface: scripts read them.
"""

from dataclasses import asdict
from typing import Any

from kvserve.cache.remote_tier import RemoteStats
from kvserve.core import JsonObject, TokenSequence
from kvserve.engine.cache_records import CacheReport
from kvserve.engine.memory import MemoryReport
from kvserve.engine.model_digest import DigestStatus
from kvserve.engine.pinned import DiskReport
from kvserve.engine.ranks.status import RanksStatus
from kvserve.engine.vision_tower import ImageReport
from kvserve.engine.warming import WarmReport
from kvserve.explain.difference import text_form
from kvserve.explain.explanation import Explanation
from kvserve.explain.words import remedy, summary
from kvserve.identity.conversations import ConversationTotals
from kvserve.identity.shared_records import SharedRecordTotals
from kvserve.observe.draft_totals import speculation_body
from kvserve.requests.request_facts import RequestFacts
from kvserve.requests.turn_facts import FinishedTurn

TRACED = (
    "source",
    "tier",
    "num_matched_tokens",
    "checkpoint",
    "cause",
    "rules",
    "policies",
    "decided_by",
    "first_difference",
    "hybrid_trim_miss",
    "exact_key_rejected_by_model_lcp",
)
"""The fields of an explanation that stand in a trace."""


NUM_SHOWN_IDS = 64


def cache_body(
    report: CacheReport, totals: ConversationTotals, num_rejections: int, speculation: JsonObject
) -> JsonObject:
    """The body of GET /v1/cache; `speculation` is what drafts did since the start."""
    return {
        "counters": {
            "vlm_retreat": report.stats.num_image_retreats,
            "hybrid_trim_miss": report.num_hybrid_trim_misses,
            "exact_key_rejected_by_model_lcp": num_rejections,
        },
        "num_prompt_tokens": report.totals.num_prompt_tokens,
        "num_cached_tokens": report.totals.num_cached_tokens,
        "num_prefill_tokens": report.totals.num_prefill_tokens,
        "num_warmed_tokens": report.warming.tokens.num_warmed_tokens if report.warming is not None else 0,
        "warming": _warming_body(report.warming) if report.warming is not None else None,
        "speculation": speculation,
        "ram_bytes": report.stats.ram_bytes,
        "max_ram_bytes": report.max_bytes,
        "live_bytes": report.stats.live_bytes,
        "num_segments": report.stats.num_segments,
        "num_checkpoints": report.stats.num_checkpoints,
        "num_stored_tokens": report.stats.num_stored_tokens,
        "num_entries": report.stats.num_entries,
        "num_evicted_tokens": report.stats.num_evicted_tokens,
        "num_evicted_checkpoints": report.stats.num_evicted_checkpoints,
        "num_sessions": totals.num_sessions,
        "num_branches": totals.num_branches,
        "num_messages": totals.num_messages,
        "num_healing_entries": totals.num_healing_entries,
        "record_bytes": totals.num_bytes,
        "record_disk_bytes": totals.archive.num_bytes,
        "num_record_faults": totals.archive.num_faults,
        "disk_bytes": report.disk.stats.num_bytes if report.disk is not None else 0,
        "disk": _disk_body(report.disk) if report.disk is not None else None,
        "num_disk_faults": num_disk_faults(report),
        "remote": remote_body(report.disk.remote, totals.shared)
        if report.disk is not None and report.disk.remote
        else None,
    }


def num_disk_faults(report: CacheReport) -> int:
    """Everything that went wrong with KV on disk since the start; a folder that cannot be used counts once."""
    return int(report.has_lost_disk) if report.disk is None else sum(report.disk.stats.faults.values())


def _warming_body(warming: WarmReport) -> JsonObject:
    """What was computed ahead of requests and what came of it."""
    tokens = warming.tokens
    return {
        "num_warmed_tokens": tokens.num_warmed_tokens,
        "num_used_tokens": tokens.num_used_tokens,
        "num_wasted_tokens": tokens.num_wasted_tokens,
        "num_unused_tokens": tokens.num_unused_tokens,
        "num_jobs_waiting": warming.num_waiting,
        "num_jobs_done": warming.num_done,
        "num_jobs_dropped": warming.num_dropped,
        "num_jobs_failed": warming.num_failed,
        "seconds": round(warming.seconds, 3),
    }


def _disk_body(disk: DiskReport) -> JsonObject:
    """KV on disk: what is there, what was written and came back, and every fault by kind."""
    stats = disk.stats
    return {
        "total_bytes": stats.total_bytes,
        "max_bytes": stats.max_bytes,
        "num_segments": stats.num_segments,
        "num_checkpoints": stats.num_checkpoints,
        "num_hits": disk.num_restores,
        "num_restored_tokens": disk.num_restored_tokens,
        "num_declined": disk.num_declined,
        "num_read": stats.num_read,
        "num_read_bytes": stats.num_read_bytes,
        "num_written": stats.num_written,
        "num_written_bytes": stats.num_written_bytes,
        "num_turns": disk.num_turns,
        "written_bytes_per_turn": stats.num_written_bytes // max(1, disk.num_turns),
        "last_day_written_bytes": stats.last_day_written_bytes,
        "num_queued_bytes": stats.num_queued_bytes,
        "num_refused": stats.num_refused,
        "num_evicted": stats.num_evicted,
        "is_full": stats.is_full,
        "num_errors": sum(stats.faults.values()),
        "errors": stats.faults,
    }


def remote_body(remote: RemoteStats, shared: SharedRecordTotals | None) -> JsonObject:
    """The cache that several servers share: what it gave and took, how fast it is, and every fault by kind; `records`
    is null where none travel."""
    fetched, sent = remote.fetched, remote.sent
    look = fetched.look_seconds
    return {
        "place": remote.place,
        "state": remote.state,
        "num_looks": fetched.num_looks,
        "num_found": fetched.num_found,
        "num_hits": fetched.num_hits,
        "num_restored_tokens": fetched.num_restored_tokens,
        "num_declined": fetched.num_declined,
        "num_given_up": fetched.num_given_up,
        "longest_wait_seconds": round(fetched.longest_wait_seconds, 3),
        "look_ms": round(1000 * look, 1) if look is not None else None,
        "num_read": fetched.num_read,
        "num_read_bytes": fetched.num_read_bytes,
        "num_written": sent.num_written,
        "num_written_bytes": sent.num_written_bytes,
        "num_not_worth": sent.num_not_worth,
        "num_queued": remote.num_queued,
        "num_dropped": remote.num_dropped,
        "read_bytes_per_second": _whole(remote.read_bytes_per_second),
        "write_bytes_per_second": _whole(remote.write_bytes_per_second),
        "break_even_bytes_per_second": _whole(remote.break_even_bytes_per_second),
        "records": asdict(shared) if shared is not None else None,
        "num_errors": sum(remote.faults.values()),
        "errors": remote.faults,
    }


def _whole(rate: float | None) -> int | None:
    return round(rate) if rate is not None else None


def disk_line(disk: DiskReport | None, digest: DigestStatus) -> str:
    """What the banner says of KV on disk."""
    if disk is None and digest.state == "reading":
        return f"KV is on disk once the {digest.num_bytes / 1e9:.1f} GB of the model were read to know it"
    if disk is None:
        return "KV is kept in RAM only"
    stats = disk.stats
    return f"{stats.num_bytes / 1e9:.2f} GB of KV in {stats.place} (at most {stats.max_bytes / 1e9:.1f} GB)"


def image_fields(report: ImageReport | None) -> dict[str, object]:
    """What the body of GET /v1/cache says of images, where the model takes any."""
    return asdict(report) if report is not None else {}


def image_line(facts: RequestFacts, tokens: TokenSequence) -> str:
    """Where the images of a prompt stand and how much of it was found, for whoever looks for a lost hit."""
    spans = ", ".join(f"[{span.start}, {span.end}) {span.digest[:12]}" for span in tokens.images)
    ids = " ".join(map(str, tokens.ids[:NUM_SHOWN_IDS]))
    return f"{facts.request_id} images {spans}; {facts.num_cached_tokens} of {len(tokens)} tokens cached; ids {ids}"


def memory_body(memory: MemoryReport) -> JsonObject:
    """The ledger of memory by account, and which of its bounds are met now and what that costs."""
    return {
        "total_bytes": memory.total_bytes,
        "budget_bytes": memory.budget_bytes,
        "accounts": {name: asdict(held) for name, held in memory.accounts.items()},
        "pressures": [asdict(pressure) for pressure in memory.pressures],
    }


def ranks_body(ranks: RanksStatus | None) -> JsonObject | None:
    """The ranks that compute the model, and what the followers keep; None where it is computed by one process."""
    return asdict(ranks) if ranks is not None else None


def explanation_body(explanation: Explanation) -> JsonObject:
    """The body of GET /v1/cache/explain/{request_id}."""
    difference, unshared = explanation.first_difference, explanation.reuse.unshared
    return {
        "request_id": explanation.request_id,
        "num_prompt_tokens": explanation.num_prompt_tokens,
        "cached_tokens": explanation.num_cached_tokens,
        "num_shared_tokens": explanation.num_shared_tokens,
        "source": explanation.source,
        "tier": explanation.reuse.tier,
        "num_matched_tokens": explanation.reuse.num_matched_tokens,
        "checkpoint": explanation.reuse.checkpoint,
        "unshared": asdict(unshared) if unshared is not None else None,
        "cause": explanation.cause,
        "summary": summary(explanation),
        "remedy": remedy(explanation),
        "looks_like": explanation.looks_like,
        "rules": list(explanation.rules),
        "policies": dict(explanation.policies),
        "decided_by": explanation.decided_by,
        "first_difference": asdict(difference) if difference is not None else None,
        "before": explanation.before,
        "hybrid_trim_miss": int(explanation.reuse.is_trim_miss),
        "exact_key_rejected_by_model_lcp": int(explanation.is_rejection),
    }


def trace_fields(finished: FinishedTurn) -> dict[str, Any]:
    """The fields of one turn in a trace file."""
    facts, reading, explanation = finished.facts, finished.reading, finished.explanation
    fields: dict[str, Any] = {
        "request_id": facts.request_id,
        "protocol": facts.protocol,
        "principal": str(finished.turn.session.principal),
        "num_messages": len(finished.turn.messages),
        "num_prompt_tokens": facts.num_prompt_tokens,
        "num_cached_tokens": facts.num_cached_tokens,
        "num_completion_tokens": facts.num_completion_tokens,
        "num_replayed_turns": finished.prompt.num_replayed_turns,
        "finish_reason": facts.finish_reason,
        "error_status": facts.error_status,
        "notes": list(facts.notes),
    }
    if (speculation := speculation_body(facts.drafting, facts.tokens_per_step)) is not None:
        fields["speculation"] = speculation
    if finished.branch is not None:
        fields |= {"branch": finished.branch.branch_id, "parent_branch": finished.branch.parent_id}
    if explanation is not None:
        body = explanation_body(explanation)
        fields |= {name: body[name] for name in TRACED}
    if reading is not None:
        fields["stable_prefix_msg_count"] = reading.num_known_messages
        fields["cache_key_delta_chars"] = reading.num_normalised_chars
        fields["canonical_prompt"] = _canonical_prompt(finished)
    fields["prompt"] = finished.prompt.text
    return fields


def _canonical_prompt(finished: FinishedTurn) -> str:
    """The messages as they are known by, for a person to read."""
    canonical = finished.reading.identity.canonical if finished.reading is not None else ()
    messages = [each.message for each in canonical if each.message is not None]
    return "\n".join(f"[{message.role}] {text_form(message)}" for message in messages)
