"""The numbers of a server for Prometheus: totals of the requests that ended, and what the server tells of itself when
it is asked. It knows numbers and names; prompts, sessions and request ids never get here.

Every name begins with `kvserve_`; the rest is what the field calls it. The totals of one server are its own: nothing is
shared between two servers of one process.
"""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvserve.core import Drafted, JsonObject
from kvserve.observe.metric_rows import CACHE_ROWS, HEALTH_ROWS
from kvserve.requests.request_facts import RequestFacts

PREFIX, CONTENT_TYPE = "kvserve_", CONTENT_TYPE_PLAIN_0_0_4

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
TOKENS = tuple(float(2**power) for power in range(5, 19))

type Labels = tuple[str, ...]
type Value = Callable[[RequestFacts], float | None]
"""The number that a request adds, None where it adds none."""

type Amounts = Callable[[RequestFacts], Iterable[tuple[Labels, float]]]
"""What a request adds, each to a value with these labels."""


@dataclass(frozen=True, slots=True)
class Total:
    """A counter over requests: `labels` names what its values are told apart by."""

    name: str
    help: str
    amounts: Amounts
    labels: Labels = ("model",)


def _one(value: Value, key: Callable[[RequestFacts], Labels] = lambda facts: (facts.model,)) -> Amounts:
    """One amount, under the labels that `key` finds."""

    def amounts(facts: RequestFacts) -> Iterator[tuple[Labels, float]]:
        if (found := value(facts)) is not None:
            yield key(facts), found

    return amounts


