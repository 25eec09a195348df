"""A vision checkpoint beside the text model of its family: the same conversations, without a picture and behind one.

What is reused is compared with what was possible as in `reuse.py`; prompts with pictures are written and answered by
mlx-vlm's own processor and model. In the same rounds: what a warm turn of a tool loop costs the server itself on both.
"""

import base64
import io
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.generate import generate_step
from mlx_vlm.utils import load, prepare_inputs
from PIL import Image

from benchmarks.figure import Bound, Figure
from benchmarks.model_free import ModelFree
from benchmarks.own_turn import Loop, Turns
from benchmarks.reuse import (
    ANSWER_TOKENS,
    SIZES,
    TOLERANCE_TOKENS,
    Judge,
    Led,
    chat,
    clear_cache,
    play,
    settle_in,
    time_figure,
    timed,
)
from benchmarks.reuse_oracle import CONVENTIONS, GreedyModel, Rendering, Wire
from benchmarks.reuse_scenarios import SCENARIOS, Ask, Reply, Talk, Words
from benchmarks.rig import rounds, serving
from kvserve.demo.build import build_model

TEXT, VISION = "qwen3_5", "qwen3_5_vl"
SIDE = 256
IMAGE_WORDS = "<|vision_start|><|image_pad|><|vision_end|>"
MAX_OWN_TIME = 1.15
"""Of the text model's own time: what two series of the same code differ by on a quiet machine, and a little more."""

_MARK = re.compile("\ue000(\\d+)\ue001")
_FIRST = 2**40
"""Oracle tokens from here on are places in pictures: which picture, and which of its tokens."""
_PLACES = 2**20


@cache
def picture(number: int) -> Image.Image:
    """A picture of its own for every number."""
    coarse = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    return Image.fromarray(coarse, "RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)


def picture_part(number: int) -> Wire:
    """It as a client sends it; `number` is for the oracle, servers look at what is shown."""
    stream = io.BytesIO()
    picture(number).save(stream, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}, "number": number}


def behind_pictures(talk: Talk) -> Talk:
    """The same conversation, its first user message behind a picture; another first message, another picture."""
    ask = next(talk)
    while True:
        reply: Reply = yield Ask(_with_picture(ask.messages), ask.tools, ask.thinking)
        try:
            ask = talk.send(reply)
        except StopIteration:
            return


def _with_picture(messages: Sequence[Wire]) -> tuple[Wire, ...]:
    place = next(i for i, message in enumerate(messages) if message["role"] == "user")
    text = messages[place]["content"]
    parts = [picture_part(zlib.crc32(text.encode())), {"type": "text", "text": text}]
    return (*messages[:place], messages[place] | {"content": parts}, *messages[place + 1 :])


class SeeingRendering(Rendering):
    """Prompts with pictures, whose tokens are told apart by picture and place."""

    def __init__(self, folder: Path, processor: Any) -> None:
        super().__init__(folder, CONVENTIONS[TEXT])
        self._processor = processor

    def _joined(self, messages: Sequence[Wire]) -> list[Wire]:
        return super()._joined([self._told(message) for message in messages])

    def _told(self, message: Wire) -> Wire:
        """The message as text, its picture as a mark between the words that the template has around one."""
        if not isinstance(message["content"], list):
            return message
        told = [
            IMAGE_WORDS.replace("<|image_pad|>", f"\ue000{part['number']}\ue001")
            if part["type"] == "image_url"
            else part["text"]
            for part in message["content"]
        ]
        return message | {"content": "".join(told)}

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for place, piece in enumerate(_MARK.split(text)):
            ids += self._places(int(piece)) if place % 2 else super()._encode(piece)
        return ids

    def _places(self, number: int) -> list[int]:
        inputs = _seen(self._processor, [number])
        num_tokens = int((np.array(inputs["input_ids"]) == _image_token(self._processor)).sum())
        return [_FIRST + number * _PLACES + place for place in range(num_tokens)]


