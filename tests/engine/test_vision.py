"""Images in the engine: what it writes is what mlx-vlm writes, cold, warm, branched and in batches of all kinds.

Rules, and ids and cold answers of some prompt, are compared for all families in every run, the rest for QUICK and in
`make full` for all.
"""

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.utils import prepare_inputs

from kvserve.core import GenerationDone, TokenSequence
from kvserve.engine.worker import Engine
from tests.engine.engines import assert_exact, cached, generate, running_engine
from tests.engine.led_drafts import LedDrafter, drafts_tried
from tests.engine.visions import QUICK, VISION, Prompted, Writer, for_processor, picture, vlm, vlm_answer
from tests.laws import sampled, sampled_cells

RULES = {
    "qwen3_5_vl": "anywhere",
    "qwen3_vl": "anywhere",
    "gemma3_vl": "anywhere",
    "gemma4_vl": "whole",
    "glm4v": "anywhere",
}


class Sighted:
    """A running engine on a vision model, and what writes its prompts."""

    def __init__(self, family: str, engine: Engine) -> None:
        self.family = family
        self.engine = engine
        self.model = engine.wait_until_ready(0)
        self.writer = Writer.of(family, self.model)
        self._known: dict[TokenSequence, tuple[int, ...]] = {}

    def known(self, prompted: Prompted) -> tuple[int, ...]:
        """The same answer, computed once for all tests that compare with it; the engine has forgotten everything."""
        if prompted.tokens not in self._known:
            self._known[prompted.tokens] = self.cold(prompted)
        self.engine.clear_cache()
        return self._known[prompted.tokens]

    def cold(self, prompted: Prompted) -> tuple[int, ...]:
        """The answer of an engine that has seen nothing."""
        self.engine.clear_cache()
        [answer] = generate(self.engine, prompted.request())
        assert cached(answer) == 0
        self.engine.clear_cache()
        return answer.tokens

    @property
    def num_tower_calls(self) -> int:
        assert self.model.vision is not None
        return self.model.vision.tower.num_calls


of_all = pytest.mark.parametrize("sighted", VISION, indirect=True)


@pytest.fixture(scope="module", params=sampled(VISION, QUICK))
def sighted(request: pytest.FixtureRequest) -> Iterator[Sighted]:
    with running_engine(request.param, prefill_step_size=64) as engine:
        yield Sighted(request.param, engine)


def shapes(writer: Writer) -> dict[str, Prompted]:
    return {
        "none": writer.prompt("Say what a cache is, in one sentence."),
        "one": writer.prompt("What is this? ", picture(1), " Say it."),
        "not square": writer.prompt(picture(2, 144, 56), "What is this?"),
        "two": writer.prompt("Compare ", picture(3), " with ", picture(4, 56, 112), " please."),
        "twice": writer.prompt(picture(5), "and again", picture(5)),
    }


@of_all
def test_the_rule_is_found_at_load_and_said(sighted: Sighted) -> None:
    """Where a prefill may pause follows from trying it, and the notes say it."""
    support = sighted.model.cache_support
    assert support.image_rule == RULES[sighted.family], support.notes
    assert any("Images are taken" in note for note in support.notes)
    assert support.can_batch and support.can_keep


def is_in_every_run(sighted: str, shape: str) -> bool:
    """All shapes with QUICK, and with the families whose positions or windows are like those of one of them a prompt
    with two images between its words."""
    return sighted in QUICK or shape == "two"


TEXT_ONLY, TWICE = tuple((family, "none") for family in QUICK), (QUICK[0], "twice")
"""One image, and one that is not square, are compared by their logits in `test_vision_logits.py`."""

shaped = pytest.mark.parametrize("shape", ["none", "one", "not square", "two", "twice"])


@of_all
@shaped
@sampled_cells(is_in_every_run)
def test_ids_are_those_of_the_processor(sighted: Sighted, shape: str) -> None:
    """The prompt's tokens, images expanded, are what mlx-vlm's processor makes of the same text and pictures."""
    prompted = shapes(sighted.writer)[shape]
    _, processor = vlm(sighted.family)
    inputs = prepare_inputs(
        processor, images=list(prompted.pictures) or None, prompts=[for_processor(sighted.family, prompted)]
    )
    assert prompted.tokens.ids == tuple(np.array(inputs["input_ids"])[0].tolist())
    assert len(prompted.tokens.images) == len(prompted.pictures)


@of_all
@shaped
@sampled_cells(lambda sighted, shape: shape == "two" or (sighted, shape) in TEXT_ONLY or (sighted, shape) == TWICE)
def test_cold_is_what_mlx_vlm_writes(sighted: Sighted, shape: str) -> None:
    """Greedy tokens equal those of `stream_generate`, in chunks that cut images where the family allows it."""
    prompted = shapes(sighted.writer)[shape]
    assert sighted.known(prompted) == vlm_answer(sighted.family, prompted)


@sampled_cells(lambda sighted: sighted == QUICK[0])
def test_warm_is_cold(sighted: Sighted) -> None:
    """The next turn restores the image's KV, looks at nothing, and writes what a cold engine writes."""
    first = sighted.writer.prompt("What is this? ", picture(1), " Say it.")
    answer = sighted.known(first)
    second = first.followed_by(answer, sighted.writer.tokenizer.encode(" And why is that so?"))
    expected = sighted.known(second)
    generate(sighted.engine, first.request())
    num_calls = sighted.num_tower_calls
    [warm] = generate(sighted.engine, second.request())
    assert_exact(warm, expected)
    assert cached(warm) > first.tokens.images[0].end
    assert sighted.num_tower_calls == num_calls


