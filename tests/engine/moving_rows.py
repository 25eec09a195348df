"""Rows whose KV moves while a test does something to them: what the tests of moving share beside the full engines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from kvserve.core import GenerationDone, GenerationFailed, GenerationRequest, TokenDelta
from kvserve.engine import decode
from kvserve.engine.admission import Admission
from kvserve.engine.rows import RequestHandle, Row
from kvserve.engine.scheduler import Scheduler
from kvserve.engine.worker import Engine
from tests.engine.engines import NUM_ANSWER_TOKENS, Result, generate, let_prompts_take_no_time, prompt_of, request

KINDS = ["qwen3", "qwen3_5"]
"""Plain caches, and states that stand at one place only."""

BESIDE = prompt_of(20, 7)
"""The prompt of a row beside others."""


def while_it_answers(engine: Engine, wanted: GenerationRequest, act: Callable[[RequestHandle], None]) -> Result:
    """Act once the first token of a row is there; then wait for the row."""
    running = engine.submit(wanted)
    tokens: list[int] = []
    has_acted = False
    for batch in running.batches(60):
        tokens += [event.token for event in batch if isinstance(event, TokenDelta)]
        if tokens and not has_acted:
            has_acted = True
            act(running)
        end = batch[-1]
    assert isinstance(end, GenerationDone | GenerationFailed)
    return Result(tuple(tokens), end, ())


def begun(running: RequestHandle) -> None:
    """Wait for a row's first token."""
    next(batch for batch in running.batches(60) if any(isinstance(event, TokenDelta) for event in batch))


@contextmanager
def put_backs_counted() -> Iterator[list[Row]]:
    """The rows that left without having ended."""
    rows: list[Row] = []
    real = Scheduler._release

    def release(self: Scheduler, row: Row, left: Any) -> None:
        rows.extend([] if row.is_over else [row])
        real(self, row, left)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_release", release)
        yield rows


def with_row_beside(engine: Engine, wanted: GenerationRequest) -> Result:
    """What comes of a row that decodes beside one that came before it."""
    return generate(engine, request(BESIDE, NUM_ANSWER_TOKENS), wanted)[1]


def put_back_after(num_tokens: int, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is outgrown when the row of a prompt has handed out so many tokens, once. Each step counts alike, and
    rows that came before are there still."""
    let_prompts_take_no_time(monkeypatch)
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=count().__next__))
    has_outgrown: list[bool] = []

    def is_outgrown(self: Admission) -> bool:
        rows = [row for row in self._pool.rows() if row.request.prompt.ids == tuple(prompt)]
        if has_outgrown or not rows or len(rows[0].generated) != num_tokens:
            return False
        has_outgrown.append(True)
        return True

    monkeypatch.setattr(Admission, "is_outgrown", is_outgrown)
