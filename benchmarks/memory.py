"""Three hundred requests to a server with a small cache: what it keeps stays within the budget, its memory is flat.

Over HTTP. Every third request goes on with a conversation from before, the others are new, so that something leaves the
cache all the time; two run at once.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.client import Client, Message
from benchmarks.figure import Bound, Figure
from benchmarks.rig import Rig, open_rig
from kvserve.demo.build import TINY

NUM_REQUESTS = 300
NUM_WARM_UP = 100
NUM_AT_ONCE = 2
BUDGET_BYTES = 4 * 2**20
RECORDS_BYTES = 2**20
"""What the server may remember of conversations, in RAM: by default it has more than these requests fill."""

PROMPT_TOKENS = (50, 400)
CHUNK_TOKENS = 128
"""Short ones: what a chunk takes for its time grows with its length, and the first long one would look like a leak."""

SETTINGS: Mapping[str, int] = {
    "prompt_cache_max_bytes": BUDGET_BYTES,
    "session_records_max_bytes": RECORDS_BYTES,
    "prefill_step_size": CHUNK_TOKENS,
}
ANSWER_TOKENS = 12
POLL_SECONDS = 0.1
MIB = 2**20


@dataclass(slots=True)
class Readings:
    """What was read while the requests ran: the most that was kept, and memory after each pair of requests."""

    peak_ram_bytes: int = 0
    num_polls: int = 0
    num_evicted_tokens: int = 0
    num_requests: list[float] = field(default_factory=list)
    rss_bytes: list[float] = field(default_factory=list)
    active_bytes: list[float] = field(default_factory=list)


def run(num_rounds: int) -> list[Figure]:
    """The peak against the budget, and how much memory grows over the last 200 requests (a line through all points)."""
    found = []
    for _ in range(num_rounds):
        with open_rig(TINY, **SETTINGS) as rig:
            found.append(_readings(rig))
    last = found[-1]
    return [
        Figure(
            "memory",
            f"most bytes kept : budget, {NUM_REQUESTS} requests",
            "",
            tuple(readings.peak_ram_bytes / BUDGET_BYTES for readings in found),
            Bound("at most", 1),
            f"{last.peak_ram_bytes / MIB:.2f} : {BUDGET_BYTES / MIB:.2f} MiB in {last.num_polls} polls, "
            f"{last.num_evicted_tokens:,} tokens evicted",
        ),
        _growth("process memory", [readings.rss_bytes for readings in found], last.num_requests, Bound("at most", 8)),
        _growth("MLX memory", [readings.active_bytes for readings in found], last.num_requests, Bound("at most", 2)),
    ]


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of the straight line that is nearest to the points (least squares)."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def _growth(name: str, found: Sequence[Sequence[float]], num_requests: Sequence[float], bound: Bound) -> Figure:
    num_last = NUM_REQUESTS - NUM_WARM_UP
    return Figure(
        "memory",
        f"growth of {name} over the last {num_last} requests",
        "MiB",
        tuple(slope(num_requests, values) * num_last / MIB for values in found),
        bound,
        f"{found[-1][0] / MIB:.1f} MiB at first, {found[-1][-1] / MIB:.1f} at last, "
        f"slope {slope(num_requests, found[-1]) / 1024:+.2f} KiB per request",
    )


def _readings(rig: Rig) -> Readings:
    readings, rng = Readings(), random.Random(0)
    told: list[list[Message]] = []
    for num_done in range(NUM_AT_ONCE, NUM_REQUESTS + 1, NUM_AT_ONCE):
        asked = [next_conversation(rig, told, rng) for _ in range(NUM_AT_ONCE)]
        told = [*told, *served(rig, asked, readings)][-6:]
        _poll(rig, readings)
        if num_done > NUM_WARM_UP:
            readings.num_requests.append(num_done)
            readings.rss_bytes.append(rig.server_rss_bytes())
            readings.active_bytes.append(rig.health()["active_memory_bytes"])
    readings.num_evicted_tokens = rig.cache()["num_evicted_tokens"]
    return readings


def next_conversation(rig: Rig, told: Sequence[list[Message]], rng: random.Random) -> list[Message]:
    """A new conversation or, one time in three, another turn of one that is not long yet."""
    message = rig.prompts.message("user", rng.randint(*PROMPT_TOKENS))
    short = [messages for messages in told if len(messages) < 6]
    return [*rng.choice(short), message] if short and rng.random() < 1 / 3 else [message]


def served(rig: Rig, asked: Sequence[list[Message]], readings: Readings) -> list[list[Message]]:
    """The conversations with their answers; polls while they run."""
    last_poll = time.perf_counter()

    def is_over() -> bool:
        nonlocal last_poll
        if time.perf_counter() - last_poll > POLL_SECONDS:
            _poll(rig, readings)
            last_poll = time.perf_counter()
        return all(stream.ended_at is not None for stream in streams)

    with Client(rig.port) as client:
        streams = [client.chat(messages, ANSWER_TOKENS) for messages in asked]
        client.run_until(is_over)
    while rig.health()["num_running"]:
        time.sleep(0.01)
    answers = ["".join(text for _, text in stream.texts()) for stream in streams]
    return [
        [*messages, {"role": "assistant", "content": answer}] for messages, answer in zip(asked, answers, strict=True)
    ]


def _poll(rig: Rig, readings: Readings) -> None:
    readings.peak_ram_bytes = max(readings.peak_ram_bytes, rig.cache()["ram_bytes"])
    readings.num_polls += 1