def _by_source(count: Callable[[Drafted], int]) -> Amounts:
    """An amount for each source of drafts."""
    return lambda facts: (((facts.model, source), count(each)) for source, each in facts.drafting.by_source.items())


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram over requests, by model."""

    name: str
    help: str
    value: Value
    bounds: Sequence[float]


@dataclass(frozen=True, slots=True)
class Reading:
    """A number that the server tells when it is asked. Counters only grow while one model is served."""

    name: str
    help: str
    kind: Literal["counter", "gauge"]
    value: float


@dataclass(slots=True)
class _Histogram:
    counts: list[int]
    total: float = 0.0


@dataclass(slots=True)
class _State:
    totals: dict[str, Counter[Labels]] = field(default_factory=dict)
    histograms: dict[str, dict[Labels, _Histogram]] = field(default_factory=dict)


def _seconds_per_token(facts: RequestFacts) -> float | None:
    return 1 / facts.tokens_per_second if facts.tokens_per_second else None


def _outcome(facts: RequestFacts) -> str:
    return "error" if facts.error_status is not None else facts.finish_reason or "cancelled"


TOTALS: tuple[Total, ...] = (
    Total("prompt_tokens", "Prompt tokens of requests that began.", _one(lambda facts: facts.num_prompt_tokens)),
    Total(
        "cached_tokens",
        "Prompt tokens that were not computed, by where they came from.",
        _one(lambda facts: facts.num_cached_tokens, lambda facts: (facts.model, facts.tier)),
        ("model", "tier"),
    ),
    Total("prefill_tokens", "Prompt tokens that were computed.", _one(lambda facts: facts.num_prefilled_tokens)),
    Total("prefill_seconds_saved", "About what cached tokens would take.", _one(lambda facts: facts.seconds_saved)),
    Total("generation_tokens", "Tokens of answers.", _one(lambda facts: facts.num_completion_tokens)),
    Total(
        "drafted_tokens",
        "Drafted tokens that went through the model, by what they were drafted from.",
        _by_source(lambda drafted: drafted.num_tokens),
        ("model", "source"),
    ),
    Total(
        "accepted_draft_tokens",
        "Drafted tokens that the model drew itself, by what they were drafted from.",
        _by_source(lambda drafted: drafted.num_accepted),
        ("model", "source"),
    ),
    Total(
        "draft_seconds_saved",
        "Seconds that answers took less because of drafts.",
        _one(lambda facts: max(0.0, facts.drafting.seconds_saved) or None),
    ),
    Total(
        "draft_seconds_lost",
        "Seconds that answers took more because of drafts.",
        _one(lambda facts: max(0.0, -facts.drafting.seconds_saved) or None),
    ),
    Total(
        "requests",
        "Requests that ended, by protocol and by why.",
        _one(lambda facts: 1, lambda facts: (facts.model, facts.protocol, _outcome(facts))),
        ("model", "protocol", "outcome"),
    ),
    Total(
        "request_errors",
        "Requests that were refused or failed, by HTTP status.",
        _one(lambda facts: None if facts.error_status is None else 1, lambda facts: (str(facts.error_status),)),
        ("status",),
    ),
    Total(
        "prefix_cache_queries",
        "Prompts that were looked up.",
        _one(lambda facts: 1 if facts.num_prefilled_tokens or facts.num_cached_tokens else None),
    ),
    Total(
        "prefix_cache_hits",
        "Prompts of which a beginning was known, by where it came from.",
        _one(lambda facts: 1 if facts.num_cached_tokens else None, lambda facts: (facts.model, facts.tier)),
        ("model", "tier"),
    ),
)

DISTRIBUTIONS: tuple[Distribution, ...] = (
    Distribution(
        "time_to_first_token_seconds",
        "From the request to its first token.",
        lambda facts: facts.ttft_seconds,
        SECONDS,
    ),
    Distribution(
        "time_per_output_token_seconds", "Between two tokens of an answer.", _seconds_per_token, TOKEN_SECONDS
    ),
    Distribution(
        "request_queue_time_seconds", "From the request to its prefill.", lambda facts: facts.queue_seconds, SECONDS
    ),
    Distribution(
        "request_prefill_time_seconds",
        "From the beginning of the prefill to the first token.",
        lambda facts: facts.prefill_seconds,
        SECONDS,
    ),
    Distribution(
        "e2e_request_latency_seconds",
        "From the request to the end of its answer.",
        lambda facts: facts.seconds if facts.error_status is None else None,
        SECONDS,
    ),
    Distribution("request_prompt_tokens", "Length of prompts.", lambda facts: facts.num_prompt_tokens or None, TOKENS),
    Distribution(
        "matched_prefix_tokens",
        "How deep prompts were known, token by token.",
        lambda facts: facts.num_matched_tokens if facts.num_prefilled_tokens or facts.num_cached_tokens else None,
        TOKENS,
    ),
)


class Metrics:
    """The totals of one server. `read` is asked at every scrape for what the server tells of itself. Safe for several
    threads."""

    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._state = _State({total.name: Counter() for total in TOTALS}, {each.name: {} for each in DISTRIBUTIONS})
        self._causes: Counter[str] = Counter()
        self._http_errors: Counter[Labels] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add(self, facts: RequestFacts, cause: str | None) -> None:
        """A request is over; `cause` is that of its explanation, if it has one."""
        with self._lock:
            for total in TOTALS:
                for labels, amount in total.amounts(facts):
                    self._state.totals[total.name][labels] += amount  # type: ignore[assignment]
            for distribution in DISTRIBUTIONS:
                if (value := distribution.value(facts)) is not None:
                    self._observe(distribution, (facts.model,), value)
            if cause is not None:
                self._causes[cause] += 1

    def add_http_error(self, endpoint: str, status: int) -> None:
        """An error was answered; `endpoint` is one of the server's own, or empty: never what a client wrote."""
        with self._lock:
            self._http_errors[endpoint, str(status)] += 1

    def text(self) -> bytes:
        """All metrics in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry: all metrics as they are now."""
        for reading in self._read():
            family = CounterMetricFamily if reading.kind == "counter" else GaugeMetricFamily
            yield family(PREFIX + reading.name, reading.help, value=reading.value)
        with self._lock:
            families = [*self._counters(), *self._histograms()]
        yield from families

    def _observe(self, distribution: Distribution, labels: Labels, value: float) -> None:
        histograms = self._state.histograms[distribution.name]
        histogram = histograms.setdefault(labels, _Histogram([0] * (len(distribution.bounds) + 1)))
        histogram.counts[bisect_left(distribution.bounds, value)] += 1
        histogram.total += value

    def _counters(self) -> Iterator[Metric]:
        for total in TOTALS:
            family = CounterMetricFamily(PREFIX + total.name, total.help, labels=total.labels)
            _fill(family, self._state.totals[total.name])
            yield family
        causes = CounterMetricFamily(
            PREFIX + "explained_requests", "Requests by why no more was reused.", labels=["cause"]
        )
        _fill(causes, {(cause,): count for cause, count in self._causes.items()})
        yield causes
        errors = CounterMetricFamily(
            PREFIX + "http_errors",
            "Requests that were answered with an error, also those that no model heard of, by endpoint and status.",
            labels=["endpoint", "status"],
        )
        _fill(errors, self._http_errors)
        yield errors

    def _histograms(self) -> Iterator[Metric]:
        for distribution in DISTRIBUTIONS:
            family = HistogramMetricFamily(PREFIX + distribution.name, distribution.help, labels=["model"])
            for labels, histogram in self._state.histograms[distribution.name].items():
                family.add_metric(labels, _buckets(distribution.bounds, histogram.counts), histogram.total)
            yield family


def _fill(family: CounterMetricFamily, values: Mapping[Labels, float]) -> None:
    for labels, value in values.items():
        family.add_metric(labels, value)


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as the format wants them."""
    buckets, running = [], 0
    for bound, count in zip([*(f"{bound:g}" for bound in bounds), "+Inf"], counts, strict=True):
        running += count
        buckets.append((bound, float(running)))
    return buckets


# --- what the server tells of itself ----------------------------------------------------------------------------------


def readings(health: JsonObject, cache: JsonObject | None) -> Iterator[Reading]:
    """The numbers of `/health` and `/v1/cache` (None while no model answers), but of what a server lacks, as a disk."""
    yield Reading("up", "1 once a model answers.", "gauge", int(cache is not None))
    for rows, body in ((HEALTH_ROWS, health), (CACHE_ROWS, cache)):
        for row in rows:
            if (value := _value(body, row.path)) is not None:
                yield Reading(row.name, row.help, row.kind, value)


def _value(body: JsonObject | None, path: Sequence[str]) -> float | None:
    found: object = body
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None