@sampled_cells(lambda sighted: sighted == QUICK[0])
def test_another_image_of_the_same_size_shares_nothing_past_it(sighted: Sighted) -> None:
    """Equal ids, other pixels: the KV up to the image is used, and the answer is the other image's."""
    one, other = (sighted.writer.prompt("What is this? ", picture(seed), " Say it.") for seed in (1, 2))
    assert one.tokens.ids == other.tokens.ids
    expected = sighted.known(other)
    assert expected != sighted.known(one), "the two images are told apart by nothing"
    generate(sighted.engine, one.request())
    [answer] = generate(sighted.engine, other.request())
    assert_exact(answer, expected)
    assert cached(answer) <= one.tokens.images[0].start


@sampled_cells(lambda sighted, where: (sighted, where) == (QUICK[0], "before"))
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_branch_beside_the_image_is_cold(sighted: Sighted, where: str) -> None:
    """A conversation that leaves another one before or after the image writes what a cold one writes."""
    texts = {"before": ("And that? ", " Say it."), "after": ("What is this? ", " Say it in French.")}[where]
    one = sighted.writer.prompt("What is this? ", picture(1), " Say it.")
    other = sighted.writer.prompt(texts[0], picture(1), texts[1])
    expected = sighted.known(other)
    generate(sighted.engine, one.request())
    [answer] = generate(sighted.engine, other.request())
    assert_exact(answer, expected)
    if where == "after":
        assert cached(answer) >= one.tokens.images[0].start


@sampled_cells(lambda sighted: sighted == QUICK[0])
def test_a_new_image_after_a_warm_prefix_is_cold(sighted: Sighted) -> None:
    """A second image in the next turn: its positions go on from the first one's."""
    first = sighted.writer.prompt("What is this? ", picture(1), " Say it.")
    both = sighted.writer.prompt("What is this? ", picture(1), " Say it.", picture(6, 96, 64), "And this?")
    expected = sighted.known(both)
    generate(sighted.engine, first.request())
    num_calls = sighted.num_tower_calls
    [answer] = generate(sighted.engine, both.request())
    assert_exact(answer, expected)
    assert cached(answer) >= first.tokens.images[0].start
    assert sighted.num_tower_calls == num_calls + 1


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
@sampled_cells(lambda sighted, order: sighted == QUICK[0] and order[0] == 0)
def test_rows_of_all_kinds_share_a_batch(sighted: Sighted, order: tuple[int, ...]) -> None:
    """Text, an image, another image, and one that starts from stored KV decode together as each does alone."""
    writer = sighted.writer
    warm = writer.prompt("What is this? ", picture(1), " Say it.")
    prompts = [
        warm,
        writer.prompt("Only text, and some more of it, so that its length is another one."),
        writer.prompt("Look: ", picture(2), " Well?"),
        writer.prompt(picture(7, 144, 64), "A wide one."),
    ]
    expected = [sighted.known(prompted) for prompted in prompts]
    generate(sighted.engine, warm.request())
    answers = generate(sighted.engine, *(prompts[index].request() for index in order))
    for index, answer in zip(order, answers, strict=True):
        assert_exact(answer, expected[index])


@sampled_cells(lambda sighted: sighted == QUICK[0])
def test_the_tower_looks_at_each_image_once(sighted: Sighted) -> None:
    """As often as there are distinct images, not as there are requests."""
    sighted.engine.clear_cache()
    before = sighted.num_tower_calls
    for text in ("a", "b"):
        for seed in (11, 12):
            generate(sighted.engine, sighted.writer.prompt(text, picture(seed), "?").request(2))
    assert sighted.num_tower_calls - before == 2


def test_the_decoder_is_loaded_once(sighted: Sighted) -> None:
    """The tower's half has no weights of the decoder but those that it shares with it."""
    assert sighted.model.vision is not None
    language = sighted.model.vision.language
    decoder = sighted.model.module
    assert not isinstance(decoder, type(None))
    shared = {id(array) for _, array in _flat(decoder)}
    assert all(id(array) in shared for _, array in _flat(language))


def _flat(module: object) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return tree_flatten(module.parameters())  # type: ignore[attr-defined, no-any-return]


@sampled_cells(lambda sighted: sighted == QUICK[0])
def test_an_answer_about_images_is_the_same_with_drafts(sighted: Sighted) -> None:
    """Positions behind an image are those of single steps, in a pass of several tokens too; and what is kept is."""
    prompted = shapes(sighted.writer)["two"]
    expected = sighted.known(prompted)
    drafter = LedDrafter(expected, lambda place: place % 3 == 2)
    with drafts_tried():
        [found] = generate(sighted.engine, replace(prompted.request(), drafter=drafter))
    assert_exact(found, expected)
    assert isinstance(found.end, GenerationDone) and found.end.drafting.num_accepted_tokens > 3
    following = prompted.followed_by(expected, [311, 312, 313])
    [warm] = generate(sighted.engine, following.request())
    assert cached(warm) > len(prompted.tokens)
    assert_exact(warm, sighted.cold(following))
