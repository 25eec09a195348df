"""GET /metrics of a real server: it parses, its totals are those of the requests' usage, and no text gets into it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.anthropic_serving import MESSAGES_PATH
from tests.laws import IS_FULL
from tests.serving import CHAT_PATH, COMPLETION_PATH, AppUnderTest, eventually, serving_app
from tests.web.fakes import Response

NUM_REQUESTS = 200 if IS_FULL else 36
RESPONSES_PATH = "/v1/responses"
SECRET = "xylophone"
WORDS = f"The {SECRET} stands beside the window and is played on Sundays. "


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("metrics"), max_queued_requests=256) as app:
        yield app


def metrics(app: AppUnderTest) -> tuple[str, dict[str, float]]:
    """The text, and the sums of all samples of a name over their labels."""
    response = app.get("/metrics")
    assert response.status == 200 and response.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = response.body.decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.name.startswith("kvserve_")
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return text, sums


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every protocol and raw prompts, streamed or not, alone and continued, in sessions or not, long and short."""
    for number in range(NUM_REQUESTS):
        if number % 13 == 0:
            asked = [{"role": "user", "content": f"{WORDS}{number}"}]
            yield (
                MESSAGES_PATH,
                {"messages": asked, "max_tokens": 1 + number % 5, "stream": number % 2 == 0, "model": "x"},
            )
            continue
        if number % 17 == 0:
            limits = {"max_output_tokens": 1 + number % 5, "stream": number % 2 == 0, "store": False}
            yield RESPONSES_PATH, {"input": WORDS * (1 + number % 3), "model": "x", **limits}
            continue
        fields: dict[str, Any] = {"max_tokens": 1 + number % 5, "temperature": 0, "stream": number % 3 == 0}
        if fields["stream"]:
            fields["stream_options"] = {"include_usage": True}
        if number % 7 == 0:
            yield COMPLETION_PATH, {"prompt": WORDS * (1 + number % 4), **fields}
            continue
        messages = [{"role": "user", "content": WORDS * (1 + number % 6)}]
        if number % 4 == 0:
            messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": f"Number {number}?"}]
        if number % 5 == 0:
            fields["session_id"] = f"session-{number % 15}"
        if number % 11 == 0:
            fields["stop"] = ["e"]
        yield CHAT_PATH, {"messages": messages, **fields}


@dataclass(frozen=True)
class Usage:
    """Tokens of a prompt, those of them that were reused, and tokens of the answer."""

    num_prompt: int
    num_cached: int
    num_completion: int


def usage_of(path: str, response: Response) -> Usage:
    """The usage of an answer, streamed or not, as its protocol tells it."""
    assert response.status == 200, response.body
    is_streamed = response.headers["content-type"].startswith("text/event-stream")
    events = [event.rpartition("\ndata: ")[2] for event in response.events] if is_streamed else []
    if path == MESSAGES_PATH:
        found = dict(json.loads(events[0])["message"]["usage"] if is_streamed else response.json["usage"])
        if is_streamed:
            found |= json.loads(events[-2])["usage"]
        num_cached = found["cache_read_input_tokens"]
        num_prompt = found["input_tokens"] + num_cached + found["cache_creation_input_tokens"]
        return Usage(num_prompt, num_cached, found["output_tokens"])
    if path == RESPONSES_PATH:
        found = json.loads(events[-1])["response"]["usage"] if is_streamed else response.json["usage"]
        return Usage(found["input_tokens"], found["input_tokens_details"]["cached_tokens"], found["output_tokens"])
    found = json.loads(events[-2])["usage"] if is_streamed else response.json["usage"]
    return Usage(found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"], found["completion_tokens"])


def test_totals_are_those_of_the_requests(app: AppUnderTest) -> None:
    """Mixed requests, four at a time, and some that are refused: prompt, cached, computed and generated tokens."""
    _, before = metrics(app)
    with ThreadPoolExecutor(4) as pool:
        usages = list(pool.map(lambda each: usage_of(each[0], app.post(*each)), bodies()))
    refused = app.post(CHAT_PATH, {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"99999999": 1}})
    assert refused.status == 400
    assert eventually(lambda: metrics(app)[1]["kvserve_requests_total"] >= NUM_REQUESTS + 1)
    text, after = metrics(app)

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    num_prompt = sum(usage.num_prompt for usage in usages)
    num_cached = sum(usage.num_cached for usage in usages)
    num_completion = sum(usage.num_completion for usage in usages)
    assert num_cached > 0
    assert grown("kvserve_prompt_tokens_total") == num_prompt
    assert grown("kvserve_cached_tokens_total") == num_cached
    assert grown("kvserve_prefill_tokens_total") == num_prompt - num_cached
    assert grown("kvserve_generation_tokens_total") == num_completion
    assert grown("kvserve_requests_total") == NUM_REQUESTS + 1
    assert grown("kvserve_request_errors_total") == 1
    assert grown("kvserve_prefix_cache_queries_total") == NUM_REQUESTS
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "matched_prefix_tokens"):
        assert grown(f"kvserve_{name}_count") == NUM_REQUESTS, name
    report = app.get("/v1/cache").json
    assert after["kvserve_ram_bytes"] == report["ram_bytes"] > 0
    assert app.health()["ram_bytes"] == report["ram_bytes"]
    assert after["kvserve_max_ram_bytes"] == report["max_ram_bytes"]
    assert after["kvserve_hybrid_trim_miss_total"] == 0 and after["kvserve_up"] == 1
    assert SECRET not in text and "session-" not in text


