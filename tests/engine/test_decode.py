"""Which rows share a batch, whose turn it is, and when their tokens go out."""

from dataclasses import replace

import mlx.core as mx
import pytest

from kvserve.core import GenerationRequest
from kvserve.engine.decode import DecodePool, extra_padding_tokens
from kvserve.engine.decode_group import Group
from kvserve.engine.model import LoadedModel, load
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.token_dispatcher import Delivery, Dispatch, call_now
from tests.engine.engines import prompt_of, request
from tests.models import tiny_model


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """Its weights are told as so few that a prompt of 300 tokens is a long one."""
    loaded = load(tiny_model("qwen3"), 131072)
    return replace(loaded, active_weight_bytes=int(200 * loaded.sizes.per_token))


def long_prompt(model: LoadedModel) -> list[int]:
    """So long that padding a short row to it costs more than reading the weights."""
    return prompt_of(100 + model.active_weight_bytes // int(model.sizes.per_token))


def enter(pool: DecodePool, model: LoadedModel, each: GenerationRequest, carry: Dispatch = call_now) -> Row:
    """Prefill in pieces (the scores of one piece grow with its square) and let the row decode."""
    row = Row(RequestHandle(each, carry), lambda: None)
    caches = model.new_caches()
    ids = each.prompt.ids[:-1]
    for start in range(0, len(ids), 128):
        model.module(mx.array([ids[start : start + 128]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    pool.enter(row, caches)
    return row


def padded_tokens(pool: DecodePool) -> int:
    """Tokens of KV that the batches hold, padding included."""
    return sum(group.longest * len(group.rows) for group in pool._groups)


def test_padding_is_the_joining_rows_or_the_others() -> None:
    """A short row is padded to the longest; a long one pads everybody else."""
    assert extra_padding_tokens([], 5) == 0
    assert extra_padding_tokens([10, 4], 7) == 3
    assert extra_padding_tokens([10, 4], 10) == 0
    assert extra_padding_tokens([10, 4], 13) == 6


def test_what_a_batch_holds_is_asked_once_however_many_rows_it_has(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer looks at all of its rows, and is asked for at each step."""
    pool, asked = DecodePool(model, 8), list[int]()
    num_slots = Group.num_slots.fget
    monkeypatch.setattr(Group, "num_slots", property(lambda group: asked.append(1) or num_slots(group)))
    held = []
    for number in range(3):
        enter(pool, model, request(prompt_of(20, number), 100))
        asked.clear()
        held.append(pool.held_bytes())
        assert len(asked) == 1
    assert held[2] == pytest.approx(3 * model.sizes.live(20))


def test_a_long_row_gets_a_generator_of_its_own(model: LoadedModel) -> None:
    """Rows of a length share a batch; one whose padding costs more than reading the weights does not join them."""
    pool = DecodePool(model, 8)
    for seed in range(3):
        enter(pool, model, request(prompt_of(20 + seed, seed), 100))
    assert padded_tokens(pool) == 3 * 22
    too_long = 25 + model.active_weight_bytes // int(model.sizes.per_token)
    enter(pool, model, request(prompt_of(too_long), 100))
    assert padded_tokens(pool) == 3 * 22 + too_long
    enter(pool, model, request(prompt_of(21, 9), 100))
    assert padded_tokens(pool) == 4 * 22 + too_long
    pool.discard()


def test_groups_take_turns_by_time_per_row(model: LoadedModel, even_steps: None) -> None:
    """Three short rows get about three quarters of the time beside one long row, not half of it."""
    pool = DecodePool(model, 8)
    short = [enter(pool, model, request(prompt_of(20, seed), 10_000)) for seed in range(3)]
    long = enter(pool, model, request(long_prompt(model), 10_000))
    for _ in range(5):
        pool.step_all()
    for _ in range(120):
        pool.step()
    used = {len(group.rows): group.used_seconds for group in pool._groups}
    assert used[3] == pytest.approx(used[1], rel=0.1), "time per row is what is levelled"
    assert len(short[0].generated) > 2.5 * len(long.generated)
    pool.discard()


def test_every_row_gets_a_token_in_step_all(model: LoadedModel) -> None:
    """Between two prefill chunks nobody is left out, whatever the groups have used so far."""
    pool = DecodePool(model, 8)
    rows = [enter(pool, model, request(prompt_of(length), 100)) for length in (20, len(long_prompt(model)))]
    for _ in range(3):
        pool.step_all()
    assert [len(row.generated) for row in rows] == [2, 2], "the first step only computes the last prompt token"
    pool.discard()


def test_a_late_group_does_not_catch_up_on_time_it_was_not_there(model: LoadedModel, even_steps: None) -> None:
    """A new group starts level with the busiest-served one, else it would stall the others until it caught up."""
    pool = DecodePool(model, 8)
    early = enter(pool, model, request(prompt_of(20), 10_000))
    for _ in range(40):
        pool.step()
    enter(pool, model, request(long_prompt(model), 10_000))
    before = len(early.generated)
    for _ in range(30):
        pool.step()
    assert len(early.generated) > before + 5
    pool.discard()


@pytest.mark.parametrize("num_groups", [1, 2])
def test_tokens_of_a_step_go_out_in_the_middle_of_the_next(
    model: LoadedModel, num_groups: int, even_steps: None
) -> None:
    """Only a row's first token and its end do not wait; with two generators in turns nobody waits for its own next."""
    events: list[str] = []

    def carry(deliver: Delivery, *, may_wait: bool) -> None:
        events.append("waits" if may_wait else "goes")

    pool = DecodePool(model, 8, lambda: events.append("send"))
    lengths = (20, len(long_prompt(model)))[:num_groups]
    for length in lengths:
        enter(pool, model, request(prompt_of(length), 4), carry)
    while pool.num_rows:
        pool.step()
        events.append("step")
    steps = " ".join(events).split(" step")
    assert steps.pop() == ""
    found = [step.split() for step in steps]
    assert all(step[0] == "send" for step in found), "each step describes a pass, or two where the row is new"
    said = [[event for event in step if event != "send"] for step in found]
    # the first step of a row computes its last prompt token only; the last one brings a token and the end
    assert [step for step in said if step] == [
        [word] if word != "end" else ["waits", "goes"] for word in ("goes", "waits", "waits", "end") for _ in lengths
    ]
    pool.discard()
