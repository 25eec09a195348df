"""Negative controls: whatever the matrix of images compares must be able to fail."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvserve.core import TokenSequence
from kvserve.engine.vision import RopeShift
from kvserve.engine.vision_pass import RowImages
from kvserve.engine.vision_tower import Features, Tower
from tests.engine.engines import assert_close, generate, running_engine
from tests.engine.test_vision import Sighted
from tests.engine.test_vision_logits import cold
from tests.engine.visions import QUICK, VISION, Prompted, picture
from tests.laws import IS_FULL, sampled

MROPE = ("qwen3_5_vl", "qwen3_vl", "glm4v")


@pytest.fixture(scope="module", params=sampled(VISION, QUICK[:1]))
def sighted(request: pytest.FixtureRequest) -> Iterator[Sighted]:
    with running_engine(request.param, prefill_step_size=64) as engine:
        yield Sighted(request.param, engine)


def question(sighted: Sighted, seed: int) -> Prompted:
    return sighted.writer.prompt("What is this? ", picture(seed, 96, 64), " Say it.")


def test_another_images_kv_is_noticed(sighted: Sighted) -> None:
    """Where both images are given one digest, the second is answered from the first one's KV, and wrongly."""
    one, other = question(sighted, 1), question(sighted, 2)
    expected = sighted.cold(other)
    digest = one.tokens.images[0].digest
    [span], [image] = other.tokens.images, other.images
    forged = replace(
        other,
        tokens=TokenSequence(other.tokens.ids, (replace(span, digest=digest),)),
        images=(replace(image, facts=replace(image.facts, digest=digest)),),
    )
    generate(sighted.engine, one.request())
    [answer] = generate(sighted.engine, forged.request())
    assert answer.tokens != expected


def test_features_of_another_image_are_noticed(sighted: Sighted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer depends on what the tower saw."""
    prompted = question(sighted, 1)
    expected = sighted.cold(prompted)
    real = Tower.look

    def elsewhere(self: Tower, tower_input: dict[str, object], num_tokens: int) -> Features:
        pixels = np.array(tower_input["pixel_values"])
        return real(self, {**tower_input, "pixel_values": np.flip(pixels, axis=-1).copy()}, num_tokens)

    monkeypatch.setattr(Tower, "look", elsewhere)
    assert sighted.cold(prompted) != expected


def test_a_dropped_shift_is_noticed(sighted: Sighted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text behind an image that stands where its offset says writes something else."""
    if sighted.family not in MROPE:
        pytest.skip("its positions are offsets")
    prompted = question(sighted, 1)
    expected = sighted.cold(prompted)
    monkeypatch.setattr(RopeShift, "array", property(lambda self: None))
    assert sighted.cold(prompted) != expected


def test_dropped_rows_and_columns_are_noticed(sighted: Sighted, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image whose tokens stand in a line writes something else."""
    if sighted.family not in MROPE:
        pytest.skip("its positions are offsets")
    prompted = question(sighted, 1)
    expected = sighted.cold(prompted)

    def in_a_line(self: RowImages, start: int, end: int) -> np.ndarray:
        return np.broadcast_to(np.arange(start, end, dtype=np.int32), (3, end - start))

    monkeypatch.setattr(RowImages, "position_ids", in_a_line)
    assert sighted.cold(prompted) != expected


@pytest.mark.long
def test_a_cut_inside_an_image_is_noticed_where_it_is_forbidden() -> None:
    """A family whose images see themselves in both directions has other logits in two pieces, whatever the image; a few
    tokens may stay the same."""
    with running_engine("gemma4_vl", prefill_step_size=32) as engine:
        sighted = Sighted("gemma4_vl", engine)
        for wanted in (question(sighted, seed).request() for seed in ((1, 2) if IS_FULL else (1,))):
            expected = cold(sighted, wanted)
            assert_close(cold(sighted, wanted), expected)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RowImages, "whole", lambda self, start, end: end)
                cut = cold(sighted, wanted)
            assert cut.shape == expected.shape
            with pytest.raises(AssertionError):
                assert_close(cut, expected)