def test_the_dashboard_and_file_names_hold_no_prompt(app: AppUnderTest) -> None:
    """The secret word of the prompts stands in no event of the dashboard and in no name of a file, of traces, KV or
    records, also when what was lost lies beside it or somebody calls a session by it."""
    app.chat(WORDS * 2, max_tokens=1)
    app.chat(
        [{"role": "user", "content": WORDS}, {"role": "assistant", "content": "x"}, {"role": "user", "content": WORDS}],
        max_tokens=1,
    )
    app.chat(
        [
            {"role": "user", "content": WORDS},
            {"role": "assistant", "content": SECRET},
            {"role": "user", "content": "?"},
        ],
        max_tokens=1,
        session_id=f"please tune my {SECRET}",
    )
    for day in range(2):
        body = {"prompt": f"Day {day}. {WORDS * 3}", "max_tokens": 1, "user": SECRET, "session_id": "raw"}
        assert app.post(COMPLETION_PATH, body).status == 200

    def has_last_miss() -> bool:
        misses: Any = app.app.observability.dashboard()["misses"]
        return any(each["cause"] == "prompt changed" for each in misses)

    assert eventually(has_last_miss)
    event = json.dumps(app.app.observability.dashboard())
    assert '"sessions": [{' in event and SECRET not in event
    assert SECRET not in metrics(app)[0]
    names = [path.name for path in app.log_root.parent.rglob("*")]
    assert any(name.startswith("cache-session-") for name in names) and not any(SECRET in name for name in names)


def test_errors_that_no_model_hears_of_are_counted(tmp_path: Path) -> None:
    """By endpoint and status, streamed or not; a path or method that a client made up becomes no label."""
    with serving_app(tmp_path, api_key="k", model_strict=True, web={"max_body_bytes": 2_000}) as app:
        own, chat = {"Authorization": "Bearer k"}, [{"role": "user", "content": "Hello."}]
        expected = {
            (CHAT_PATH, "401"): app.post(CHAT_PATH, {"messages": chat}),
            (CHAT_PATH, "413"): app.post(CHAT_PATH, {"messages": chat, "user": "x" * 3_000}, own),
            (CHAT_PATH, "400"): app.post(CHAT_PATH, {"messages": 7}, own),
            (CHAT_PATH, "404"): app.post(CHAT_PATH, {"messages": chat, "model": "nobody"}, own),
            (CHAT_PATH, "403"): app.post(CHAT_PATH, {}, {**own, "Origin": "https://evil.test"}),
            ("/v1/messages", "400"): app.post("/v1/messages", {"messages": chat, "stream": True}, own),
            ("", "404"): app.post(f"/{SECRET}", {}, own),
            ("/v1/cache/explain/*", "404"): app.get(f"/v1/cache/explain/{SECRET}", own),
            ("/health", "405"): app.post("/health", {}, own),
        }
        assert {key: str(response.status) for key, response in expected.items()} == {key: key[1] for key in expected}
        with app.connect() as client:
            client.send(b"nonsense\r\n\r\n")
            assert client.read_response().status == 400
        text = app.get("/metrics", own).body.decode()
        [family] = [each for each in text_string_to_metric_families(text) if each.name == "kvserve_http_errors"]
        counted = {(sample.labels["endpoint"], sample.labels["status"]): sample.value for sample in family.samples}
        assert counted == {**dict.fromkeys(expected, 1.0), ("", "400"): 1.0}
        assert SECRET not in text
