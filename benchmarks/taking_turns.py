"""Who waits for whom over HTTP: a short request behind a row that nobody computes (E5), behind one that has no room
(E6), and prompts beside a stream (E11).

On the slow model, whose step takes 10 ms or more. Each case is compared with the same request where nothing is before
it that it could wait for; `beside` is one run: a stream and a prompt, each alone and both together.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.client import BenchmarkError, Client, Message, Stream
from benchmarks.figure import Bound, Figure
from benchmarks.rig import Rig, open_rig
from kvserve.demo.build import SLOW, build_model
from kvserve.engine.model import load

SHARED_TOKENS = 400
OWN_TOKENS = 40
OLDEST_TOKENS, AWAITED_TOKENS, SHORTEST_TOKENS = 1_200, 1_600, 700
STREAM_TOKENS = 64
STREAM_SECONDS = 3.0
BESIDE_TOKENS = 1_500
SMALL_TOKENS = 20
NO_ROOM_TOKENS = 800
LONG_ANSWER_TOKENS = 600


def run(num_rounds: int) -> list[Figure]:
    """The three cases, and what a stream and a prompt have of each other."""
    with open_rig(SLOW) as rig:
        waited = [
            (_first_of_four(rig, is_shared=True), _first_of_four(rig, is_shared=False)) for _ in range(num_rounds)
        ]
        beside = [_beside(rig) for _ in range(num_rounds)]
    with _rig_without_room() as rig:
        passed = [(_small(rig, is_blocked=True), _small(rig, is_blocked=False)) for _ in range(num_rounds)]
    return [_awaited(waited), _passed(passed), *_shares(beside)]


@contextlib.contextmanager
def _rig_without_room() -> Iterator[Rig]:
    """There is room for a long answer and a small request beside it, not for a second long one."""
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        sizes = load(build_model("qwen3", Path(scratch), scale=SLOW, answer_tokens=None), 131_072).sizes
    num_bytes = 1.1 * sizes.peak(NO_ROOM_TOKENS + LONG_ANSWER_TOKENS)
    with open_rig(SLOW, max_batch_bytes=int(num_bytes + sizes.copied(num_bytes))) as rig:
        yield rig


def _awaited(waited: Sequence[tuple[float, float]]) -> Figure:
    sharing, alone = (median(column) for column in zip(*waited, strict=True))
    return Figure(
        "taking_turns",
        "first token of a row whose beginning a long prompt computes : of one that shares nothing",
        "",
        tuple(one / other for one, other in waited),
        Bound("at most", 1.5),
        f"{sharing:.2f} : {alone:.2f} s beside three prompts of {OLDEST_TOKENS:,}, {AWAITED_TOKENS:,} and "
        f"{SHORTEST_TOKENS:,} tokens",
    )


def _passed(passed: Sequence[tuple[float, float]]) -> Figure:
    blocked, alone = (median(column) for column in zip(*passed, strict=True))
    return Figure(
        "taking_turns",
        f"first token of {SMALL_TOKENS} tokens behind a row that has no room",
        "s",
        tuple(one for one, _ in passed),
        Bound("at most", 1.0),
        f"{blocked:.2f} s, {alone:.2f} without it, beside another one's answer of {LONG_ANSWER_TOKENS} tokens",
    )


def _shares(beside: Sequence[tuple[float, float]]) -> list[Figure]:
    prompts, streams = zip(*beside, strict=True)
    told = f"a prompt of {BESIDE_TOKENS:,} tokens and a stream, each alone and both together, in one run"
    return [
        Figure("taking_turns", "prefill beside a stream : alone", "", prompts, Bound("at least", 0.45), told),
        Figure("taking_turns", "stream beside a prefill : alone", "", streams, Bound("at least", 0.5), told),
    ]


def _first_of_four(rig: Rig, *, is_shared: bool) -> float:
    """Seconds to the first token of a short request that comes behind three longer prompts."""
    rig.clear_cache()
    shared = rig.prompts.message("system", SHARED_TOKENS)
    other = shared if is_shared else rig.prompts.message("system", SHARED_TOKENS)
    prompts: list[list[Message]] = [
        [rig.prompts.message("user", OLDEST_TOKENS)],
        [shared, rig.prompts.message("user", AWAITED_TOKENS)],
        [rig.prompts.message("user", SHORTEST_TOKENS)],
    ]
    with Client(rig.port) as client:
        before = [client.chat(prompt, 2) for prompt in prompts]
        client.run_for(0.3)
        waiting = client.chat([other, rig.prompts.message("user", OWN_TOKENS)], 2)
        seconds = _first_token_seconds(client, waiting)
        client.run_until(lambda: all(each.ended_at is not None for each in before))
    rig.settle()
    return seconds


def _small(rig: Rig, *, is_blocked: bool) -> float:
    """Seconds to the first token of a small request beside a long answer, behind a row that has no room for its own."""
    with Client(rig.port) as client:
        running = client.chat(rig.prompts.make(STREAM_TOKENS).text, LONG_ANSWER_TOKENS)
        client.run_until(lambda: running.first_text_at is not None)
        if is_blocked:
            blocked = client.chat(rig.prompts.make(NO_ROOM_TOKENS).text, LONG_ANSWER_TOKENS)
            client.run_for(0.3)
            if not rig.health()["num_waiting"]:
                raise BenchmarkError("there was room for a second long row")
        seconds = _first_token_seconds(client, client.chat(rig.prompts.make(SMALL_TOKENS).text, 2))
        client.close([running, *([blocked] if is_blocked else [])])
    rig.settle()
    return seconds


def _beside(rig: Rig) -> tuple[float, float]:
    """What a prompt has beside a stream, of its own speed, and the stream beside it, of its own pace."""
    alone = rig.prompts.make(BESIDE_TOKENS), rig.prompts.make(BESIDE_TOKENS)
    with Client(rig.port) as client:
        before = _prefill_seconds(client, alone[0].text)
        running = client.chat(rig.prompts.make(STREAM_TOKENS).text, 32768)
        client.run_until(lambda: running.first_text_at is not None)
        first = client.run_for(STREAM_SECONDS)
        start = time.perf_counter()
        beside = _prefill_seconds(client, rig.prompts.make(BESIDE_TOKENS).text)
        window = (start, start + beside)
        client.run_for(0.3)
        last = client.run_for(STREAM_SECONDS)
        times = [at for at, _ in running.texts()]
        client.close([running])
        rig.settle()
        after = _prefill_seconds(client, alone[1].text)
    rig.settle()
    own_pace = (_pace(times, first) + _pace(times, last)) / 2
    return (before + after) / 2 / beside, _pace(times, window) / own_pace


def _prefill_seconds(client: Client, text: str) -> float:
    return _first_token_seconds(client, client.chat(text, 2))


def _first_token_seconds(client: Client, stream: Stream) -> float:
    client.run_until(lambda: stream.first_text_at is not None)
    return (stream.first_text_at or 0.0) - stream.sent_at


def _pace(times: Sequence[float], window: tuple[float, float]) -> float:
    """Deltas per second. Raises BenchmarkError where none came."""
    start, end = window
    num_inside = sum(start <= at <= end for at in times)
    if not num_inside:
        raise BenchmarkError("the stream was silent for the whole window")
    return num_inside / (end - start)
