"""Recorded sessions of real clients through the server's own path without a model, against the most possible reuse.

    python -m benchmarks.open_loop [--real] [--shared FOLDER] [--family NAME] [--client NAME] [--requests]

Every request of a recording or a conversation of the corpus is parsed, recognised, rendered, stitched, looked up and
kept as a server would (`model_free.py`), with the recorded answer as what the model wrote; each conversation meets a
server that knows nothing. What was possible is found out beside it (`frozen.py`); that a real server reuses as much, by
`--real` (`real_loop.py`). Exit code 1 when a bound is missed.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import real_loop
from benchmarks.figure import Bound, Figure
from benchmarks.frozen import FrozenOracle, Possible
from benchmarks.model_free import ModelFree, Told
from benchmarks.recordings import Conversation, read_corpus, read_recordings, shared_folder
from benchmarks.reuse_oracle import CONVENTIONS, RECORDED_FAMILIES
from kvserve.demo.build import build_model

TOLERANCE = 0.01
RESULTS = Path(__file__).parent / "results" / "open_loop.md"

FLOORS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("PI", ("pi-0.87-qwen", "pi-0.87-plain-reasoning"), 0.96),
    ("OpenClaw", ("openclaw-2026.9.6", "openclaw-2026.9.6-toolloop"), 0.985),
    (
        "Claude-like chat",
        ("claude_code", "claude_code_compaction", "claude_code_parallel", "claude_code_subagent"),
        0.88,
    ),
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
class Shares:
    """Reused prompt tokens : prompt tokens, and the same of what was possible."""

    num_requests: int
    num_prompt_tokens: int
    reuse: float
    oracle: float

    @property
    def is_at_oracle(self) -> bool:
        return self.reuse >= self.oracle - TOLERANCE


def play(conversation: Conversation, family: str, model: ModelFree, oracle: FrozenOracle) -> Played:
    """Lead a conversation with a server that knows nothing."""
    model.forget()
    oracle.forget()
    requests = tuple(
        Judged(model.serve(request, number), oracle.judge(request), is_first=number == 0)
        for number, request in enumerate(conversation.requests)
    )
    return Played(conversation.client, conversation.name, family, requests)


def shares(played: Iterable[Played], *, with_first: bool) -> Shares:
    """Pooled over all requests, those that begin a conversation only with `with_first`."""
    counted = [each for one in played for each in one.requests if with_first or not each.is_first]
    prompts = sum(each.told.num_prompt_tokens for each in counted)
    frozen = sum(each.possible.num_prompt_tokens for each in counted)
    return Shares(
        len(counted),
        prompts,
        sum(each.told.num_cached_tokens for each in counted) / max(prompts, 1),
        sum(each.possible.num_reusable_tokens for each in counted) / max(frozen, 1),
    )


def conversations(shared: Path, client: str | None = None) -> list[Conversation]:
    """What is played, of one client or of all."""
    found = [*read_recordings(shared), *read_corpus(shared)]
    return [each for each in found if client in (None, each.client)]


def play_all(talks: Sequence[Conversation], families: Sequence[str]) -> Iterator[Played]:
    """Every conversation on every family."""
    for family in families:
        with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
            folder = build_model(family, Path(scratch) / "model")
            model = ModelFree(folder, is_cuttable=CONVENTIONS[family].is_cuttable)
            oracle = FrozenOracle(family, folder)
            for talk in talks:
                yield play(talk, family, model, oracle)


# --- figures and tables ----------------------------------------------------------------------------------------------


def run(_num_rounds: int) -> list[Figure]:
    """Reuse - oracle per family at the client that stands worst, and the floors. Nothing is timed."""
    shared = shared_folder()
    if shared is None:
        print("open_loop: there are no recorded conversations here, nothing was compared", file=sys.stderr)
        return []
    played = list(play_all(conversations(shared), RECORDED_FAMILIES))
    print("\n".join(table(played)), flush=True)
    return [figure for family in RECORDED_FAMILIES for figure in _figures(played, family)]


def _figures(played: Sequence[Played], family: str) -> Iterator[Figure]:
    of_family = [one for one in played if one.family == family]
    clients = {
        one.client: shares([each for each in of_family if each.client == one.client], with_first=False)
        for one in of_family
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
        share = shares([one for one in of_family if one.client in names], with_first=False)
        if share.num_requests:
            yield Figure(
                "open_loop",
                f"reuse of {kind}, {family}",
                "",
                (share.reuse,),
                Bound("at least", floor) if floor <= share.oracle else None,
                f"oracle {share.oracle:.4f}; {share.num_requests} requests, {share.num_prompt_tokens:,} prompt tokens",
            )


def table(played: Sequence[Played]) -> Iterator[str]:
    """Client x family: reuse, oracle, floor and whether both hold, as the lines of a Markdown table."""
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|---" * len(HEADINGS) + "|"
    for client in dict.fromkeys(one.client for one in played):
        for family in dict.fromkeys(one.family for one in played):
            yield _row(client, family, [one for one in played if (one.client, one.family) == (client, family)], None)
    for kind, names, floor in FLOORS:
        for family in dict.fromkeys(one.family for one in played):
            some = [one for one in played if one.client in names and one.family == family]
            if some:
                yield _row(f"**{kind}**", family, some, floor)


def _row(name: str, family: str, played: Sequence[Played], floor: float | None) -> str:
    warm, every = shares(played, with_first=False), shares(played, with_first=True)
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
                f"{told.cause}"
            )


def main() -> int:
    """Print the table; returns 1 when a bound is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.open_loop", description="Reuse on recorded client sessions.")
    parser.add_argument("--shared", type=Path, default=shared_folder(), help="folder with recordings and corpus")
    parser.add_argument("--family", action="append", choices=RECORDED_FAMILIES, help="only this family")
    parser.add_argument("--client", help="only this recording or file of the corpus")
    parser.add_argument("--requests", action="store_true", help="every request with what was lost, and why")
    parser.add_argument("--real", action="store_true", help="a sample through the real server over HTTP instead")
    parser.add_argument("--save", action="store_true", help=f"write the table to {RESULTS.name} in results")
    arguments = parser.parse_args()
    if arguments.shared is None or not arguments.shared.is_dir():
        parser.exit(2, "There are no recordings: give --shared FOLDER.\n")
    families = arguments.family or RECORDED_FAMILIES
    if arguments.real:
        return _compare(arguments.shared, families, arguments.client, shows_requests=arguments.requests)
    talks = conversations(arguments.shared, arguments.client)
    if not talks:
        parser.exit(2, "There is no such client.\n")
    played = list(play_all(talks, families))
    if arguments.requests:
        print("\n".join(_losses(played)), end="\n\n")
    lines = list(table(played))
    print("\n".join(lines))
    if arguments.save:
        RESULTS.write_text(_report(talks, lines), encoding="utf-8")
    return 1 if any("MISSED" in line for line in lines) else 0


