"""Traffic for half an hour on a small cache: the disk stays under its cap, the server's memory is flat.

    python -m benchmarks.soak [--minutes 30]

The traffic is that of `memory.py`: conversations that go on and new ones, two at once, so that all the time something
is written, leaves RAM, is restored and leaves the disk. What is on disk is read from the disk, not asked of the server.
"""

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import memory
from benchmarks.bare import BareModel
from benchmarks.client import Message
from benchmarks.figure import Bound, Figure, markdown_table
from benchmarks.memory import MIB, NUM_AT_ONCE, Readings, next_conversation, served, slope
from benchmarks.prompts import Prompts
from benchmarks.rig import Rig, serving
from kvserve.cache.disk_store import SUFFIX
from kvserve.config import setting_key
from kvserve.demo.build import TINY, build_model

CAP_BYTES = 16 * MIB
SETTINGS = {**memory.SETTINGS, "disk_cache_max_bytes": CAP_BYTES}
NUM_TOLD = 200
"""Conversations that may go on: more than RAM holds, about as many as the disk does."""

WARM_UP_SHARE = 1 / 3
"""Of the time: every bounded list of the server has to fill up before its memory can be flat."""

MAX_GROWTH_MIB = 8.0


@dataclass(slots=True)
class Watch:
    """What was read from outside: the most that all files on disk ever were, the largest blob, and memory over time."""

    folder: Path
    peak_disk_bytes: int = 0
    largest_blob_bytes: int = 0
    num_requests: int = 0
    at_requests: list[float] = field(default_factory=list)
    rss_bytes: list[float] = field(default_factory=list)

    def look(self, rig: Rig) -> None:
        total = 0
        for name, size in _files(self.folder):
            total += size
            if name.endswith(SUFFIX):
                self.largest_blob_bytes = max(self.largest_blob_bytes, size)
        self.peak_disk_bytes = max(self.peak_disk_bytes, total)
        self.at_requests.append(self.num_requests)
        self.rss_bytes.append(rig.server_rss_bytes())


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Name and bytes of every file: blobs, also one that is being written, index and records; what leaves meanwhile
    does not count."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield path.name, path.stat().st_size


def run(minutes: float) -> list[Figure]:
    """The peak on disk beyond the cap, in records, and the growth of memory behind the warm-up."""
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as name:
        scratch = Path(name)
        folder = build_model("qwen3", scratch / "model", scale=TINY, answer_tokens=None)
        given = {setting_key(key): str(value) for key, value in SETTINGS.items()}
        with serving(folder, scratch, given) as (port, pid):
            rig = Rig(port, BareModel(folder), Prompts(folder), pid)
            watch = _soak(rig, Watch(scratch / "disk"), 60 * minutes)
            report = rig.cache()
    return _figures(watch, report["disk"])


def _soak(rig: Rig, watch: Watch, seconds: float) -> Watch:
    readings, rng, ends_at = Readings(), random.Random(0), time.monotonic() + seconds
    told: list[list[Message]] = []
    next_line = time.monotonic()
    while time.monotonic() < ends_at:
        asked = [next_conversation(rig, told, rng) for _ in range(NUM_AT_ONCE)]
        told = [*told, *served(rig, asked, readings)][-NUM_TOLD:]
        watch.num_requests += NUM_AT_ONCE
        watch.look(rig)
        if time.monotonic() >= next_line:
            next_line += 60
            disk_mib, rss_mib = watch.peak_disk_bytes / MIB, watch.rss_bytes[-1] / MIB
            line = f"{watch.num_requests} requests, at most {disk_mib:.2f} MiB on disk, process {rss_mib:.1f} MiB"
            print(line, file=sys.stderr, flush=True)
    return watch


def _figures(watch: Watch, disk: dict[str, object]) -> list[Figure]:
    begin = int(len(watch.rss_bytes) * WARM_UP_SHARE)
    at_requests, rss = watch.at_requests[begin:], watch.rss_bytes[begin:]
    slope_bytes = slope(at_requests, rss)
    growth = slope_bytes * (at_requests[-1] - at_requests[0]) / MIB
    over = (watch.peak_disk_bytes - CAP_BYTES) / watch.largest_blob_bytes
    return [
        Figure(
            "soak",
            "most bytes on disk beyond the cap",
            "records",
            (over,),
            Bound("at most", 1),
            f"{watch.peak_disk_bytes / MIB:.2f} of {CAP_BYTES / MIB:.0f} MiB in {len(watch.rss_bytes)} looks, "
            f"largest {watch.largest_blob_bytes / MIB:.3f} MiB, {disk['num_evicted']} left the disk, "
            f"{disk['num_errors']} errors",
        ),
        Figure(
            "soak",
            "growth of process memory behind the first third",
            "MiB",
            (growth,),
            Bound("at most", MAX_GROWTH_MIB),
            f"{rss[0] / MIB:.1f} MiB at first, {rss[-1] / MIB:.1f} at last, {watch.num_requests} requests, "
            f"slope {slope_bytes / 1024:+.3f} KiB per request",
        ),
    ]


def main() -> int:
    """Prints the table; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description="Traffic for half an hour on a small cache.")
    parser.add_argument("--minutes", type=float, default=30.0)
    figures = run(parser.parse_args().minutes)
    print(markdown_table(figures))
    return int(any(figure.is_missed for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
