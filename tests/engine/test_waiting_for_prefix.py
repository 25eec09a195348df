"""Rows that wait for what another one is computing: whom they wait for is told to whoever watches."""

from dataclasses import replace

from kvserve.core import Awaiting, GenerationEvent, RequestId
from tests.engine.engines import collect, held, prompt_of, request, running_engine


def test_a_row_says_for_whom_it_waits_and_how_long() -> None:
    """The request, how much of the prompt both have, and what is left of it at the speed of the newest chunk."""
    with running_engine(prefill_step_size=16) as engine:
        collect(engine.submit(request(prompt_of(64, 9), 1)))  # a speed is known
        shared = prompt_of(400)
        first = replace(request([*shared, *prompt_of(8, 1)], 1), request_id=RequestId("first"))
        second = replace(request([*shared, *prompt_of(8, 2)], 1), request_id=RequestId("second"))
        with held(engine):
            one, other = engine.submit(first), engine.submit(second)
        events: list[GenerationEvent] = [event for batch in other.batches(60) for event in batch]
        told = [event for event in events if isinstance(event, Awaiting)]
        assert not any(isinstance(event, Awaiting) for batch in one.batches(60) for event in batch)
    assert [event.request_id for event in told] == ["first"]
    assert 384 <= told[0].num_tokens <= 400 and 0 < told[0].num_left_tokens <= told[0].num_tokens
    assert told[0].seconds is not None and told[0].seconds > 0
