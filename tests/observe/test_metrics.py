"""Metrics as values: what a request adds, what buckets hold, and that two servers share nothing."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvserve.core import Drafted, Drafting, RequestId
from kvserve.observe.metrics import TOKENS, Metrics, Reading
from kvserve.requests.request_facts import RequestFacts

FACTS = RequestFacts(
    RequestId("a"),
    "openai_chat",
    "tiny",
    num_prompt_tokens=100,
    num_cached_tokens=60,
    num_completion_tokens=7,
    ttft_seconds=0.2,
    tokens_per_second=20.0,
    finish_reason="stop",
    tier="ram",
    num_matched_tokens=64,
    num_prefilled_tokens=40,
    queue_seconds=0.0,
    prefill_seconds=0.1,
    seconds=1.0,
)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def one(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get((f"kvserve_{name}", tuple(sorted(labels.items()))))


def test_a_request_adds_to_its_own_labels() -> None:
    """Tokens by model and tier, the outcome by protocol, the cause of its explanation."""
    metrics = Metrics(lambda: ())
    metrics.add(FACTS, "nothing lost")
    metrics.add(replace(FACTS, tier="live row", finish_reason=None), None)
    assert one(metrics, "prompt_tokens_total", model="tiny") == 200
    assert one(metrics, "cached_tokens_total", model="tiny", tier="ram") == 60
    assert one(metrics, "cached_tokens_total", model="tiny", tier="live row") == 60
    assert one(metrics, "requests_total", model="tiny", protocol="openai_chat", outcome="cancelled") == 1
    assert one(metrics, "explained_requests_total", cause="nothing lost") == 1
    assert one(metrics, "time_per_output_token_seconds_sum", model="tiny") == 0.1


def test_drafts_are_counted_by_what_they_were_drafted_from() -> None:
    """Seconds that were saved and seconds that were lost are apart: a counter only grows."""
    metrics = Metrics(lambda: ())
    drafting = Drafting({"prediction": Drafted(8, 6), "records": Drafted(4, 0)}, num_steps=3, seconds_saved=1.5)
    metrics.add(replace(FACTS, drafting=drafting), None)
    metrics.add(replace(FACTS, drafting=replace(drafting, seconds_saved=-0.5)), None)
    metrics.add(FACTS, None)
    assert one(metrics, "drafted_tokens_total", model="tiny", source="prediction") == 16
    assert one(metrics, "accepted_draft_tokens_total", model="tiny", source="prediction") == 12
    assert one(metrics, "accepted_draft_tokens_total", model="tiny", source="records") == 0
    assert one(metrics, "draft_seconds_saved_total", model="tiny") == 1.5
    assert one(metrics, "draft_seconds_lost_total", model="tiny") == 0.5


def test_a_refused_request_is_an_error_and_nothing_else() -> None:
    """It was never looked up and has no times."""
    metrics = Metrics(lambda: ())
    metrics.add(RequestFacts(RequestId("b"), "openai_chat", "tiny", error_status=429), None)
    assert one(metrics, "request_errors_total", status="429") == 1
    assert one(metrics, "requests_total", model="tiny", protocol="openai_chat", outcome="error") == 1
    assert one(metrics, "prefix_cache_queries_total", model="tiny") is None
    assert one(metrics, "e2e_request_latency_seconds_count", model="tiny") is None


@given(st.lists(st.integers(0, 400_000), max_size=30))
def test_buckets_count_what_is_at_most_their_bound(depths: list[int]) -> None:
    """Cumulative, with the bound itself inside; the last one holds all."""
    metrics = Metrics(lambda: ())
    for depth in depths:
        metrics.add(replace(FACTS, num_matched_tokens=depth), None)
    found = samples(metrics)
    for bound in (*TOKENS, float("inf")):
        key = "kvserve_matched_prefix_tokens_bucket", (("le", f"{bound:g}".replace("inf", "+Inf")), ("model", "tiny"))
        assert found.get(key, 0.0) == sum(depth <= bound for depth in depths)


def test_what_the_server_tells_is_read_at_every_scrape() -> None:
    """A gauge as it is, a counter with its suffix; two servers have totals of their own."""
    values = iter((1.0, 2.0))
    metrics, other = Metrics(lambda: [Reading("ram_bytes", "RAM.", "gauge", next(values))]), Metrics(lambda: ())
    metrics.add(FACTS, None)
    assert (one(metrics, "ram_bytes"), one(metrics, "ram_bytes")) == (1.0, 2.0)
    assert one(other, "prompt_tokens_total", model="tiny") is None
    assert one(Metrics(lambda: [Reading("swaps", "S.", "counter", 3)]), "swaps_total") == 3
