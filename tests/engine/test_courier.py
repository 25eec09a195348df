"""What a courier carries arrives in order, and all of it."""

import threading

from kvserve.engine.courier import Courier


def test_deliveries_keep_their_order_on_one_other_thread() -> None:
    """Each call is made once, in the order given, not on the caller's thread."""
    made: list[tuple[int, int]] = []
    courier = Courier()
    courier.start()
    for number in range(1000):
        courier.carry(lambda number=number: made.append((number, threading.get_ident())))  # type: ignore[misc]
    courier.stop()
    assert [number for number, _ in made] == list(range(1000))
    assert {thread for _, thread in made} != {threading.get_ident()}
    assert len({thread for _, thread in made}) == 1


def test_what_was_given_before_the_end_is_delivered() -> None:
    """`stop` comes back when nothing is left to deliver, and may be called again."""
    gate, made = threading.Event(), []
    courier = Courier()
    courier.start()
    courier.carry(lambda: gate.wait(10) and None)
    courier.carry(lambda: made.append("last"))
    threading.Timer(0.05, gate.set).start()
    courier.stop()
    assert made == ["last"]
    courier.stop()
