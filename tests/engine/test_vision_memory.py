"""Many images in a row: what is kept of them stays within its budgets."""

from dataclasses import replace

import mlx.core as mx
import pytest

from tests.engine.engines import CACHE, generate, running_engine
from tests.engine.test_vision import Sighted
from tests.engine.visions import picture

FULL_RUN = pytest.param(50, 256, marks=(pytest.mark.long, pytest.mark.timeout(600)))


@pytest.mark.parametrize(("num_images", "side"), [(8, 128), FULL_RUN])
def test_memory_stays_flat(num_images: int, side: int) -> None:
    """Features and KV within their budgets after every image, and no more memory in the end than after the first."""
    feature_bytes, kv_bytes = 8 * side**2, 16 * side**2  # those of two or three images, and of four
    cache = replace(CACHE, max_bytes=kv_bytes)
    with running_engine("qwen3_vl", cache=cache, image_feature_bytes=feature_bytes) as engine:
        sighted = Sighted("qwen3_vl", engine)
        assert sighted.model.vision is not None
        tower = sighted.model.vision.tower
        seen: list[int] = []
        for seed in range(num_images):
            generate(engine, sighted.writer.prompt("What is this?", picture(seed, side, side)).request(2))
            report = engine.image_report()
            assert report is not None
            assert report.num_feature_bytes <= feature_bytes
            assert engine.cache_report().stats.ram_bytes <= kv_bytes
            seen.append(engine._ask(lambda _: mx.get_active_memory()))  # between two steps, of idle work too
        assert tower.num_calls == num_images
        assert max(seen[num_images // 2 :]) <= max(seen[: num_images // 2]) + feature_bytes


def test_what_was_forgotten_is_looked_at_again() -> None:
    """An image whose features left is decoded and looked at once more, and its answer is the same."""
    with running_engine("qwen3_vl", image_feature_bytes=1) as engine:
        sighted = Sighted("qwen3_vl", engine)
        one, other = (sighted.writer.prompt("What is this?", picture(seed)) for seed in (1, 2))
        first = sighted.cold(one)
        sighted.cold(other)
        num_calls = sighted.num_tower_calls
        assert sighted.cold(sighted.writer.prompt("What is this?", picture(1))) == first
        assert sighted.num_tower_calls == num_calls + 1


def test_equal_ids_of_an_image_are_one_object() -> None:
    """Of an image of thousands of tokens its ids take eight bytes each, as the server counts them."""
    with running_engine("qwen3_5_vl") as engine:
        vision = engine.wait_until_ready(0).vision
        assert vision is not None
        ids = vision.reader(picture(1, 128, 128)).facts.ids
    assert min(ids) > 256, "Python keeps one object of each smaller number anyway"
    assert len({id(token) for token in ids}) == len(set(ids)) < len(ids)
