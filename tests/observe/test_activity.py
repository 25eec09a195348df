"""What runs and how fast it goes, with a clock that the test sets."""

from dataclasses import dataclass

from kvserve.core import RequestId
from kvserve.observe.dashboard import MAX_RUNNING, SPEED_SECONDS, Activity, Speed
from kvserve.requests.request_facts import RequestFacts, RunningFacts


@dataclass
class Clock:
    seconds: float = 1_000_000.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Request:
    """A request that is about to be watched."""

    request_id: RequestId
    num_done: int = 0

    @property
    def progress(self) -> RunningFacts:
        return RunningFacts(self.request_id, "chat", "tiny", None, "prefill", 100, self.num_done, 0, 0, 0.5)


def facts(name: str, **fields: object) -> RequestFacts:
    return RequestFacts(RequestId(name), "chat", "tiny", **fields)  # type: ignore[arg-type]


def test_a_request_is_seen_as_it_is_now_until_it_ends() -> None:
    """Its progress is asked for, not told; what ended is gone."""
    activity, one, two = Activity(), Request(RequestId("one")), Request(RequestId("two"))
    activity.begin(one)
    activity.begin(two)
    one.num_done = 60
    assert [(each.request_id, each.num_done_tokens) for each in activity.running()] == [("one", 60), ("two", 0)]
    activity.end(facts("one"))
    assert [each.request_id for each in activity.running()] == ["two"]


def test_requests_that_nobody_ends_are_bounded() -> None:
    """The oldest is forgotten."""
    activity = Activity()
    for number in range(MAX_RUNNING + 5):
        activity.begin(Request(RequestId(str(number))))
    assert len(activity.running()) == MAX_RUNNING and activity.running()[0].request_id == "5"


def test_first_tokens_are_summed_up() -> None:
    """Newest, median and 95th percentile; nothing before the first."""
    activity = Activity()
    assert activity.first_token_times() is None
    activity.end(facts("a", ttft_seconds=2.0))
    times = activity.first_token_times()
    assert times is not None and (times.newest, times.median, times.p95) == (2.0, 2.0, 2.0)
    for number in range(99):
        activity.end(facts("b", ttft_seconds=number / 100))
    times = activity.first_token_times()
    assert times is not None and (times.num_requests, times.newest) == (100, 0.98)
    assert times.median < times.p95 < 1.0


def test_the_speed_is_that_of_the_last_seconds() -> None:
    """Of all requests, also of those that ended meanwhile; nothing for whoever asks first, or once nothing runs."""
    clock = Clock()
    activity, one = Activity(clock), Request(RequestId("one"))
    activity.begin(one)
    assert activity.speed() == Speed()
    clock.seconds += 2
    one.num_done = 80
    assert activity.speed() == Speed(40.0, 0.0)
    clock.seconds += 2
    activity.end(facts("one", num_prefilled_tokens=100, num_completion_tokens=20))
    assert activity.speed() == Speed(25.0, 5.0)
    clock.seconds += SPEED_SECONDS + 1
    assert activity.speed() == Speed()


def test_a_request_that_ends_while_somebody_looks_counts_once() -> None:
    """It was running at the moment of the look, and is not in the totals of that moment."""
    clock = Clock()
    activity = Activity(clock)

    class Ending(Request):
        @property
        def progress(self) -> RunningFacts:
            activity.end(facts("one", num_prefilled_tokens=self.num_done))
            return RunningFacts(self.request_id, "chat", "tiny", None, "prefill", 100, self.num_done, 0, 0, 0.5)

    activity.speed()
    activity.begin(Ending(RequestId("one"), 80))
    clock.seconds += 2
    assert activity.speed() == Speed(40.0, 0.0)
    clock.seconds += 2
    assert activity.speed() == Speed(20.0, 0.0)
