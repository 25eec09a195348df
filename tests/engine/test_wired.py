"""The wired limit of the process: the operator's from load to end, whatever generators are born and end meanwhile."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from kvserve.engine import decode
from kvserve.engine.memory import plan_memory
from kvserve.engine.wired import WiredLimit, batch_generator, wired_bytes
from tests.engine.engines import generate, prompt_of, request, running_engine
from tests.laws import sampled_cells

GIB = 2**30
RECOMMENDED = 48 * GIB


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device with a recommended maximum, and the limits that are set on it; the process's own was 7."""
    found = [7]

    def set_wired_limit(num_bytes: int) -> int:
        found.append(num_bytes)
        return found[-2]

    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    info = dict(mx.device_info()) | {"max_recommended_working_set_size": RECOMMENDED}
    monkeypatch.setattr(mx, "device_info", lambda *_: info)
    return found


def test_a_generator_of_mlx_lm_sets_the_maximum_and_puts_back_what_it_found(limits: list[int]) -> None:
    """Why there is anything to do: as its source has it."""
    generator: Any = BatchGenerator(lambda: None)
    assert limits == [7, RECOMMENDED]
    generator.close()
    assert limits == [7, RECOMMENDED, 7]


@pytest.mark.parametrize(("wanted", "expected"), [(0, 0), (20 * GIB, 20 * GIB), (100 * GIB, RECOMMENDED)])
def test_generators_that_are_born_and_end_leave_the_limit_alone(limits: list[int], wanted: int, expected: int) -> None:
    """It is set once, to what the operator wants and the device can, and put back at the end."""
    limit = WiredLimit()
    limit.begin(wanted)
    first, second = (batch_generator(lambda: None) for _ in range(2))
    first.close()
    third = batch_generator(lambda: None)
    del second
    third.close()
    assert limits == [7, expected]
    limit.end()
    limit.end()
    assert limits == [7, expected, 7]


@sampled_cells(lambda wanted, expected: wanted)
@pytest.mark.parametrize(("wanted", "expected"), [(0, 0), (5 * GIB, 5 * GIB)])
def test_an_engine_has_the_operators_limit_from_its_load_to_its_end(
    limits: list[int], wanted: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows that do not share a batch, the checks at load, and the stop: no other limit is ever set."""
    monkeypatch.setattr(decode, "extra_padding_tokens", lambda *_: 10**12)  # each by itself, as of other lengths
    with running_engine(wired_bytes=wanted) as engine:
        generate(engine, request(prompt_of(60), 4), request(prompt_of(20), 4))
        assert limits == [7, expected]
    assert limits == [7, expected, 7]


def test_auto_wires_weights_and_all_kv_and_buffers() -> None:
    """What a step reads and what it computes in, and no more."""
    plan = plan_memory(48 * GIB, 16 * GIB)
    assert wired_bytes(None, 16 * GIB, plan) == 16 * GIB + plan.pool_bytes + plan.buffer_bytes < 48 * GIB
    assert wired_bytes(0, 16 * GIB, plan) == 0


def test_without_such_a_device_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there is no such limit."""
    monkeypatch.setattr(mx, "set_wired_limit", lambda _: pytest.fail("there is no limit to set"))
    monkeypatch.setattr(mx, "device_info", lambda *_: {})
    limit = WiredLimit()
    limit.begin(GIB)
    limit.end()
