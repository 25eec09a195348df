"""What was measured, and when a server is asked: tables with a clock in hand."""

from kvserve.remote.rates import LIES_SECONDS, LONGEST_PAUSE_SECONDS, MIN_MEASURED_BYTES, Breaker, Rates


def test_small_exchanges_tell_nothing_of_the_bandwidth() -> None:
    """Those of a part or more do; the newest weighs a third."""
    rates = Rates()
    rates.was_read(MIN_MEASURED_BYTES - 1, 1.0)
    assert rates.read_bytes_per_second is None
    rates.was_read(2**20, 1.0)
    rates.was_read(2 * 2**20, 1.0)
    assert rates.read_bytes_per_second == 1.3 * 2**20
    rates.exchanged(0.1)
    rates.exchanged(0.2)
    assert rates.latency_seconds is not None and abs(rates.latency_seconds - 0.13) < 1e-9


def test_a_breaker_opens_at_the_first_failure_and_closes_at_a_probe() -> None:
    """It begins open, probes after 1, 2, 4 .. 30 s, and begins anew with 1 s once one succeeded."""
    breaker = Breaker()
    assert not breaker.is_closed and breaker.is_due(0.0)
    now, pauses = 0.0, list[float]()
    for _ in range(8):
        breaker.failed(now)
        pauses.append(breaker.seconds_to_probe(now))
        assert not breaker.is_due(now + pauses[-1] - 0.01)
        now += pauses[-1]
        assert breaker.is_due(now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, LONGEST_PAUSE_SECONDS]
    breaker.succeeded()
    assert breaker.is_closed and not breaker.is_due(now)
    breaker.failed(now)
    assert not breaker.is_closed and breaker.seconds_to_probe(now) == 1


def test_three_lies_within_a_minute_are_enough_for_a_while() -> None:
    """Three in two minutes are not."""
    breaker = Breaker()
    breaker.succeeded()
    for now in (0.0, 50.0, 100.0):
        breaker.lied(now)
    assert breaker.is_closed and not breaker.is_lying
    breaker.lied(105.0)
    breaker.failed(105.5)  # the other thread's, at the same time
    assert breaker.is_lying and not breaker.is_due(105.0 + LIES_SECONDS - 1) and breaker.is_due(105.0 + LIES_SECONDS)
    breaker.succeeded()
    assert breaker.is_closed and not breaker.is_lying