def _compare(shared: Path, families: Sequence[str], client: str | None, *, shows_requests: bool) -> int:
    """Print the table of the real server beside the path without a model; returns 1 where a request differs."""
    played = []
    for one in real_loop.pair_all(shared, families, client):
        played.append(one)
        if shows_requests:
            print("\n".join(real_loop.requests([one])), flush=True)
    print("\n".join(real_loop.table(played)))
    return 1 if real_loop.num_differing(played) else 0


def _report(talks: Sequence[Conversation], lines: Sequence[str]) -> str:
    num_requests = sum(len(talk.requests) for talk in talks)
    return f"""# Reuse on recorded sessions of real clients

`python -m benchmarks.open_loop --save`: {len(talks)} conversations, {num_requests} requests, each conversation through
the server's own path without a model, with the recorded answers as what the model wrote. Reuse and oracle are shares of
prompt tokens, pooled, without the request that begins a conversation (nothing can be known of it); the last column
counts it too. The oracle renders the client's bodies, their volatile spans frozen, with transformers, and looks how
much of each prompt an earlier one of its conversation had, answer included; where layers cannot be cut (qwen3_5,
gemma3), up to the end of a message. A row passes when reuse >= oracle - {TOLERANCE} and, in the last rows, reuse >=
floor. No server reaches a floor that lies above the oracle: there the template itself writes in the next prompt what it
wrote before in another way.

{chr(10).join(lines)}
"""


if __name__ == "__main__":
    sys.exit(main())
