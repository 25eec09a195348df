"""Where an answer ended with another stop token than later prompts have, a row keeps the states from before it."""

from dataclasses import replace

import mlx.core as mx
import pytest

from kvserve.engine.decode import DecodePool
from kvserve.engine.decode_group import ExtractedRow
from kvserve.engine.model import LoadedModel, load
from tests.engine.engines import prompt_of, request
from tests.engine.test_decode import enter
from tests.models import tiny_model

PROMPT = prompt_of(40, 3)
NEXT = [311, 312, 313]


@pytest.fixture(scope="module")
def hybrid() -> LoadedModel:
    return load(tiny_model("qwen3_5"), 131072)


def answered(model: LoadedModel, *, repeated: bool) -> tuple[ExtractedRow, int]:
    """A row that ended with a stop token beside one that goes on, and that token; later prompts have it or another."""
    caches, tokens, written = model.new_caches(), mx.array([PROMPT]), []
    for _ in range(8):
        token = int(mx.argmax(model.module(tokens, cache=caches)[0, -1]).item())
        written.append(token)
        tokens = mx.array([[token]])
    stop = next(token for place, token in enumerate(written) if place > 2 and token not in written[:place])
    pool = DecodePool(model, 4)
    enter(pool, model, request(prompt_of(25, 7), 1_000))
    asked = request(PROMPT, 100, stop=[stop])
    row = enter(pool, model, replace(asked, turn_end=stop if repeated else stop + 1))
    while not (finished := pool.step().finished):
        pass
    assert [left.row for left in finished] == [row]
    pool.discard()
    return finished[0], stop


def logits_after(model: LoadedModel, left: ExtractedRow) -> tuple[mx.array, mx.array]:
    """What follows behind the row's tokens, warm from its caches and cold from its tokens."""
    for cache in left.caches:
        if hasattr(cache, "offset"):
            cache.offset = len(left.tokens)
    warm = model.module(mx.array([NEXT]), cache=left.caches)[0, -1]
    cold = model.module(mx.array([[*left.tokens, *NEXT]]), cache=model.new_caches())[0, -1]
    return warm, cold


@pytest.mark.parametrize("repeated", [True, False])
def test_the_states_are_those_of_the_tokens(hybrid: LoadedModel, repeated: bool) -> None:
    """Behind the stop token where later prompts repeat it, else before it; either way a warm row is a cold one."""
    left, stop = answered(hybrid, repeated=repeated)
    assert (left.tokens[-1] == stop) is repeated
    warm, cold = logits_after(hybrid, left)
    assert mx.allclose(warm, cold, atol=1e-4)


def test_a_state_one_token_off_would_be_seen(hybrid: LoadedModel) -> None:
    """The control: the state behind the stop token is no state of the tokens before it."""
    left, _ = answered(hybrid, repeated=True)
    warm, cold = logits_after(hybrid, replace(left, tokens=left.tokens[:-1]))
    assert not mx.allclose(warm, cold, atol=0.1)


def test_held_states_are_counted(hybrid: LoadedModel) -> None:
    """A step holds the states from before it, once more for each row; where all can be cut nothing is held."""
    pool = DecodePool(hybrid, 4)
    for seed in range(2):
        enter(pool, hybrid, request(prompt_of(30, seed), 100))
    assert pool.padding_bytes() == 2 * hybrid.sizes.fixed > 0
    pool.discard()
    dense = load(tiny_model("qwen3"), 131072)
    pool = DecodePool(dense, 4)
    enter(pool, dense, request(prompt_of(30), 100))
    assert pool.padding_bytes() == 0
    pool.discard()
