"""Recorded sessions of real clients through the server's own path without a model, against the most possible reuse.

    python -m benchmarks.open_loop [--real] [--shared FOLDER] [--family NAME] [--client NAME] [--requests]
                                   [--save] [--missing] [--seconds N]

Every request of a recording or a conversation of the corpus is parsed, recognised, rendered, stitched, looked up and
kept as a server would (`model_free.py`), with the recorded answer as what the model wrote; each conversation meets a
server that knows nothing. What was possible is found out beside it (`frozen.py`); that a real server reuses as much, by
`--real` (`real_loop.py`). With `--save` each conversation's row is kept as soon as it is known, so that a table can be
measured in parts: `--missing` plays what is not there yet, `--seconds` begins nothing after that time. Exit code 1 when
a bound is missed.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from benchmarks import real_loop
from benchmarks.figure import Bound, Figure
from benchmarks.frozen import FrozenOracle, Possible
from benchmarks.kept import WHOLE, KeptRows, Part
from benchmarks.model_free import ModelFree, Told
from benchmarks.recordings import Conversation, read_corpus, read_recordings, shared_folder
from benchmarks.reuse_oracle import CONVENTIONS, PLAYED_FAMILIES, RECORDED_FAMILIES
from kvserve.demo.build import build_model

TOLERANCE = 0.01
FLOORS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("PI", ("pi-0.87-qwen", "pi-0.87-plain-reasoning"), 0.96),
    ("OpenClaw", ("openclaw-2026.9.6", "openclaw-2026.9.6-toolloop"), 0.985),
    (
        "Claude-like chat",
        ("claude_code", "claude_code_compaction", "claude_code_parallel", "claude_code_subagent"),
        0.88,
    ),
    ("Claude Code's tool search", ("claude-code-2.1.330-toolsearch",), 0.98),
)
"""Traffic of a kind, its clients, and the least share of prompt tokens that must be reused."""

HEADINGS = (
    *("client", "family", "requests", "prompt tokens", "reuse", "oracle", "floor", "result"),
    "reuse, oracle with first requests",
)


@dataclass(frozen=True, slots=True)
class Judged:
    """One request: what the server says of it, and what was possible."""

    told: Told
    possible: Possible
    is_first: bool


@dataclass(frozen=True, slots=True)
class Played:
    """All requests of one conversation on one family."""

    client: str
    name: str
    family: str
    requests: tuple[Judged, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of some requests: of the prompts how many the server knew, of the oracle's prompts how many could be."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_frozen_tokens: int = 0
    num_possible_tokens: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def reuse(self) -> float:
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    @property
    def oracle(self) -> float:
        return self.num_possible_tokens / max(self.num_frozen_tokens, 1)

    @property
    def is_at_oracle(self) -> bool:
        return self.reuse >= self.oracle - TOLERANCE


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation on one family: the request that began it and those after it."""

    client: str
    name: str
    family: str
    first: Counts
    later: Counts


def play(conversation: Conversation, family: str, model: ModelFree, oracle: FrozenOracle) -> Played:
    """Lead a conversation with a server that knows nothing."""
    model.forget()
    oracle.forget()
    requests = tuple(
        Judged(model.serve(request, number), oracle.judge(request), is_first=number == 0)
        for number, request in enumerate(conversation.requests)
    )
    return Played(conversation.client, conversation.name, family, requests)


def row_of(played: Played) -> Row:
    """What is kept of it: its sums."""
    first, later = Counts(), Counts()
    for each in played.requests:
        counts = Counts(
            1,
            each.told.num_prompt_tokens,
            each.told.num_cached_tokens,
            each.possible.num_prompt_tokens,
            each.possible.num_reusable_tokens,
        )
        first, later = (first + counts, later) if each.is_first else (first, later + counts)
    return Row(played.client, played.name, played.family, first, later)


def pooled(rows: Iterable[Row], *, with_first: bool) -> Counts:
    """All requests of the rows together, those that begin a conversation only with `with_first`."""
    return sum((row.first + row.later if with_first else row.later for row in rows), Counts())


def conversations(shared: Path, clients: Sequence[str] | None = None) -> list[Conversation]:
    """What is played, of some clients or of all."""
    found = [*read_recordings(shared), *read_corpus(shared)]
    return [each for each in found if clients is None or each.client in clients]


