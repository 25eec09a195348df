"""What a dispatcher is given arrives in order, and all of it; what may wait goes when the next is sent."""

import threading

import mlx.core as mx

from kvserve.engine.token_dispatcher import SendingModule, TokenDispatcher


def test_deliveries_keep_their_order_on_one_other_thread() -> None:
    """Each call is made once, in the order given, not on the caller's thread."""
    made: list[tuple[int, int]] = []
    dispatcher = TokenDispatcher()
    dispatcher.start()
    for number in range(1000):
        dispatcher.dispatch(lambda number=number: made.append((number, threading.get_ident())), may_wait=number % 3 > 0)  # type: ignore[misc]
    dispatcher.stop()
    assert [number for number, _ in made] == list(range(1000))
    assert {thread for _, thread in made} != {threading.get_ident()}
    assert len({thread for _, thread in made}) == 1


def test_what_was_given_before_the_end_is_delivered() -> None:
    """`stop` comes back when nothing is left to deliver, and may be called again."""
    gate, made = threading.Event(), []
    dispatcher = TokenDispatcher()
    dispatcher.start()
    dispatcher.dispatch(lambda: gate.wait(60) and None, may_wait=False)
    dispatcher.dispatch(lambda: made.append("last"), may_wait=True)
    threading.Timer(0.05, gate.set).start()
    dispatcher.stop()
    assert made == ["last"]
    dispatcher.stop()


def test_what_may_wait_goes_when_the_next_is_sent() -> None:
    """Until then nobody is woken for it; what may not wait takes it along, in the order in which they were given."""
    made: list[int] = []
    dispatcher = TokenDispatcher()
    dispatcher.start()

    def carried(number: int, *, may_wait: bool) -> None:
        arrived = threading.Event()

        def arrive() -> None:
            made.append(number)
            arrived.set()

        dispatcher.dispatch(arrive, may_wait=may_wait)
        assert arrived.wait(0.1 if may_wait else 60) != may_wait

    carried(1, may_wait=True)
    carried(2, may_wait=True)
    assert made == []
    carried(3, may_wait=False)
    assert made == [1, 2, 3]
    carried(4, may_wait=True)
    assert made == [1, 2, 3]
    dispatcher.send()
    dispatcher.send()
    dispatcher.stop()
    assert made == [1, 2, 3, 4]


def test_a_module_sends_when_its_pass_is_described() -> None:
    """Neither before it nor after the evaluation; for the rest it is the module."""
    order: list[str] = []

    class Module:
        layers = ("one", "two")

        def __call__(self, tokens: mx.array, *, cache: str) -> str:
            order.append(cache)
            return "logits"

    sending = SendingModule(Module(), lambda: order.append("sent"))
    assert sending(mx.array([[1]]), cache="described") == "logits"
    assert order == ["described", "sent"]
    assert sending.layers == ("one", "two")
