"""How long the engine thread is held by one lookup, stop, end or evicted leaf, with so many nodes in the tree: the real
tree and the real disk side over payloads that are mere sizes, no model. Processor time of that thread is counted, so
that what else runs on the machine does not.

Three quarters of the nodes are on the path of one prompt of 150,000 tokens, the others in twenty conversations that
begin with the same system prompt. A hybrid has a state at each node's end.

python -m benchmarks.tree_costs [--save]     the curve from 100 to 10,000 nodes
"""

import argparse
import gc
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.figure import Bound, Figure
from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.disk_records import DiskLimits, Faults
from kvserve.cache.disk_scratch import ScratchStore
from kvserve.cache.disk_tier import DiskTier
from kvserve.cache.disk_trie import BlobTrie
from kvserve.cache.node import Lease
from kvserve.cache.records import Limits, Payload
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from kvserve.engine.disk_cache import DiskCache
from kvserve.engine.snapshot import KvSlice, StateSnapshot

NUM_NODES = (100, 300, 1_000, 3_000, 10_000)
PATH_TOKENS = 150_000
SYSTEM_TOKENS = 8_000
NUM_OTHERS = 20
STOP_TOKENS, TURN_TOKENS = 64, 200
ROW_BYTES, STATE_BYTES = 1024, 65536
INTERVAL_SECONDS, CALL_SECONDS = 1.0, 0.001
NUM_STOPS = 5
BOUND_NODES, BOUND_MS = 3_000, 50
FEW_NODES, MANY_NODES, BOUND_GROWTH = 100, 10_000, 3
MAX_BYTES = 2**40
MODEL = "0" * 32
FLUSH_SECONDS = 300.0
RESULT = Path(__file__).parent / "results" / "tree_costs.md"

OPERATIONS = (
    "first lookup",
    "the same again",
    "next turn's lookup",
    "stand and leave",
    "stop kept",
    "end of an answer",
    "nothing to evict",
    "leaf or state evicted",
    "too old ones looked for",
)
"""Each is one call or two of the engine's, as one request makes them; the last one is made once an interval."""

OF_WHAT_IS_NEW = (
    "the same again",
    "next turn's lookup",
    "stand and leave",
    "stop kept",
    "end of an answer",
    "nothing to evict",
    "leaf or state evicted",
)
"""These cost what is new, however much there is. A first lookup compares the whole prompt, node by node."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A model with layers that cannot be cut, or without; a disk, or none."""

    is_hybrid: bool
    has_disk: bool

    @property
    def name(self) -> str:
        return f"{'hybrid' if self.is_hybrid else 'dense'}, {'disk' if self.has_disk else 'RAM only'}"


KINDS = tuple(Kind(is_hybrid, has_disk) for is_hybrid in (False, True) for has_disk in (False, True))