def play_all(talks: Sequence[Conversation], families: Sequence[str], part: Part = WHOLE) -> Iterator[Played]:
    """Every conversation on every family, as far as they belong to the part."""
    for family in families:
        if part.is_over() or not (wanted := part.of(talks, family)):
            continue
        with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
            folder = build_model(family, Path(scratch) / "model")
            model = ModelFree(folder, is_cuttable=CONVENTIONS[family].is_cuttable)
            oracle = FrozenOracle(family, folder)
            for talk in wanted:
                if part.is_over():
                    return
                yield play(talk, family, model, oracle)


# --- figures and tables ----------------------------------------------------------------------------------------------


def run(_num_rounds: int) -> list[Figure]:
    """Reuse - oracle per family at the client that stands worst, and the floors. Nothing is timed."""
    shared = shared_folder()
    if shared is None:
        print("open_loop: there are no recorded conversations here, nothing was compared", file=sys.stderr)
        return []
    rows = [row_of(played) for played in play_all(conversations(shared), PLAYED_FAMILIES)]
    print("\n".join(table(rows)), flush=True)
    return [figure for family in PLAYED_FAMILIES for figure in _figures(rows, family)]


def _figures(rows: Sequence[Row], family: str) -> Iterator[Figure]:
    of_family = [row for row in rows if row.family == family]
    clients = {
        client: pooled([row for row in of_family if row.client == client], with_first=False)
        for client in dict.fromkeys(row.client for row in of_family)
    }
    worst = min(clients, key=lambda client: clients[client].reuse - clients[client].oracle)
    yield Figure(
        "open_loop",
        f"reuse - oracle, {family}, worst client",
        "",
        (clients[worst].reuse - clients[worst].oracle,),
        Bound("at least", -TOLERANCE),
        f"{worst}: {clients[worst].reuse:.4f} : {clients[worst].oracle:.4f}",
    )
    for kind, names, floor in FLOORS:
        counts = pooled([row for row in of_family if row.client in names], with_first=False)
        if counts.num_requests:
            yield Figure(
                "open_loop",
                f"reuse of {kind}, {family}",
                "",
                (counts.reuse,),
                Bound("at least", floor) if floor <= counts.oracle else None,
                f"oracle {counts.oracle:.4f}; {counts.num_requests} requests, "
                f"{counts.num_prompt_tokens:,} prompt tokens",
            )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Client x family: reuse, oracle, floor and whether both hold, as the lines of a Markdown table."""
    families = dict.fromkeys(row.family for row in rows)
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|---" * len(HEADINGS) + "|"
    for client in dict.fromkeys(row.client for row in rows):
        for family in families:
            if some := [row for row in rows if (row.client, row.family) == (client, family)]:
                yield _line(client, family, some, None)
    for kind, names, floor in FLOORS:
        for family in families:
            if some := [row for row in rows if row.client in names and row.family == family]:
                yield _line(f"**{kind}**", family, some, floor)


def _line(name: str, family: str, rows: Sequence[Row], floor: float | None) -> str:
    warm, every = pooled(rows, with_first=False), pooled(rows, with_first=True)
    misses = [] if warm.is_at_oracle else ["oracle"]
    if floor is not None and warm.reuse < floor <= warm.oracle:
        misses.append("floor")
    verdict = f"MISSED ({', '.join(misses)})" if misses else "pass"
    if floor is not None and warm.oracle < floor:
        verdict += ", the floor lies above the oracle"
    cells = [
        name,
        family,
        str(warm.num_requests),
        f"{warm.num_prompt_tokens:,}",
        f"{warm.reuse:.4f}",
        f"{warm.oracle:.4f}",
        f"{floor:g}" if floor is not None else "",
        verdict,
        f"{every.reuse:.4f}, {every.oracle:.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def _losses(played: Sequence[Played]) -> Iterator[str]:
    """The requests, with what was lost and the server's own explanation."""
    for one in played:
        for number, each in enumerate(one.requests, 1):
            told, possible = each.told, each.possible
            share = told.num_cached_tokens / told.num_prompt_tokens
            best = possible.num_reusable_tokens / possible.num_prompt_tokens
            yield (
                f"{one.client} {one.name} {one.family} {number}: {told.num_cached_tokens} of {told.num_prompt_tokens}, "
                f"possible {possible.num_reusable_tokens} of {possible.num_prompt_tokens}, lost {best - share:+.4f}; "
                f"{told.cause}, by its own count {told.num_lost_tokens} tokens"
            )


