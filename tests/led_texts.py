"""A server that is led to write what another one wrote to the same prompts: that token is likelier by a clear margin,
so that no near tie decides, and a text that parts all the same tells of an error larger than the margin.

It runs in the server's process, from its start on, and knows nothing of ranks.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from kvserve.engine.decode_group import Decoder
from kvserve.engine.rows import Row

MARGIN = 0.05
"""Of a logit. Faults make errors of 2 to 14, ranks make 2e-5 (`tests/e2e/test_ranks_noise.py`)."""

NUM_TOKENS = 48
"""Of an answer that is noted, once one token more is asked for. Shorter ones are nobody's lead."""

type Of = Callable[[Row, int], Decoder]
type Processor = Callable[[mx.array, mx.array], mx.array]


def note(folder: str) -> None:
    """Note the answers of this process."""
    _with_processor(partial(_noting, folder))


def lead(folder: str) -> None:
    """Lead this process to the answers that were noted."""
    _with_processor(partial(_leading, folder))


def _with_processor(made_for: Callable[[Row], Processor | None]) -> None:
    Decoder.of = partial(_decoder_with, Decoder.of, made_for)  # type: ignore[assignment]


def _decoder_with(real: Of, made_for: Callable[[Row], Processor | None], row: Row, vocab_size: int) -> Decoder:
    decoder, processor = real(row, vocab_size), made_for(row)
    return decoder if processor is None else replace(decoder, processors=[*decoder.processors, processor])


def _file(folder: str, row: Row) -> Path:
    name = hashlib.sha256(json.dumps(row.request.prompt.ids).encode()).hexdigest()
    return Path(folder) / f"{name}.json"


def _noting(folder: str, row: Row) -> Processor:
    def noted(tokens: mx.array, logits: mx.array) -> mx.array:
        answer = tokens[len(row.request.prompt) :]
        if len(answer) == NUM_TOKENS:
            Path(folder).mkdir(exist_ok=True)
            _file(folder, row).write_text(json.dumps(answer.tolist()), "utf-8")
        return logits

    return noted


def _leading(folder: str, row: Row) -> Processor | None:
    if not (file := _file(folder, row)).exists():
        return None
    answer: list[int] = json.loads(file.read_text("utf-8"))

    def led(tokens: mx.array, logits: mx.array) -> mx.array:
        place = len(tokens) - len(row.request.prompt)
        if place >= len(answer):
            return logits
        return logits + MARGIN * (mx.arange(logits.shape[-1]) == answer[place])

    return led