class Kept:
    """A tree with so many nodes, and what a request asks of it."""

    def __init__(self, kind: Kind, num_nodes: int, folder: Path) -> None:
        self._random = Random(num_nodes)
        self._hybrid = kind.is_hybrid
        ticks, self._past_seconds = count(), 0.0
        self.tree = PrefixTree(
            BlockHasher(16, "benchmark"),
            Limits(
                MAX_BYTES,
                MAX_BYTES,
                max_entries=10**6,
                max_entries_per_owner=10**6,
                check_seconds=INTERVAL_SECONDS,
            ),
            needs_checkpoints=kind.is_hybrid,
            cut_payload=lambda _payload, start, end: _rows(start, end),
            clock=lambda: self._past_seconds + next(ticks) * CALL_SECONDS,
        )
        self._disk: DiskCache | None = None
        self.tier: DiskTier | None = None
        system = self._words(SYSTEM_TOKENS)
        num_elsewhere = num_nodes // 4
        for number in range(NUM_OTHERS):
            num_own = (num_elsewhere + number) // NUM_OTHERS
            self._say((*system, *self._words(num_own * STOP_TOKENS)), num_own)
        self.ids = (*system, *self._words(PATH_TOKENS - SYSTEM_TOKENS))
        self._say(self.ids, num_nodes - self.tree.stats().num_nodes)
        if kind.has_disk:
            self._use_disk(folder)

    def _use_disk(self, folder: Path) -> None:
        limits = DiskLimits(max_bytes=2**40, min_free_bytes=0, ttl_seconds=3600, max_queued_bytes=2**40)
        index = BlobTrie(BlockHasher(16, "benchmark"), MODEL)
        self.tier = DiskTier(ScratchStore(folder, MODEL), index, limits, Faults(print))
        self._disk = DiskCache(
            self.tier,
            self.tree,
            needs_checkpoints=self._hybrid,
            is_ram_lent=False,
            make_room=lambda _bytes: None,
            make_some_room=lambda _bytes: True,
        )
        self._disk.writing.save_all(FLUSH_SECONDS)
        self.flush()

    def flush(self) -> None:
        """What is on its way to the disk is there, so that its thread takes no time from what is measured."""
        if self.tier is not None and not self.tier.flush(FLUSH_SECONDS):
            raise TimeoutError(f"nothing was written for {FLUSH_SECONDS} s")

    def _words(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(100_000) for _ in range(num_tokens))

    def _say(self, ids: tuple[int, ...], num_stops: int) -> None:
        """A row that stops so many times behind the system prompt."""
        tokens = TokenSequence(ids)
        lease = self._stand(tokens)
        for stop in range(num_stops + 1):
            end = SYSTEM_TOKENS + (len(ids) - SYSTEM_TOKENS) * stop // max(num_stops, 1)
            self._extend(lease, tokens, end)
        self.tree.mark_end(lease)
        self.tree.release(lease)

    def _stand(self, tokens: TokenSequence) -> Lease:
        return self.tree.acquire(self.tree.lookup(tokens), owner="somebody", user="somebody")

    def _extend(self, lease: Lease, tokens: TokenSequence, end: int) -> None:
        def take_state() -> Payload:
            return StateSnapshot((), STATE_BYTES)

        start = lease.num_tokens
        self.tree.extend(lease, tokens, end, _rows, take_state if self._hybrid else None, "message")
        if self._disk is not None:
            self._disk.writing.save_end(lease, start)

    # --- one request --------------------------------------------------------------------------------------------------

    def request(self) -> Iterator[tuple[str, float]]:
        """A turn behind all that is known, with the seconds that each of its operations took."""
        keep = len(self.ids) - self._random.randrange(1, TURN_TOKENS)
        tokens = TokenSequence((*self.ids[:keep], *self._words(TURN_TOKENS)))
        self.tree.forget_names()
        yield "first lookup", _seconds(lambda: self.tree.lookup(tokens))
        yield "the same again", _seconds(lambda: self.tree.lookup(tokens))
        longer = TokenSequence((*tokens.ids, *self._words(TURN_TOKENS)))
        yield "next turn's lookup", _seconds(lambda: self.tree.lookup(longer))
        yield "stand and leave", _seconds(lambda: self._stand_and_leave(longer))
        yield from self._row(TokenSequence((*longer.ids, *self._words(NUM_STOPS * STOP_TOKENS + TURN_TOKENS))))
        yield "leaf or state evicted", self._evict()
        self._past_seconds += INTERVAL_SECONDS
        yield "too old ones looked for", _seconds(self.tree.evict)

    def _stand_and_leave(self, tokens: TokenSequence) -> None:
        """What an admitted row does before it begins."""
        if self._disk is not None:
            self._disk.let_go(self._disk.pin(tokens, owner="somebody"))
        else:
            self.tree.release(self._stand(tokens))

    def _row(self, tokens: TokenSequence) -> Iterator[tuple[str, float]]:
        lease = self._stand(tokens)
        end = len(tokens) - NUM_STOPS * STOP_TOKENS - TURN_TOKENS
        for _ in range(NUM_STOPS):
            end += STOP_TOKENS
            yield "stop kept", _seconds(lambda end=end: self._extend(lease, tokens, end))  # type: ignore[misc]
        yield "end of an answer", _seconds(lambda: self._end(lease, tokens))
        self.flush()
        yield "nothing to evict", _seconds(self.tree.evict)

    def _end(self, lease: Lease, tokens: TokenSequence) -> None:
        self._extend(lease, tokens, len(tokens))
        self.tree.mark_end(lease)
        self.tree.release(lease)

    def _evict(self) -> float:
        """Room for one byte more than there is: a leaf goes, or a state."""
        before = self.tree.num_ram_bytes
        seconds = _seconds(lambda: self.tree.evict(MAX_BYTES - self.tree.num_ram_bytes + 1))
        if self.tree.num_ram_bytes >= before:
            raise RuntimeError("Nothing was evicted.")
        return seconds


