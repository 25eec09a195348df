"""What a courier carries arrives in order, and all of it; what may wait goes with the next departure."""

import threading

import mlx.core as mx

from kvserve.engine.token_dispatcher import Courier, Departing


def test_deliveries_keep_their_order_on_one_other_thread() -> None:
    """Each call is made once, in the order given, not on the caller's thread."""
    made: list[tuple[int, int]] = []
    courier = Courier()
    courier.start()
    for number in range(1000):
        courier.carry(lambda number=number: made.append((number, threading.get_ident())), may_wait=number % 3 > 0)  # type: ignore[misc]
    courier.stop()
    assert [number for number, _ in made] == list(range(1000))
    assert {thread for _, thread in made} != {threading.get_ident()}
    assert len({thread for _, thread in made}) == 1


def test_what_was_given_before_the_end_is_delivered() -> None:
    """`stop` comes back when nothing is left to deliver, and may be called again."""
    gate, made = threading.Event(), []
    courier = Courier()
    courier.start()
    courier.carry(lambda: gate.wait(10) and None, may_wait=False)
    courier.carry(lambda: made.append("last"), may_wait=True)
    threading.Timer(0.05, gate.set).start()
    courier.stop()
    assert made == ["last"]
    courier.stop()


def test_what_may_wait_goes_with_the_next_departure() -> None:
    """Until then nobody is woken for it; what may not wait takes it along, in the order in which they were given."""
    made: list[int] = []
    courier = Courier()
    courier.start()

    def carried(number: int, *, may_wait: bool) -> None:
        arrived = threading.Event()

        def arrive() -> None:
            made.append(number)
            arrived.set()

        courier.carry(arrive, may_wait=may_wait)
        assert arrived.wait(0.1 if may_wait else 10) != may_wait

    carried(1, may_wait=True)
    carried(2, may_wait=True)
    assert made == []
    carried(3, may_wait=False)
    assert made == [1, 2, 3]
    carried(4, may_wait=True)
    assert made == [1, 2, 3]
    courier.depart()
    courier.depart()
    courier.stop()
    assert made == [1, 2, 3, 4]


def test_a_module_departs_when_its_pass_is_described() -> None:
    """Neither before it nor after the evaluation; for the rest it is the module."""
    order: list[str] = []

    class Module:
        layers = ("one", "two")

        def __call__(self, tokens: mx.array, *, cache: str) -> str:
            order.append(cache)
            return "logits"

    departing = Departing(Module(), lambda: order.append("departed"))
    assert departing(mx.array([[1]]), cache="described") == "logits"
    assert order == ["described", "departed"]
    assert departing.layers == ("one", "two")
