"""What kvserve tells of its own work: the bodies of `/v1/cache` and `/v1/cache/explain`, and a turn's trace line.

It turns values of the rooms into JSON objects and decides nothing. The names are an interface: scripts read them.
"""

from dataclasses import asdict
from typing import Any

from kvserve.core import JsonObject
from kvserve.engine.prefix_cache import CacheReport
from kvserve.identity import ConversationTotals
from kvserve.running import FinishedTurn
from kvserve.sessions.difference import text_form
from kvserve.sessions.explanation import Explanation


def cache_body(report: CacheReport, totals: ConversationTotals, num_rejections: int) -> JsonObject:
    """The body of GET /v1/cache."""
    return {
        "counters": {
            "vlm_retreat": report.stats.num_image_retreats,
            "hybrid_trim_miss": report.num_hybrid_trim_misses,
            "exact_key_rejected_by_model_lcp": num_rejections,
        },
        "num_prompt_tokens": report.totals.num_prompt_tokens,
        "num_cached_tokens": report.totals.num_cached_tokens,
        "num_prefill_tokens": report.totals.num_prefill_tokens,
        "ram_bytes": report.stats.ram_bytes,
        "live_bytes": report.stats.live_bytes,
        "num_segments": report.stats.num_segments,
        "num_checkpoints": report.stats.num_checkpoints,
        "num_entries": report.stats.num_entries,
        "num_evicted_tokens": report.stats.num_evicted_tokens,
        "num_sessions": totals.num_sessions,
        "num_branches": totals.num_branches,
        "num_messages": totals.num_messages,
        "num_healing_entries": totals.num_healing_entries,
        "record_bytes": totals.num_bytes,
    }


def explanation_body(explanation: Explanation) -> JsonObject:
    """The body of GET /v1/cache/explain/{request_id}."""
    difference = explanation.first_difference
    return {
        "request_id": explanation.request_id,
        "num_prompt_tokens": explanation.num_prompt_tokens,
        "cached_tokens": explanation.num_cached_tokens,
        "num_shared_tokens": explanation.num_shared_tokens,
        "source": explanation.source,
        "cause": explanation.cause,
        "rules": list(explanation.rules),
        "first_difference": asdict(difference) if difference is not None else None,
        "before": explanation.before,
        "hybrid_trim_miss": int(explanation.is_trim_miss),
        "exact_key_rejected_by_model_lcp": int(explanation.is_rejection),
    }


def trace_fields(finished: FinishedTurn) -> dict[str, Any]:
    """The fields of one turn in a trace file."""
    facts, reading, explanation = finished.facts, finished.reading, finished.explanation
    fields: dict[str, Any] = {
        "request_id": facts.request_id,
        "protocol": facts.protocol,
        "num_messages": len(finished.turn.messages),
        "num_prompt_tokens": facts.num_prompt_tokens,
        "num_cached_tokens": facts.num_cached_tokens,
        "num_completion_tokens": facts.num_completion_tokens,
        "num_replayed_turns": finished.prompt.num_replayed_turns,
        "finish_reason": facts.finish_reason,
        "error_status": facts.error_status,
        "notes": list(facts.notes),
    }
    if finished.branch is not None:
        fields |= {"branch": finished.branch.branch_id, "parent_branch": finished.branch.parent_id}
    if explanation is not None:
        body = explanation_body(explanation)
        told = ("source", "cause", "rules", "first_difference", "hybrid_trim_miss", "exact_key_rejected_by_model_lcp")
        fields |= {name: body[name] for name in told}
    if reading is not None:
        fields["stable_prefix_msg_count"] = reading.num_known_messages
        fields["cache_key_delta_chars"] = reading.num_normalised_chars
        fields["canonical_prompt"] = _canonical_prompt(finished)
    fields["prompt"] = finished.prompt.text
    return fields


def _canonical_prompt(finished: FinishedTurn) -> str:
    """The messages as they are known by, for a person to read."""
    canonical = finished.reading.canonical if finished.reading is not None else ()
    messages = [each.message for each in canonical if each.message is not None]
    return "\n".join(f"[{message.role}] {text_form(message)}" for message in messages)
