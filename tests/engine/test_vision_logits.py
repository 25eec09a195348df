"""Images in the engine, logit by logit: a greedy token can hide an error that a position or a pixel off would cause."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvserve.core import GenerationRequest, TokenDelta
from kvserve.engine.vision import RopeShift
from tests.engine.engines import LOGIT_TOLERANCE, assert_close, cached, generate, generate_with_logits, running_engine
from tests.engine.test_vision import Sighted
from tests.engine.visions import QUICK, VISION, Prompted, picture, vlm_stream
from tests.laws import IS_FULL, sampled, sampled_cells

NUM_TOKENS = 8 if IS_FULL else 5


@pytest.fixture(scope="module", params=sampled(VISION, QUICK))
def sighted(request: pytest.FixtureRequest) -> Iterator[Sighted]:
    with running_engine(request.param, prefill_step_size=64) as engine:
        yield Sighted(request.param, engine)


def normalised(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities, which is what mlx-vlm tells."""
    most = logits.max(axis=-1, keepdims=True)
    return logits - most - np.log(np.exp(logits - most).sum(axis=-1, keepdims=True))


def vlm_logprobs(family: str, prompted: Prompted) -> np.ndarray:
    """What mlx-vlm's own model draws its tokens from: (tokens, vocabulary)."""
    results = vlm_stream(family, prompted, NUM_TOKENS)
    rows: list[Any] = [np.array(mx.array(result.logprobs).astype(mx.float32)).reshape(-1) for result in results]
    return np.stack(rows[:NUM_TOKENS])


def cold(sighted: Sighted, wanted: GenerationRequest) -> np.ndarray:
    sighted.engine.clear_cache()
    result, logits = generate_with_logits(sighted.engine, wanted)
    assert cached(result) == 0
    sighted.engine.clear_cache()
    return logits


def is_in_every_run(sighted: str, shape: str) -> bool:
    """Each shape with the family that has rows and columns."""
    return sighted == "qwen3_5_vl"


@pytest.mark.parametrize("sighted", VISION, indirect=True)
@pytest.mark.parametrize("shape", ["one", "not square", "two"])
@sampled_cells(is_in_every_run)
def test_a_cold_row_has_mlx_vlms_logits(sighted: Sighted, shape: str) -> None:
    """With one image, one that is not square, and two."""
    writer = sighted.writer
    prompted = {
        "one": lambda: writer.prompt("What is this? ", picture(1), " Say it."),
        "not square": lambda: writer.prompt(picture(2, 144, 56), "What is this?"),
        "two": lambda: writer.prompt("Compare ", picture(3), " with ", picture(4, 56, 112), " please."),
    }[shape]()
    found = normalised(cold(sighted, prompted.request(NUM_TOKENS)))
    assert_close(found, vlm_logprobs(sighted.family, prompted)[: len(found)])


def test_warm_rows_have_the_logits_of_cold_ones(sighted: Sighted) -> None:
    """The next turn, another image of the same size, a branch behind the image, a new one behind a warm prefix."""
    writer = sighted.writer
    first = writer.prompt("What is this? ", picture(1), " Say it.")
    others = {
        "next turn": first.followed_by(sighted.cold(first), writer.tokenizer.encode(" And why is that so?")),
        "other image": writer.prompt("What is this? ", picture(2), " Say it."),
        "branch": writer.prompt("What is this? ", picture(1), " Say it in French."),
        "new image": writer.prompt("What is this? ", picture(1), " Say it.", picture(6, 96, 64), "And this?"),
    }
    if sighted.family == "gemma4_vl" and not IS_FULL:
        others = {"next turn": others["next turn"]}
    expected = {name: cold(sighted, other.request(NUM_TOKENS)) for name, other in others.items()}
    generate(sighted.engine, first.request())
    for name, other in others.items():
        warm, logits = generate_with_logits(sighted.engine, other.request(NUM_TOKENS))
        assert cached(warm) >= first.tokens.images[0].start, name
        assert_close(logits, expected[name])


@sampled_cells(lambda sighted: sighted == "qwen3_5_vl")
def test_a_row_with_an_image_is_told_how_likely_its_tokens_were(sighted: Sighted) -> None:
    """Log-probabilities are those of the logits that each token was drawn from."""
    prompted = sighted.writer.prompt("What is this? ", picture(1), " Say it.")
    wanted = prompted.request(NUM_TOKENS)
    expected = normalised(cold(sighted, wanted))
    generation = sighted.engine.submit(replace(wanted, num_top_logprobs=2))
    events = [event for batch in generation.batches(60) for event in batch]
    told = [(event.token, event.logprobs) for event in events if isinstance(event, TokenDelta) and event.logprobs]
    assert len(told) == len(expected)
    for (token, logprobs), row in zip(told, expected, strict=True):
        assert logprobs.logprob == pytest.approx(row[token], abs=LOGIT_TOLERANCE)
        assert logprobs.top[0] == (token, logprobs.logprob)


def test_a_shift_that_is_off_by_one_is_noticed(sighted: Sighted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: text behind an image that stands one position too far has other logits."""
    if not sighted.model.module.has_positions:
        pytest.skip("its positions are offsets")
    prompted = sighted.writer.prompt("What is this? ", picture(1, 96, 64), " Say it.")
    expected = cold(sighted, prompted.request(NUM_TOKENS))
    real: Any = vars(RopeShift)["array"]
    monkeypatch.setattr(
        RopeShift, "array", property(lambda self: None if real.fget(self) is None else real.fget(self) + 1)
    )
    shifted = cold(sighted, prompted.request(NUM_TOKENS))
    assert np.abs(shifted[0] - expected[0]).max() > 10 * LOGIT_TOLERANCE
