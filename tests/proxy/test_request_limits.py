"""The limits of holders: requests in a minute, rows at the same time, against what a list of all of them says."""

import itertools
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvserve.errors import LimitReached
from kvserve.proxy.keys_file import KeyHolder
from kvserve.proxy.request_limits import WINDOW_SECONDS, RequestLimits
from tests.laws import num_examples

LIMITS = st.none() | st.integers(1, 3)


class Asked(RuleBasedStateMachine):
    """Requests of two holders that begin, end and break, while their limits change and time goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.limits = RequestLimits(lambda: self.now)
        self.open: list[tuple[str, AbstractContextManager[None]]] = []
        self.begun: dict[str, list[float]] = {"anna": [], "otto": []}

    @rule(name=st.sampled_from(["anna", "otto"]), per_minute=LIMITS, rows=LIMITS)
    def ask(self, name: str, per_minute: int | None, rows: int | None) -> None:
        holder = KeyHolder(name, name, per_minute, rows)
        num_open = sum(each == name for each, _ in self.open)
        in_window = [at for at in self.begun[name] if at > self.now - WINDOW_SECONDS]
        is_refused = (rows is not None and num_open >= rows) or (
            per_minute is not None and len(in_window) >= per_minute
        )
        admitted = self.limits.admit(holder)
        try:
            admitted.__enter__()
        except LimitReached as error:
            assert is_refused
            self._comes_back(holder, error, num_open)
            return
        assert not is_refused
        if per_minute is not None:
            self.begun[name].append(self.now)
        if per_minute is not None or rows is not None:
            self.open.append((name, admitted))
        else:
            admitted.__exit__(None, None, None)

    def _comes_back(self, holder: KeyHolder, error: LimitReached, num_open: int) -> None:
        """Who waits as long as it is told is let in, unless all rows are still taken."""
        assert error.retry_after_seconds is not None and error.retry_after_seconds >= 1
        if holder.rows_at_once is None or num_open < holder.rows_at_once:
            later = RequestLimits(lambda: self.now + float(error.retry_after_seconds or 0))
            later._used = self.limits._used
            before = list(later._used[holder.name].begun_at)
            with later.admit(holder):
                pass
            later._used[holder.name].begun_at.clear()
            later._used[holder.name].begun_at.extend(before)

    @rule(data=st.data(), error=st.sampled_from([None, ValueError, KeyboardInterrupt, GeneratorExit]))
    def end(self, data: st.DataObject, error: type[BaseException] | None) -> None:
        if self.open:
            place = data.draw(st.integers(0, len(self.open) - 1))
            _, admitted = self.open.pop(place)
            raised: Any = error() if error is not None else None
            try:
                admitted.__exit__(error, raised, None)
            except (ValueError, KeyboardInterrupt, GeneratorExit) as same:
                assert same is raised

    @rule(seconds=st.sampled_from([0.0, 0.5, 20.0, 59.5, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts_are_those_of_what_is_open(self) -> None:
        for name in self.begun:
            used = self.limits._used.get(name)
            assert (used.num_open if used is not None else 0) == sum(each == name for each, _ in self.open)


Asked.TestCase.settings = settings(max_examples=num_examples(60), stateful_step_count=30)
TestAsked = Asked.TestCase


@given(st.lists(st.floats(0, 30), max_size=40), st.integers(1, 4))
@settings(max_examples=num_examples(60))
def test_in_no_minute_more_begin_than_may(pauses: list[float], per_minute: int) -> None:
    """Wherever the minute is laid, however the requests come."""
    now = [0.0]
    limits = RequestLimits(lambda: now[0])
    holder = KeyHolder("anna", "anna", per_minute)
    begun: list[float] = []
    for pause in pauses:
        now[0] += pause
        try:
            with limits.admit(holder):
                begun.append(now[0])
        except LimitReached:
            continue
    assert all(later - first >= WINDOW_SECONDS for first, later in itertools.pairwise(begun[::per_minute]))


def test_a_refused_request_counts_for_nothing() -> None:
    """A client that asks again and again is let in when its minute is over."""
    now = [0.0]
    limits = RequestLimits(lambda: now[0])
    holder = KeyHolder("anna", "anna", 1)
    with limits.admit(holder):
        pass
    for second in range(1, 60):
        now[0] = float(second)
        with pytest.raises(LimitReached) as refused, limits.admit(holder):
            pass
        assert refused.value.retry_after_seconds == 60 - second
    now[0] = 60.0
    with limits.admit(holder):
        pass


def test_who_has_no_limits_is_not_counted() -> None:
    """As many as it likes, one in the other; nobody in particular likewise."""
    limits = RequestLimits()
    for holder in (KeyHolder("anna", "anna"), None):
        with limits.admit(holder), limits.admit(holder), limits.admit(holder):
            pass
    assert limits._used == {}
