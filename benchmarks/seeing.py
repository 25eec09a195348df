"""What it costs to explain and count a request: its own time with and without, on the path of `own_turn`.

Own time is all that the server does for a warm turn of 338 messages beside the model: from the bytes of its body to the
line in the terminal, in processor time of its thread. Blocks of turns take turns, and each pair gives one ratio.
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from benchmarks.figure import Bound, Figure
from benchmarks.model_free import ModelFree
from benchmarks.own_turn import FAMILIES, NUM_MESSAGES, Loop
from benchmarks.recordings import Reply, Request
from benchmarks.reuse_oracle import CONVENTIONS
from benchmarks.rig import rounds
from kvserve.demo.build import build_model
from kvserve.observe.dashboard import Look
from kvserve.observe.observability import Observability, ObservabilitySettings
from kvserve.observe.terminal import Terminal
from kvserve.requests import running_answer
from kvserve.requests.turn_facts import Observer

BLOCK_TURNS = 8
REPLY = Reply("A thought.", "Read.", ())


class Turns:
    """A long conversation and its next turn, again and again, seen or unseen."""

    def __init__(self, family: str, scratch: Path) -> None:
        folder = build_model(family, scratch / "model")
        self._model = ModelFree(folder, is_cuttable=CONVENTIONS[family].is_cuttable)
        self._loop = Loop()
        self._numbers = count(NUM_MESSAGES)
        for number, request in enumerate(self._loop.requests()):
            self._model.serve(request, number)
        self._terminal = Terminal(Console(file=(scratch / "screen").open("w"), width=200))
        self._seeing = Observability(
            ObservabilitySettings(
                scratch, writes_traces=False, num_trace_days=1, num_explanations=1000, shows_text=False
            ),
            self._terminal,
            lambda: Look({}, None, (), 0.0),
        )
        gc.freeze()  # what was led so far is not looked through in the middle of a block

    def seen_seconds(self) -> float:
        """Own time of a block with explanations, totals and what can be watched."""
        return self._block(self._seeing.observer(), nullcontext)

    def unseen_seconds(self) -> float:
        """Own time of a block with nothing but the request line."""
        observer = Observer(self._terminal.prefill, lambda turn: self._terminal.request_line(turn.facts))
        return self._block(observer, lambda: patch.object(running_answer, "explanation_of", lambda *_: None))

    def _block(self, observer: Observer, around: Callable[[], AbstractContextManager[object]]) -> float:
        model, seconds = self._model, 0.0
        usual, model.served = model.served, replace(model.served, observe=observer)
        with around():
            for number in (next(self._numbers) for _ in range(BLOCK_TURNS)):
                body = json.dumps(self._loop.body(f"part {number} is as long as the one before\n" * 20)).encode()
                started = time.thread_time()
                running = model.start(body, Request({}, REPLY), number)
                model.engine.answer()
                for _ in running.events(poll_seconds=0.0):
                    pass
                seconds += time.thread_time() - started
        model.served = usual
        return seconds / BLOCK_TURNS


def run(num_rounds: int) -> list[Figure]:
    """Own time of a seen turn : of an unseen one."""
    return [_figure(family, num_rounds) for family in FAMILIES]


def _figure(family: str, num_rounds: int) -> Figure:
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        turns = Turns(family, Path(scratch))
        seen, unseen = rounds(num_rounds, turns.seen_seconds, turns.unseen_seconds)
    return Figure(
        "seeing",
        f"own time of a warm turn of {NUM_MESSAGES} messages, explained and counted : neither, {family}",
        "",
        tuple(one / other for one, other in zip(seen, unseen, strict=True)),
        Bound("at most", 1.05),
        f"{_ms(seen)} : {_ms(unseen)}",
    )


def _ms(seconds: list[float]) -> str:
    return f"{sorted(seconds)[len(seconds) // 2] * 1e3:.2f} ms"
