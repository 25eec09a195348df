"""Rows that end inside an image, and quantised KV that starts beside one or in it: nothing of a cut image is kept, and
what is found again is exact."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvserve.core import TokenSequence
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.prefill import Prefill
from kvserve.engine.quantised import KvSettings
from kvserve.engine.warming import WarmJob, WarmKind
from kvserve.engine.worker import Engine
from tests.engine.engines import assert_exact, cached, generate, held, running_engine
from tests.engine.test_vision import Sighted
from tests.engine.visions import VISION, Prompted, picture
from tests.laws import sampled, sampled_cells

CUTTABLE = tuple(family for family in VISION if family != "gemma4_vl")
"""Families in which a prefill may pause inside an image."""


def question(sighted: Sighted, seed: int = 1) -> Prompted:
    return sighted.writer.prompt("What is this? ", picture(seed, 128, 96), " Say it.")


@functools.cache
def question_of(family: str) -> Prompted:
    with running_engine(family) as engine:
        return question(Sighted(family, engine))


def num_retreats(engine: Engine) -> int:
    return engine.cache_report().stats.num_image_retreats


def inside_image(prompted: Prompted, patch: pytest.MonkeyPatch, act: Callable[[Prefill], None]) -> None:
    """Act once, as soon as a prefill stands inside the prompt's image."""
    [span] = prompted.tokens.images
    real = Prefill.step
    done: list[int] = []

    def step(self: Prefill, *args: Any) -> int:
        num_tokens = real(self, *args)
        if span.start < self.num_done < span.end and not done:
            done.append(self.num_done)
            act(self)
        return num_tokens

    patch.setattr(Prefill, "step", step)


@dataclass(frozen=True)
class Asked:
    """An engine in small steps that has forgotten everything, a question about an image, and what it answers cold."""

    engine: Engine
    prompted: Prompted
    expected: tuple[int, ...]
    num_retreats: int

    def warm_job(self, kind: WarmKind, max_tokens: int | None = None) -> WarmJob:
        """Computing the question ahead, to two tokens behind its image."""
        tokens = self.prompted.tokens
        prefix = TokenSequence(tokens.ids[: tokens.images[0].end + 2], tokens.images)
        return WarmJob(prefix, kind, max_tokens=max_tokens, images=self.prompted.images)

    def answers_exactly(self) -> int:
        """Ask: the answer is the cold one and no image was cut for it; returns how many tokens were found."""
        [answer] = generate(self.engine, self.prompted.request())
        assert_exact(answer, self.expected)
        assert num_retreats(self.engine) == self.num_retreats
        return cached(answer)


@pytest.fixture(scope="module", params=sampled(CUTTABLE, ("qwen3_5_vl",)))
def small_steps(request: pytest.FixtureRequest) -> Iterator[Sighted]:
    with running_engine(request.param, prefill_step_size=16) as engine:
        yield Sighted(request.param, engine)


@pytest.fixture
def asked(small_steps: Sighted) -> Asked:
    prompted, engine = question(small_steps), small_steps.engine
    return Asked(engine, prompted, small_steps.known(prompted), num_retreats(engine))


def test_a_client_that_leaves_inside_an_image_leaves_no_cut_image(asked: Asked) -> None:
    """What is kept ends before the image; who asks again finds that and writes what a cold engine writes."""
    start = asked.prompted.tokens.images[0].start
    with pytest.MonkeyPatch.context() as patch:
        inside_image(asked.prompted, patch, lambda prefill: prefill.row.handle.cancel())
        [left] = generate(asked.engine, asked.prompted.request())
    assert left.tokens == ()
    assert asked.engine.cache_report().stats.num_stored_tokens <= start
    assert 0 < asked.answers_exactly() <= start


def test_warming_that_is_put_down_inside_an_image_leaves_no_cut_image(asked: Asked) -> None:
    """A request comes while its prefix is computed ahead: no image is cut for it, and its answer is a cold one's."""
    with pytest.MonkeyPatch.context() as patch:
        inside_image(asked.prompted, patch, lambda _: warming.cancel())
        with held(asked.engine):  # until it can be cancelled
            warming = asked.engine.warm(asked.warm_job("prewarm"))
        result = warming.wait(60)
    assert result is not None and result.reason == "cancelled", result
    asked.answers_exactly()


def test_warming_that_may_compute_so_much_ends_beside_an_image(asked: Asked) -> None:
    """Its last token would be in the middle of one: the image is computed whole."""
    [span] = asked.prompted.tokens.images
    result = asked.engine.warm(asked.warm_job("next_turn", max_tokens=(span.start + span.end) // 2)).wait(60)
    assert result is not None and result.num_computed_tokens == span.end, result
    assert asked.answers_exactly() == span.end


PLACES = ("at once", "before it", "inside it", "behind it", "in the answer")
EVERY_RUN = (("qwen3_5_vl", "inside it"),)
"""Inside an image, in a hybrid."""


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("family", VISION)
@sampled_cells(lambda family, where: (family, where) in EVERY_RUN)
def test_quantised_kv_around_an_image_is_exact(family: str, where: str, tmp_path: Path) -> None:
    """Wherever it starts: the next turn, another image of the same size and a restart write what a cold engine with
    the same settings writes, the image's KV is found again, and nothing is reported."""
    prompted = question_of(family)
    span, num_tokens = prompted.tokens.images[0], len(prompted.tokens)
    start = dict(
        zip(PLACES, (0, span.start - 3, (span.start + span.end) // 2, span.end + 2, num_tokens + 5), strict=True)
    )[where]
    kv = KvSettings(bits=4, scheme="turboquant", start=start)
    disk = DiskSettings(tmp_path / "kv", None, 0, 24.0)
    told: list[str] = []
    with running_engine(family, kv=kv, disk=disk, prefill_step_size=64, report=told.append) as engine:
        sighted = Sighted(family, engine)
        first, other = question(sighted), question(sighted, 2)
        more = sighted.writer.tokenizer.encode(" And why is that so?")
        second = first.followed_by(sighted.cold(first), more)
        expected, expected_other = sighted.cold(second), sighted.cold(other)
        generate(engine, first.request(1))
        [warm] = generate(engine, second.request())
        assert_exact(warm, expected)
        assert cached(warm) >= span.end
        [answer] = generate(engine, other.request())
        assert_exact(answer, expected_other)
        assert cached(answer) <= span.start
        assert num_retreats(engine) == 0
        engine.clear_cache()
        generate(engine, first.request(1))
    with running_engine(family, kv=kv, disk=disk, report=told.append) as engine:
        [warm] = generate(engine, second.request())
        assert_exact(warm, expected)
        assert cached(warm) >= span.end
    assert told == []
