"""Fifty large pictures in a row, each another one: what is kept of them stays within its budgets, memory is flat.

Over HTTP, with small budgets, so that all of them are full long before the last picture. The pictures are noise: as a
body, decoded, as the tower's input, as features or as KV, each takes a megabyte and more wherever it is left behind.
"""

import base64
import http.client
import io
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.client import BenchmarkError
from benchmarks.figure import Bound, Figure
from benchmarks.memory import MIB
from benchmarks.rig import ask, rss_bytes, serving
from kvserve.config import setting_key
from kvserve.demo.build import TINY, build_model

FAMILY = "qwen3_vl"
"""Its features are the largest: they stand behind the first layers too."""

SIDE = 1_600
MAX_TOKENS = 24 * 24
"""Of a picture: the processor makes a large one smaller. The tower's time grows with the square of this; what a body
and a decoded picture take does not depend on it."""

NUM_IMAGES = 50
NUM_WARM_UP = 20
EVERY = 5
"""Pictures between two readings."""

FEATURE_BYTES = 2 * MIB
KV_BYTES = 4 * MIB
RECORDS_BYTES = MIB // 2
SETTINGS: Mapping[str, object] = {
    "warm_next_turn": True,
    "image_feature_max_bytes": FEATURE_BYTES,
    "prompt_cache_max_bytes": KV_BYTES,
    "session_records_max_bytes": RECORDS_BYTES,
}
MAX_GROWTH_MIB = 16.0
"""Of the process over the last 30 pictures, half a megabyte for each: a body takes ten, a decoded picture eight, what
the tower looks at three. Features and KV are MLX's memory."""

MAX_ACTIVE_GROWTH_MIB = 2.0
STILL_BYTES = MIB / 4
PAUSE_SECONDS = 0.5
PATIENCE_SECONDS = 20.0
ANSWER_TOKENS = 8


@dataclass(slots=True)
class Seen:
    """What was read while the server stood still, after so many pictures."""

    at: list[int] = field(default_factory=list)
    rss_bytes: list[float] = field(default_factory=list)
    active_bytes: list[float] = field(default_factory=list)
    feature_bytes: list[int] = field(default_factory=list)
    kv_bytes: list[int] = field(default_factory=list)
    num_tower_calls: int = 0


def run(num_rounds: int) -> list[Figure]:
    """The most that was kept against its budgets, and what memory grows by behind the warm-up."""
    return figures([measured(SETTINGS) for _ in range(num_rounds)])


def measured(settings: Mapping[str, object], num_images: int = NUM_IMAGES) -> Seen:
    """Readings of a server of its own with these settings. Raises BenchmarkError where it did not look at each."""
    seen = Seen()
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as name:
        folder = build_model(FAMILY, Path(name) / "model", scale=TINY, answer_tokens=None)
        limit_tokens(folder)
        given = {setting_key(key): str(value) for key, value in settings.items()}
        with serving(folder, Path(name), given) as (port, pid):
            for number in range(1, num_images + 1):
                look(port, number)
                if number % EVERY == 0:
                    read(port, pid, number, seen)
    if seen.num_tower_calls != num_images:
        raise BenchmarkError(f"the tower looked at {seen.num_tower_calls} of {num_images} pictures")
    return seen


def limit_tokens(folder: Path) -> None:
    """Let the model's processor make larger pictures smaller, down to `MAX_TOKENS`."""
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["size"]["longest_edge"] = MAX_TOKENS * (settings["merge_size"] * settings["patch_size"]) ** 2
    file.write_text(json.dumps(settings), encoding="utf-8")


def look(port: int, number: int) -> None:
    """A conversation of its own about one picture. Raises BenchmarkError where it is not answered."""
    part = {"type": "image_url", "image_url": {"url": picture_url(number)}}
    message = {"role": "user", "content": [part, {"type": "text", "text": f"What is on picture {number}?"}]}
    body = json.dumps({"messages": [message], "max_tokens": ANSWER_TOKENS, "temperature": 0})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if (said := answer.read()) and answer.status != 200:
            raise BenchmarkError(f"picture {number}: {answer.status} {said[:300]!r}")
    finally:
        connection.close()


def picture_url(number: int) -> str:
    """Noise, which no compression makes small: about ten megabytes of text."""
    pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels, "RGB").save(stream, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def read(port: int, pid: int, number: int, seen: Seen) -> None:
    """Add a reading: taken when what was let go of is gone, which happens in idle time."""
    rss, deadline = rss_bytes(pid), time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
        before, rss = rss, rss_bytes(pid)
        if abs(rss - before) < STILL_BYTES:
            break
    cache: dict[str, Any] = ask(port, "GET", "/v1/cache")[1]
    seen.at.append(number)
    seen.rss_bytes.append(rss)
    seen.active_bytes.append(ask(port, "GET", "/health")[1]["active_memory_bytes"])
    seen.feature_bytes.append(cache["num_feature_bytes"])
    seen.kv_bytes.append(cache["ram_bytes"])
    seen.num_tower_calls = cache["num_tower_calls"]


def figures(found: Sequence[Seen]) -> list[Figure]:
    """The table's rows of these rounds."""
    return [
        _share("features", FEATURE_BYTES, [seen.feature_bytes for seen in found]),
        _share("KV", KV_BYTES, [seen.kv_bytes for seen in found]),
        _growth("process memory", MAX_GROWTH_MIB, found, [seen.rss_bytes for seen in found]),
        _growth("MLX memory", MAX_ACTIVE_GROWTH_MIB, found, [seen.active_bytes for seen in found]),
    ]


def _share(name: str, budget_bytes: int, found: Sequence[Sequence[int]]) -> Figure:
    return Figure(
        "image_memory",
        f"most bytes of {name} : budget, {NUM_IMAGES} pictures of {SIDE} x {SIDE}",
        "",
        tuple(max(values) / budget_bytes for values in found),
        Bound("at most", 1),
        f"{max(found[-1]) / MIB:.2f} : {budget_bytes / MIB:.2f} MiB",
    )


def _growth(name: str, limit: float, found: Sequence[Seen], values: Sequence[Sequence[float]]) -> Figure:
    return Figure(
        "image_memory",
        f"growth of {name} from picture {NUM_WARM_UP} to {NUM_IMAGES}",
        "MiB",
        tuple(growth(seen.at, each) / MIB for seen, each in zip(found, values, strict=True)),
        Bound("at most", limit),
        " ".join(f"{value / MIB:.1f}" for value in values[-1]) + f" MiB after every {EVERY}th",
    )


def growth(at: Sequence[int], values: Sequence[float]) -> float:
    """What the readings rise by from the end of the warm-up to the last, by the median slope of all their pairs.

    The median, because one reading in ten or so is a picture in float32 too high: glibc keeps a freed buffer of up to
    32 MiB at the top of a thread's heap until the next thread takes it.
    """
    behind = [(number, value) for number, value in zip(at, values, strict=True) if number >= NUM_WARM_UP]
    slopes = [(b - a) / (later - earlier) for (earlier, a), (later, b) in combinations(behind, 2)]
    return median(slopes) * (behind[-1][0] - behind[0][0])
