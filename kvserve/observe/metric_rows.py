"""Which numbers of `/health` and `/v1/cache` are metrics, and what they say. Tables, read by `metrics.py`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MetricRow:
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
    ("drafts", "Tokens that next ones are drafted from"),
    ("image_features", "What a vision tower made of images"),
    ("buffers", "Freed buffers that MLX holds"),
    ("draft_kv", "KV of the draft model"),
)


def _gauge(name: str, help: str, *path: str) -> MetricRow:
    return MetricRow(name, help, "gauge", path)


def _counter(name: str, help: str, *path: str) -> MetricRow:
    return MetricRow(name, help, "counter", path)


HEALTH_ROWS: tuple[MetricRow, ...] = (
    _gauge("num_requests_running", "Requests that prefill or decode.", "num_running"),
    _gauge("num_requests_prefilling", "Requests whose prompt is being computed.", "num_prefilling"),
    _gauge("num_requests_decoding", "Requests whose answer is being written.", "num_decoding"),
    _gauge("num_requests_waiting", "Requests that wait for a place or for a model.", "num_waiting"),
    _counter("model_swaps", "Times that another model took the place of one.", "num_swaps"),
    _gauge("active_memory_bytes", "Memory that MLX uses.", "active_memory_bytes"),
    _gauge("memory_bytes", "Memory that grows with work, all accounts.", "memory", "total_bytes"),
    _gauge("memory_budget_bytes", "What all accounts may have together.", "memory", "budget_bytes"),
    *(_gauge(f"memory_{name}_bytes", f"{help}.", "memory", "accounts", name, "num_bytes") for name, help in ACCOUNTS),
    _gauge("open_connections", "Open client connections.", "num_open_connections"),
    _gauge("uptime_seconds", "Seconds since the start.", "uptime_seconds"),
)

CACHE_ROWS: tuple[MetricRow, ...] = (
    _gauge("ram_bytes", "KV that is kept in RAM.", "ram_bytes"),
    _gauge("max_ram_bytes", "RAM for kept KV and for that of running requests.", "max_ram_bytes"),
    _gauge("live_bytes", "KV of running requests.", "live_bytes"),
    _gauge("disk_bytes", "KV of this model that is kept on disk.", "disk_bytes"),
    _gauge("total_disk_bytes", "KV of all models that is kept on disk.", "disk", "total_bytes"),
    _gauge("max_disk_bytes", "Disk space that KV of all models may take.", "disk", "max_bytes"),
    _counter("disk_hits", "Prompts of which a part came back from disk.", "disk", "num_hits"),
    _counter("disk_restored_tokens", "Tokens whose KV came back from disk.", "disk", "num_restored_tokens"),
    _counter("disk_read_bytes", "Bytes of KV read from disk.", "disk", "num_read_bytes"),
    _counter("disk_written_bytes", "Bytes of KV written to disk.", "disk", "num_written_bytes"),
    _gauge(
        "disk_written_bytes_per_turn",
        "Bytes of KV written to disk per answer, since the start.",
        "disk",
        "written_bytes_per_turn",
    ),
    _gauge(
        "disk_last_day_written_bytes",
        "Bytes of KV written to disk in the last 24 hours, at most since the start.",
        "disk",
        "last_day_written_bytes",
    ),
    _counter("disk_evicted", "Records that were evicted from disk.", "disk", "num_evicted"),
    _counter("disk_errors", "Records that could not be read or written.", "num_disk_faults"),
    _counter("shared_hits", "Prompts of which a part came from the shared cache.", "remote", "num_hits"),
    _counter("shared_restored_tokens", "Tokens whose KV came from there.", "remote", "num_restored_tokens"),
    _counter(
        "shared_declined", "Prompts that were faster to compute than to read from there.", "remote", "num_declined"
    ),
    _counter("shared_given_up", "Reads from there that were broken off.", "remote", "num_given_up"),
    _gauge(
        "shared_longest_wait_seconds", "The longest that a request waited for it.", "remote", "longest_wait_seconds"
    ),
    _counter("shared_read_bytes", "Bytes of KV read from there.", "remote", "num_read_bytes"),
    _counter("shared_written_bytes", "Bytes of KV sent there.", "remote", "num_written_bytes"),
    _gauge("shared_queued", "Records that wait to be sent there.", "remote", "num_queued"),
    _gauge("shared_read_bytes_per_second", "How fast it was found to give.", "remote", "read_bytes_per_second"),
    _gauge(
        "shared_break_even_bytes_per_second",
        "Below this speed computing is faster than reading from there.",
        "remote",
        "break_even_bytes_per_second",
    ),
    _counter("shared_errors", "Everything that went wrong with the shared cache.", "remote", "num_errors"),
    _gauge("segments", "Stored runs of KV.", "num_segments"),
    _gauge("checkpoints", "Stored states of layers that cannot be cut.", "num_checkpoints"),
    _gauge("entries", "Stored ends of conversations.", "num_entries"),
    _gauge("sessions", "Known sessions.", "num_sessions"),
    _gauge("branches", "Known branches of sessions.", "num_branches"),
    _gauge("record_bytes", "Records of what the model has read and written.", "record_bytes"),
    _counter("evicted_tokens", "Tokens whose KV was evicted from the cache.", "num_evicted_tokens"),
    _counter("evicted_checkpoints", "States that were evicted from the cache.", "num_evicted_checkpoints"),
    _counter("warmed_tokens", "Tokens that were computed ahead of requests.", "num_warmed_tokens"),
    _counter("warmed_used_tokens", "Tokens of them that a request started from.", "warming", "num_used_tokens"),
    _counter("warmed_wasted_tokens", "Tokens of them that no request used.", "warming", "num_wasted_tokens"),
    _counter("warming_seconds", "Time that was spent on it.", "warming", "seconds"),
    _gauge("warming_jobs_waiting", "Prefixes that are to be computed ahead.", "warming", "num_jobs_waiting"),
    _counter("warming_jobs_failed", "Prefixes that could not be computed.", "warming", "num_jobs_failed"),
    _counter("draft_failures", "Failures in drafting; answers came all the same.", "speculation", "num_failures"),
    _counter("vlm_retreat", "Cuts that would have divided an image.", "counters", "vlm_retreat"),
    _counter("hybrid_trim_miss", "Prompts for which a checkpoint was missing.", "counters", "hybrid_trim_miss"),
    _counter(
        "exact_key_rejected_by_model_lcp",
        "Requests whose key matched where the model's tokens did not, and no rule says why.",
        "counters",
        "exact_key_rejected_by_model_lcp",
    ),
)