def main() -> int:
    """Print the table; returns 1 when a bound is missed."""
    arguments = _parse()
    families = arguments.family or (RECORDED_FAMILIES if arguments.real else PLAYED_FAMILIES)
    if arguments.real:
        return _compare(arguments, families)
    talks = conversations(arguments.shared, arguments.client)
    rows = []
    for played in play_all(talks, families, KEPT.part(is_missing=arguments.missing, seconds=arguments.seconds)):
        rows.append(row_of(played))
        if arguments.save:
            KEPT.put(rows[-1:])
        if arguments.requests:
            print("\n".join(_losses([played])), flush=True)
    lines = list(table(KEPT.read() if arguments.save else rows))
    print("\n".join(lines))
    return 1 if any("MISSED" in line for line in lines) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.open_loop", description="Reuse on recorded client sessions.")
    parser.add_argument("--shared", type=Path, default=shared_folder(), help="folder with recordings and corpus")
    parser.add_argument("--family", action="append", choices=PLAYED_FAMILIES, help="only this family")
    parser.add_argument("--client", action="append", help="only this recording or file of the corpus")
    parser.add_argument("--requests", action="store_true", help="every request with what was lost, and why")
    parser.add_argument("--real", action="store_true", help="a sample through the real server over HTTP instead")
    parser.add_argument("--save", action="store_true", help="keep every row in results; the table is that of all rows")
    parser.add_argument("--missing", action="store_true", help="only conversations whose row is not kept yet")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no conversation after that time")
    arguments = parser.parse_args()
    if arguments.shared is None or not arguments.shared.is_dir():
        parser.exit(2, "There are no recordings: give --shared FOLDER.\n")
    if not conversations(arguments.shared, arguments.client):
        parser.exit(2, "There is no such client.\n")
    return arguments


def _compare(arguments: argparse.Namespace, families: Sequence[str]) -> int:
    """Print the table of the real server beside the path without a model; returns 1 where a request differs."""
    kept = real_loop.KEPT
    part = kept.part(is_missing=arguments.missing, seconds=arguments.seconds)
    rows = []
    for played in real_loop.pair_all(arguments.shared, families, arguments.client, part):
        rows.append(real_loop.row_of(played))
        if arguments.save:
            kept.put(rows[-1:])
        if arguments.requests:
            print("\n".join(real_loop.requests([played])), flush=True)
    rows = kept.read() if arguments.save else rows
    print("\n".join(real_loop.table(rows)))
    return 1 if any(row.num_differing for row in rows) else 0


def report(rows: Sequence[Row]) -> str:
    """The file that keeps the table."""
    talks = {(row.client, row.name): row.first.num_requests + row.later.num_requests for row in rows}
    return f"""# Reuse on recorded sessions of real clients

`python -m benchmarks.open_loop --save`: {len(talks)} conversations, {sum(talks.values())} requests, each conversation
through the server's own path without a model, with the recorded answers as what the model wrote. Reuse and oracle are
shares of prompt tokens, pooled, without the request that begins a conversation (nothing can be known of it); the last
column counts it too. The oracle renders the client's bodies, their volatile spans frozen, with transformers, and looks
how much of each prompt an earlier one of its conversation had, answer included; where layers cannot be cut (qwen3_5,
qwen3_5_vl, gemma3), up to the end of a message. A row passes when reuse >= oracle - {TOLERANCE} and, in the last rows,
reuse >= floor. Nobody who computes nothing ahead reaches a floor that lies above the oracle: there the template itself
writes in the next prompt what it wrote before in another way. [paused_loop.md](paused_loop.md) has PI and Claude Code
with pauses between requests, in which that is computed.

{chr(10).join(table(rows))}
"""


KEPT = KeptRows("open_loop", Row, report)


if __name__ == "__main__":
    sys.exit(main())
