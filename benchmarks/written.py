"""What one turn of a tool loop writes to disk: bytes, for five families, against what the turn brought that is new.

The engine itself, without HTTP: a conversation of system, tools and a task, then call and result over and over, each
turn a prompt that goes on from the last answer. Nothing is timed. The first turns are left out: they have the system
prompt in them.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from benchmarks.client import BenchmarkError
from benchmarks.disk import START_SECONDS, running_engine
from benchmarks.figure import Bound, Figure
from kvserve.cache.disk_blob import Blob, BlobName, num_bytes_of, unpack_blob
from kvserve.core import (
    GenerationFailed,
    GenerationRequest,
    MessageStart,
    RequestId,
    SamplingParams,
    TokenDelta,
    TokenSequence,
)
from kvserve.demo.build import TINY, build_model
from kvserve.engine.worker import Engine

FAMILIES = ("qwen3", "qwen3_5", "gemma3", "gpt_oss", "glm4_moe_lite")
HYBRIDS, WINDOWS = ("qwen3_5",), ("gemma3", "gpt_oss")
SYSTEM_TOKENS, TASK_TOKENS, RESULT_TOKENS, TAIL_TOKENS, ANSWER_TOKENS = 600, 120, 180, 4, 24
END_TOKENS = 2
"""What a template writes behind an answer."""

NUM_TURNS, NUM_FIRST_TURNS = 34, 2
WINDOW_TOKENS = 1024
"""Larger than a turn, as real windows are."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn wrote: bytes in all and those of states, how many of these; and its new tokens."""

    num_bytes: int
    num_state_bytes: int
    num_states: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop's turns, and how large things are: the KV of a token in every layer, and a whole state."""

    turns: tuple[Turn, ...]
    token_bytes: float
    state_bytes: int


def run(_num_rounds: int) -> list[Figure]:
    """Per family what a turn writes: a hybrid in whole states, a model with windows in the KV of the turn's tokens."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        for family in FAMILIES:
            scale = replace(TINY, sliding_window=WINDOW_TOKENS)
            folder = build_model(family, Path(scratch) / family, scale=scale, answer_tokens=None)
            figures.append(figure(family, loop_of(folder, Path(scratch) / f"kv-{family}", family)))
    return figures


def figure(family: str, loop: Loop) -> Figure:
    written = mean(turn.num_bytes for turn in loop.turns)
    tokens = mean(turn.num_tokens for turn in loop.turns)
    states = mean(turn.num_states for turn in loop.turns)
    in_states = mean(turn.num_state_bytes for turn in loop.turns)
    absolute = (
        f"{written / 1e3:.0f} kB for {tokens:.0f} new tokens, {in_states / 1e3:.0f} kB of it in {states:.1f} states"
    )
    if family in HYBRIDS:
        ratio, bound = in_states / loop.state_bytes, Bound("at most", 1.5)
        return Figure("written", f"states written in a tool turn, {family}", "", (ratio,), bound, absolute)
    limit = 2.0 if family in WINDOWS else 1.1
    ratio = written / (tokens * loop.token_bytes)
    name = f"bytes written in a tool turn : KV of its new tokens, {family}"
    return Figure("written", name, "", (ratio,), Bound("at most", limit), absolute)


def loop_of(folder: Path, kv: Path, family: str) -> Loop:
    """Lead a tool loop, and look after each turn what has come into the folder."""
    turns: list[Turn] = []
    known: dict[Path, Blob] = {}
    ids, starts = _words(SYSTEM_TOKENS, 0), [MessageStart(0, is_user=False), MessageStart(SYSTEM_TOKENS, is_user=True)]
    ids += _words(TASK_TOKENS, 1)
    num_known = 0
    with running_engine(folder, kv) as engine:
        for number in range(NUM_TURNS):
            prompt, tail = [*ids, *_words(TAIL_TOKENS, 2)], MessageStart(len(ids), is_user=False)
            ids = [*prompt, *_answer(engine, prompt, [*starts, tail])]
            _settle(engine)
            new = {path: _blob(path) for path in kv.rglob("*.safetensors") if path not in known}
            states = [blob for blob in new.values() if blob.head.kind == "checkpoint"]
            num_bytes = sum(path.stat().st_size for path in new)
            turns.append(Turn(num_bytes, sum(map(payload_bytes, states)), len(states), len(ids) - num_known))
            known |= new
            num_known = len(ids)
            ids += _words(END_TOKENS, 3)
            starts += [tail, MessageStart(len(ids), is_user=False)]
            ids += _words(RESULT_TOKENS, 10 + number)
    return Loop(tuple(turns[NUM_FIRST_TURNS:]), *_sizes(list(known.values()), family))


def _sizes(blobs: Sequence[Blob], family: str) -> tuple[float, int]:
    segments = [blob for blob in blobs if blob.head.kind == "segment"]
    states = [blob for blob in blobs if blob.head.kind == "checkpoint"]
    token_bytes = sum(map(payload_bytes, segments)) / sum(len(blob.head.tokens) for blob in segments)
    if family in WINDOWS:
        token_bytes += max(_row_bytes(blob) for blob in states)
    return token_bytes, max(map(payload_bytes, states), default=0)


def payload_bytes(blob: Blob) -> int:
    """Bytes of a blob's arrays."""
    return sum(num_bytes_of(tensor.data) for tensor in blob.tensors)


def _row_bytes(blob: Blob) -> float:
    """Bytes of a token in the windows of a state, whose arrays are (1, heads, tokens, width)."""
    return sum(num_bytes_of(each.data) / each.shape[-2] for each in blob.tensors if len(each.shape) == 4)


def _blob(path: Path) -> Blob:
    return unpack_blob(path.read_bytes(), BlobName(path.stem))


def _answer(engine: Engine, prompt: list[int], starts: Sequence[MessageStart]) -> list[int]:
    sampling = SamplingParams(temperature=0.0)
    request = GenerationRequest(RequestId("bench"), TokenSequence(tuple(prompt)), ANSWER_TOKENS, sampling, frozenset())
    tokens: list[int] = []
    for batch in engine.submit(replace(request, message_starts=tuple(starts))).batches(START_SECONDS):
        for event in batch:
            if isinstance(event, GenerationFailed):
                raise BenchmarkError(str(event.error))
            if isinstance(event, TokenDelta):
                tokens.append(event.token)
    return tokens


def _settle(engine: Engine) -> None:
    """Wait until nothing waits to be written any more."""
    deadline = time.monotonic() + START_SECONDS
    while (report := engine.cache_report().disk) is None or report.stats.num_queued_bytes:
        if time.monotonic() > deadline:
            raise BenchmarkError("the disk does not keep up")
        time.sleep(0.02)


def _words(num_tokens: int, seed: int) -> list[int]:
    return [300 + (place * 7919 + seed * 104729 + place * place * 31) % 600 for place in range(num_tokens)]
