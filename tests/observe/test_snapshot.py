"""One look at a server: as numbers to scrape, and as what the dashboard shows, without any prompt's text."""

import json
from dataclasses import dataclass, replace
from typing import Any

from kvserve.core import RequestId, Reuse
from kvserve.explain.difference import Difference
from kvserve.explain.explanation import Explanation
from kvserve.observe.dashboard import MAX_BRANCHES, MAX_MISSES, Activity, Look, dashboard_body
from kvserve.observe.metrics import readings
from kvserve.requests.request_facts import RunningFacts
from kvserve.sessions.lineage import Branch, BranchId, SessionKey, SessionView

MISS = Explanation(
    request_id=RequestId("r1"),
    num_prompt_tokens=100,
    num_cached_tokens=40,
    num_shared_tokens=40,
    source="request r0",
    reuse=Reuse("ram", 40),
    cause="message changed",
    rules=(),
    policies={},
    first_difference=Difference(2, "user", 7, "SECRET was", "SECRET is"),
    before=RequestId("r0"),
    is_rejection=False,
)
CACHE = {"ram_bytes": 10, "num_evicted_tokens": 3, "counters": {"vlm_retreat": 1}}


def branch(number: int, parent: int | None, last_used: float = 5.0) -> Branch:
    parent_id = None if parent is None else BranchId(parent)
    return Branch(BranchId(number), parent_id, 2, 30, 1, 3, 50, last_used)


def look(*sessions: SessionView, cache: Any = CACHE) -> Look:
    return Look({"num_running": 2, "num_swaps": 0, "status": "ok"}, cache, sessions, 10.0)


def body(seen: Look, *explanations: Explanation, shows_text: bool = False) -> dict[str, Any]:
    last = {BranchId(1): MISS}
    told = dashboard_body(
        seen, now=1.0, activity=Activity(), explanations=explanations, last_of_branch=last, shows_text=shows_text
    )
    return dict(json.loads(json.dumps(told)))


def test_numbers_are_read_where_they_stand() -> None:
    """A gauge, a counter, one that lies deeper; what the server has not got is not told."""
    found = {reading.name: (reading.kind, reading.value) for reading in readings(look().health, CACHE)}
    assert found["num_requests_running"] == ("gauge", 2)
    assert found["evicted_tokens"] == ("counter", 3)
    assert found["vlm_retreat"] == ("counter", 1)
    assert found["up"] == ("gauge", 1)
    assert "disk_bytes" not in found
    loading = {reading.name: reading.value for reading in readings(look().health, None)}
    assert loading["up"] == 0 and "ram_bytes" not in loading


def test_a_miss_is_shown_without_its_text() -> None:
    """Its place is; the text around it only where that is allowed. What lost nothing is no miss."""
    shown = body(look(), MISS, replace(MISS, request_id=RequestId("r2"), cause="nothing lost"))
    [miss] = shown["misses"]
    assert "SECRET" not in json.dumps(shown)
    assert (miss["first_difference"]["message_index"], miss["first_difference"]["char"]) == (2, 7)
    assert shown["causes"] == {"message changed": 1, "nothing lost": 1}
    assert "SECRET was" in json.dumps(body(look(), MISS, shows_text=True))


def test_branches_know_their_parents_and_their_last_turn() -> None:
    """The newest session first; an id that is text is shown as a hash."""
    named = SessionView(SessionKey("id:build-7"), (branch(2, 1), branch(1, None)), 5.0)
    text = SessionView(SessionKey("id:please fix my house"), (branch(3, None),), 9.0)
    hashed = SessionView(SessionKey("tokens:0123abcd"), (branch(4, None),), 9.5)
    first, second, third = body(look(named, text, hashed))["sessions"]
    assert first["name"] == "unnamed 0123abcd" and "house" not in second["name"]
    assert third["name"].startswith("build-7") and third["idle_seconds"] == 5.0
    one, two = third["branches"]
    assert (one["id"], one["parent"], two["id"], two["parent"]) == (1, None, 2, 1)
    assert one["last"]["num_cached_tokens"] == 40 and two["last"] is None


@dataclass
class Request:
    """A request that has begun."""

    request_id: RequestId

    @property
    def progress(self) -> RunningFacts:
        return RunningFacts(self.request_id, "chat", "tiny", None, "prefill", 100, 60, 0, 0, 0.5)


def test_requests_that_wait_for_a_model_are_listed_behind_those_that_run() -> None:
    """For which model, how long, and their session as a label; one that has begun since the look stands there once."""

    def waits(name: str, session: str | None) -> RunningFacts:
        return RunningFacts(RequestId(name), "chat", "large", session, "waiting for model", 40, 0, 0, 0, 3.21987)

    activity = Activity()
    activity.begin(Request(RequestId("begun")))
    seen = replace(look(), waiting=(waits("begun", None), waits("w1", "build-7"), waits("w2", "please fix my house")))
    told = dashboard_body(seen, now=1.0, activity=activity, explanations=(), last_of_branch={}, shows_text=False)
    shown: Any = json.loads(json.dumps(told))["running"]
    assert [(each["request_id"], each["stage"]) for each in shown] == [
        ("begun", "prefill"),
        ("w1", "waiting for model"),
        ("w2", "waiting for model"),
    ]
    assert (shown[0]["num_done_tokens"], shown[0]["num_prompt_tokens"]) == (60, 100), "the progress of its prefill"
    assert (shown[1]["model"], shown[1]["seconds"], shown[1]["num_prompt_tokens"]) == ("large", 3.22, 40)
    assert shown[1]["session"].startswith("build-7") and "house" not in shown[2]["session"]


def test_what_is_shown_is_bounded() -> None:
    """However much is known."""
    many = tuple(
        SessionView(SessionKey(f"id:s{n}"), tuple(branch(n, None) for n in range(50)), 1.0) for n in range(300)
    )
    shown = body(look(*many), *(replace(MISS, request_id=RequestId(f"r{n}")) for n in range(200)))
    assert len(shown["misses"]) == MAX_MISSES
    assert sum(len(session["branches"]) for session in shown["sessions"]) <= MAX_BRANCHES + 50