class SeeingModel(GreedyModel):
    """mlx-vlm's own model: which tokens a greedy server emits behind pictures."""

    def __init__(self, model: Any, processor: Any, stops: frozenset[int]) -> None:
        self._model, self._processor, self.stops = model, processor, stops

    def answer(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The ids of the answer, the stop token included where there is one."""
        numbers = list(dict.fromkeys((token - _FIRST) // _PLACES for token in prompt if token >= _FIRST))
        shown = _seen(self._processor, numbers) if numbers else {}
        image_token = _image_token(self._processor)
        ids = mx.array([[image_token if token >= _FIRST else token for token in prompt]])
        extra = {name: shown[name] for name in ("image_grid_thw",) if name in shown}
        written: list[int] = []
        steps = generate_step(
            ids, self._model, shown.get("pixel_values"), None, max_tokens=max_tokens, temperature=0.0, **extra
        )
        for token, _ in steps:
            written.append(int(token))
            if written[-1] in self.stops:
                break
        return written


def _seen(processor: Any, numbers: Sequence[int]) -> dict[str, Any]:
    """What the processor makes of these pictures."""
    pictures = [picture(number) for number in numbers]
    return dict(prepare_inputs(processor, images=pictures, prompts=[IMAGE_WORDS * len(pictures)]))


def _image_token(processor: Any) -> int:
    return int(processor.tokenizer.convert_tokens_to_ids("<|image_pad|>"))


# --- the benchmark ----------------------------------------------------------------------------------------------------


def run(num_rounds: int) -> list[Figure]:
    """Conversations on both models, and a warm turn's own time on both; prints the table on its way."""
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        folders = {
            family: build_model(family, Path(scratch) / family, answer_tokens=ANSWER_TOKENS)
            for family in (TEXT, VISION)
        }
        led = [each for family in folders for each in lead_all(family, folders[family], Path(scratch))]
        own = own_figure(folders, num_rounds)
    print(table(led))
    by_model = [[each for each in led if each.family == name] for name in dict.fromkeys(each.family for each in led)]
    return [*map(_reuse_figure, led), *(time_figure(each, "vision") for each in by_model), own]


def lead_all(family: str, folder: Path, scratch: Path) -> Iterator[Led]:
    """All conversations on one model: as text, and on the one that sees also behind pictures."""
    rendering, model = None, None
    if family == VISION:
        seeing, processor = load(str(folder), trust_remote_code=False)
        rendering = SeeingRendering(folder, processor)
        model = SeeingModel(seeing, processor, GreedyModel(folder).stops)
    judge = Judge(TEXT, folder, ANSWER_TOKENS, rendering=rendering, model=model)
    with serving(folder, scratch, {}) as (port, _):
        for sees in (False, True)[: 2 if family == VISION else 1]:
            words = Words(SIZES, takes_tools=True)
            settle_in(port, words)
            for scenario, talk in SCENARIOS.items():
                clear_cache(port)
                judge.forget()
                told = behind_pictures(talk(words)) if sees else talk(words)
                requests = play(told, judge, lambda ask: chat(port, ask, ANSWER_TOKENS))
                name = f"{family}, a picture first" if sees else family
                print(f"vision: {name}, {scenario} is through", file=sys.stderr, flush=True)
                yield timed(name, scenario, requests, port, judge)


def _reuse_figure(led: Led) -> Figure:
    return Figure(
        "vision",
        f"{led.family}, {led.scenario}: possible - reused, worst request",
        "tokens",
        (float(led.num_missed_tokens),),
        Bound("at most", TOLERANCE_TOKENS),
        f"{led.reuse:.3f} of {led.possible:.3f}",
    )


def own_figure(folders: dict[str, Path], num_rounds: int) -> Figure:
    """A text-only tool loop: the server's own time for a warm turn on the vision checkpoint : on the text model.

    Both are milliseconds of one thread, so its processor time is taken: who else is at work on the machine is left out.
    """
    is_cuttable = CONVENTIONS[TEXT].is_cuttable
    text, vision = (Turns(ModelFree(folders[family], is_cuttable=is_cuttable), Loop()) for family in (TEXT, VISION))
    theirs, ours = rounds(num_rounds, text.own_seconds, vision.own_seconds)
    return Figure(
        "vision",
        f"a warm turn's own time on {vision.num_tokens:,} tokens, {VISION} : {TEXT}",
        "",
        tuple(mine / its for mine, its in zip(ours, theirs, strict=True)),
        Bound("at most", MAX_OWN_TIME),
        f"{median(ours) * 1e3:.1f} : {median(theirs) * 1e3:.1f} ms",
    )


def table(all_led: Sequence[Led]) -> str:
    """Models and conversations, in markdown."""
    lines = [
        "| model | conversation | requests | reused | possible | worst miss | warm : cold |",
        "|---|---|---|---|---|---|---|",
    ]
    for led in all_led:
        ratio = f"{median(led.warm_over_cold):.2f}" if led.warm_over_cold else "reuse below 0.9"
        cells = [led.family, led.scenario, str(len(led.requests)), f"{led.reuse:.3f}", f"{led.possible:.3f}"]
        lines.append(f"| {' | '.join([*cells, str(led.num_missed_tokens), ratio])} |")
    return "\n".join(lines)
