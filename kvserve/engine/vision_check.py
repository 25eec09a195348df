"""What a vision model's images allow, found out at load by trying one: where a prefill may pause, rows in one batch.

It knows what must be true of any family, and no family's name. A prompt with a random image is computed in one pass;
the same prompt in pieces, and in a batch beside a row of text, must lead to its logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from kvserve.core import GenerationRequest, ImageInput, ImageSpan, RequestId, SamplingParams, TokenSequence
from kvserve.engine.borders import described, finding
from kvserve.engine.logits_error import logits_error
from kvserve.engine.model import LoadedModel
from kvserve.engine.self_check import MAX_ERROR, Script, insert_scripted
from kvserve.engine.vision import VlmDecoder
from kvserve.engine.vision_load import ImageRule, VisionSupport
from kvserve.engine.vision_pass import RowImages, see
from kvserve.engine.vision_reader import noise_picture
from kvserve.engine.wired import batch_generator

NUM_TEXT_TOKENS = 7
NUM_GIVEN_TOKENS = 3

NOISE_FACTOR = 4.0
MIN_ERROR = 1e-3
"""A pause inside an image must come out like one beside it, up to this factor and never below this error."""


@dataclass(frozen=True, slots=True)
class VisionFinding:
    """The rule, and what a person should know of it. `can_batch`: beside other rows its rows write what they should."""

    rule: ImageRule
    can_batch: bool
    note: str = ""


RULE_WORDS: dict[ImageRule, str] = {
    "anywhere": "Images are taken; a prefill may pause anywhere.",
    "whole": "Images are taken; each is prefilled in one piece.",
    "alone": "Images are taken; prompts with images are computed alone and anew each time",
}


def with_images_tried(model: LoadedModel, max_feature_bytes: int) -> LoadedModel:
    """The model with the rule that its images need; without vision where they cannot be computed, and a note says so.

    From then on its tower keeps at most `max_feature_bytes`.
    """
    vision, support = model.vision, model.cache_support
    if vision is None:
        notes = (*support.notes, model.vision_note) if model.vision_note else support.notes
        return replace(model, cache_support=replace(support, notes=notes))
    found = finding(partial(check_vision, model.module, vision, model.vocab_size))
    vision.tower.begin(max_feature_bytes)
    if isinstance(found, Exception):
        note = f"The model sees no images, text is served: {described(found)}"
        return replace(model, vision=None, cache_support=replace(support, notes=(*support.notes, note)))
    support = replace(support, notes=(*support.notes, found.note), image_rule=found.rule)
    if not found.can_batch:
        support = replace(support, can_batch=False, can_keep=False)
    return replace(model, vision=replace(vision, rule=found.rule), cache_support=support)


def check_vision(module: Any, vision: VisionSupport, vocab_size: int) -> VisionFinding:
    """Try an image. Raises what the model raises for one that it cannot compute at all, in one pass."""
    with mx.stream(generation_stream):
        trial = _ImageTrial(module, vision, vocab_size)
        if trouble := trial.wrong_positions() or trial.wrong_answer():
            raise ValueError(trouble)
        span = trial.span
        beside = trial.error_of((span.start, span.end))
        if not beside <= MAX_ERROR:
            return _alone(f"pieces beside an image lead to logits that are off by {beside:.0%}")
        inside = trial.error_of((span.start, (span.start + span.end) // 2, span.end))
        rule: ImageRule = "anywhere" if inside <= max(MIN_ERROR, NOISE_FACTOR * beside) else "whole"
        batched = trial.batch_error()
        if not batched <= max(MAX_ERROR, NOISE_FACTOR * beside):
            return _alone(f"in a batch its logits are off by {batched:.0%}")
    return VisionFinding(rule, True, RULE_WORDS[rule])


def _alone(reason: str) -> VisionFinding:
    return VisionFinding("alone", False, f"{RULE_WORDS['alone']} ({reason}).")


class _ImageTrial:
    """One prompt with an image, as a single pass computes it."""

    def __init__(self, module: Any, vision: VisionSupport, vocab_size: int) -> None:
        self._module = module
        self._vision = vision
        measured = vision.reader(noise_picture(1, 64, 96))
        run = measured.facts.ids
        if max(run) >= vocab_size:
            raise ValueError(f"its images have the token {max(run)}, beyond the {vocab_size} that it has logits for")
        start = NUM_TEXT_TOKENS
        text = [1 + 37 * place % min(997, vocab_size - 1) for place in range(2 * NUM_TEXT_TOKENS + NUM_GIVEN_TOKENS)]
        text = [token if token != vision.image_token else token - 1 for token in text]
        # mlx-vlm counts images by the token that opens one.
        config = vision.language.config if module.has_positions else None
        text[start - 1] = getattr(config, "vision_start_token_id", text[start - 1])
        self.span = ImageSpan(start, start + len(run), measured.facts.digest)
        self._ids = (*text[:start], *run, *text[start : 2 * start])
        self._given = text[2 * start :]
        image = self._image = ImageInput(measured.facts, lambda: measured.tower_input)
        prompt = TokenSequence(self._ids, (self.span,))
        request = GenerationRequest(RequestId("check"), prompt, 1, SamplingParams(), frozenset(), images=(image,))
        images = RowImages.of(request, has_positions=module.has_positions)
        assert images is not None, "the prompt has an image"
        self._images = images
        self._whole = self._run(())

    def wrong_positions(self) -> str:
        """Whether the family counts positions as `RowImages` does; empty if so."""
        if not self._module.has_positions:
            return ""
        grid: Any = self._images.inputs[self.span.digest].load()["image_grid_thw"]
        ids = list(self._ids)
        theirs, shift = self._vision.language.get_rope_index(mx.array([ids]), mx.array(grid))
        ours = self._images.position_ids(0, len(ids))
        if not np.array_equal(np.array(theirs)[:, 0], ours) or int(shift.item()) != self._images.shifts[-1]:
            return "its positions are counted in a way that is not known here"
        return ""

    def wrong_answer(self) -> str:
        """Whether mlx-vlm's own decoder, where it is the one that is used, gives the logits of a single pass."""
        if not isinstance(self._module, VlmDecoder):
            return ""
        given = {name: mx.array(value) for name, value in self._image.load().items() if isinstance(value, np.ndarray)}
        ids, language = mx.array([list(self._ids)]), self._vision.language
        pixels = given.pop("pixel_values")
        more = {name: value for name, value in given.items() if name not in ("input_ids", "attention_mask")}
        seen = self._vision.model.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **more)
        told = {name: value for name, value in seen.to_dict().items() if value is not None}
        logits = language(ids, cache=self._module.make_cache()[: len(self._module.layers)], **told).logits[0, -1]
        error = logits_error(logits, self._whole[-1])
        return "" if error <= MAX_ERROR else f"its logits are off by {error:.0%} from mlx-vlm's"

    def error_of(self, cuts: tuple[int, ...]) -> float:
        """How far the logits are off when the prompt is computed in pieces."""
        return max(logits_error(*pair) for pair in zip(self._run(cuts), self._whole, strict=True))

    def batch_error(self) -> float:
        """The same for two rows that decode together: this one and one of text."""
        rows = ((self._ids, self._images), (self._ids[: self.span.start], None))
        alone = [self._alone(list(ids), images) for ids, images in rows]
        scripts = [Script(self._given) for _ in rows]
        caches = [self._prefilled(list(ids[:-1]), images) for ids, images in rows]
        generator: Any = batch_generator(self._module)
        try:
            insert_scripted(generator, [list(ids) for ids, _ in rows], caches, scripts, NUM_GIVEN_TOKENS)
            while min(len(script.seen) for script in scripts) < NUM_GIVEN_TOKENS:
                generator.next()
        finally:
            generator.close()
        return max(
            logits_error(found, expected)
            for script, logits in zip(scripts, alone, strict=True)
            for found, expected in zip(script.seen, logits, strict=False)
        )

    def _alone(self, ids: list[int], images: RowImages | None) -> list[mx.array]:
        caches = self._prefilled(ids[:-1], images)
        return [self._step(caches, token) for token in (ids[-1], *self._given[:-1])]

    def _prefilled(self, ids: list[int], images: RowImages | None) -> list[Any]:
        caches: list[Any] = self._module.make_cache()
        if images is None:
            self._module(mx.array([ids]), cache=caches)
        else:
            see(self._module, self._vision.tower, images, ids, 0, caches)
        mx.eval([cache.state for cache in caches])
        return caches

    def _step(self, caches: list[Any], token: int) -> mx.array:
        logits: mx.array = self._module(mx.array([[token]]), cache=caches)[0, -1]
        logits = logits - mx.logsumexp(logits)
        mx.eval(logits)
        return logits

    def _run(self, cuts: Sequence[int]) -> list[mx.array]:
        """The logits at the image's last token and at the prompt's, computed in pieces that end at the cuts."""
        caches = self._module.make_cache()
        found: list[mx.array] = []
        edges = [0, *cuts, len(self._ids)]
        for start, end in pairwise(edges):
            logits = see(self._module, self._vision.tower, self._images, self._ids[start:end], start, caches)[0]
            for place in (self.span.end - 1, len(self._ids) - 1):
                if start <= place < end:
                    found.append(logits[place - start])
            mx.eval(found, [cache.state for cache in caches])
        return found