def _rows(start: int, end: int) -> KvSlice:
    return KvSlice((), end - start, ROW_BYTES * (end - start))


def _seconds(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


@contextmanager
def kept(kind: Kind, num_nodes: int) -> Iterator[Kept]:
    """A tree of so many nodes, with its disk if it has one."""
    gc.collect()
    gc.freeze()  # as a server does once it has loaded: a pass over all modules (140 ms) is no cost of the tree's
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as folder:
        found = Kept(kind, num_nodes, Path(folder) / "disk")
        try:
            yield found
        finally:
            if found.tier is not None:
                found.tier.close(FLUSH_SECONDS)


def measure(kind: Kind, num_nodes: int, num_rounds: int) -> dict[str, list[float]]:
    """The seconds of each operation, over so many requests; one before them is thrown away."""
    seconds: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    with kept(kind, num_nodes) as tree:
        for number in range(-1, num_rounds):
            for name, value in tree.request():
                if number >= 0:
                    seconds[name].append(value)
    return seconds


def run(num_rounds: int) -> list[Figure]:
    """The longest hold of each operation, of all kinds, at the size that has a bound; and how those grow that should
    not."""
    return [*_holds(num_rounds), *_growth(num_rounds)]


def _growth(num_rounds: int) -> list[Figure]:
    few, many = (measure(KINDS[-1], size, num_rounds) for size in (FEW_NODES, MANY_NODES))
    return [
        Figure(
            "tree_costs",
            f"{name}, {KINDS[-1].name}: {MANY_NODES:,} : {FEW_NODES:,} nodes",
            "",
            (median(many[name]) / median(few[name]),),
            Bound("at most", BOUND_GROWTH),
            f"{1000 * median(many[name]):.2f} : {1000 * median(few[name]):.2f} ms",
        )
        for name in OF_WHAT_IS_NEW
    ]


def _holds(num_rounds: int) -> list[Figure]:
    found = {kind: measure(kind, BOUND_NODES, num_rounds) for kind in KINDS}
    return [
        Figure(
            "tree_costs",
            f"{name}, {BOUND_NODES:,} nodes, {PATH_TOKENS:,} tokens: longest hold of the engine thread",
            "ms",
            (1000 * max(max(seconds[name]) for seconds in found.values()),),
            Bound("at most", BOUND_MS),
            "medians " + ", ".join(f"{1000 * median(each[name]):.2f} ({kind.name})" for kind, each in found.items()),
        )
        for name in OPERATIONS
    ]


def table(num_rounds: int, sizes: Sequence[int] = NUM_NODES) -> Iterator[str]:
    """Median and longest of each operation in milliseconds, a column per size."""
    for kind in KINDS:
        found = {size: measure(kind, size, num_rounds) for size in sizes}
        yield f"\n| {kind.name} | " + " | ".join(f"{size:,} nodes" for size in sizes) + " |"
        yield "|---|" + "---|" * len(sizes)
        for name in OPERATIONS:
            cells = (f"{1000 * median(found[size][name]):.2f} ({1000 * max(found[size][name]):.1f})" for size in sizes)
            yield f"| {name} | " + " | ".join(cells) + " |"


def main(argv: Sequence[str]) -> None:
    """Print the curve; with `--save` keep it in benchmarks/results."""
    parser = argparse.ArgumentParser(prog="benchmarks.tree_costs")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="requests of which the medians count")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results/tree_costs.md")
    arguments = parser.parse_args(argv)
    lines = [
        "# What one operation on the prefix tree costs",
        "",
        "`python -m benchmarks.tree_costs --save`: median (longest) in milliseconds of the engine thread,",
        f"a path of {PATH_TOKENS:,} tokens, {platform.system()} {platform.machine()}.",
    ]
    for line in table(arguments.rounds):
        print(line, flush=True)
        lines.append(line)
    if arguments.save:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
