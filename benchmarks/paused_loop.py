"""Recorded sessions through the real server over HTTP, left alone between two requests as a person leaves it.

    python -m benchmarks.paused_loop [--shared FOLDER] [--family NAME] [--session NAME] [--requests]
                                     [--save] [--missing] [--seconds N]

PI over both of its protocols and Claude Code, this one also without thinking in its answers.
Where a template drops old thinking, what was behind it is in no earlier prompt, and the most that can be reused without
a pause lies below the floor (`open_loop`). An idle engine computes it while the user thinks, as a server does by
default (`WARM_NEXT_TURN`). Cached tokens are those that were not computed on the request's own path. The control is the
same server, told to compute nothing ahead. Exit code 1 where a floor is missed.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figure import Bound, Figure
from benchmarks.kept import WHOLE, KeptRows, Part
from benchmarks.led_server import LedServer, led_server
from benchmarks.model_free import Told
from benchmarks.open_loop import FLOORS
from benchmarks.real_loop import answered, tiny_model
from benchmarks.recordings import Conversation, read_recordings, shared_folder, unthinking


@dataclass(frozen=True, slots=True)
class Kind:
    """Sessions of the same kind of client, and the least share of prompt tokens that each of them, and all together,
    must reuse with pauses, by the families that they are played on."""

    label: str
    sessions: tuple[str, ...]
    floors: Mapping[str, float]


BEST_OF_OTHERS = {"qwen3": 0.992, "qwen3_5": 0.989}
"""What the best server measured beside this one reuses of recorded Claude Code, dense and hybrid."""

CLAUDE_CODE = ("claude-code-2.1.119", "claude-code-2.1.330")
PI, PI_CLIENTS, PI_FLOOR = FLOORS[0]
KINDS = (
    Kind(PI, PI_CLIENTS, dict.fromkeys(BEST_OF_OTHERS, PI_FLOOR)),
    Kind("PI over Messages", ("pi-0.87-anthropic",), dict.fromkeys(BEST_OF_OTHERS, PI_FLOOR)),
    Kind("Claude Code", CLAUDE_CODE, BEST_OF_OTHERS),
    Kind("Claude Code without thinking", tuple(f"{name} without thinking" for name in CLAUDE_CODE), BEST_OF_OTHERS),
)
SESSIONS = tuple(name for kind in KINDS for name in kind.sessions)
HEADINGS = ("session", "family", "requests", "prompt tokens", "with pauses", "computed ahead, used", "without", "floor")


@dataclass(frozen=True, slots=True)
class Row:
    """A session on one family without its first request: prompt tokens, and how many of them were cached with pauses
    and without; with them, tokens that were computed ahead in all and that a request used."""

    client: str
    name: str
    family: str
    num_requests: int
    num_prompt_tokens: int
    num_paused_tokens: int
    num_hurried_tokens: int
    num_warmed_tokens: int
    num_used_tokens: int


@dataclass(frozen=True, slots=True)
class Played:
    """A session on one family, with pauses and without: what the server said of each request."""

    row: Row
    paused: tuple[Told, ...]
    hurried: tuple[Told, ...]


def play(talk: Conversation, server: LedServer) -> tuple[Told, ...]:
    """What a server that knows nothing says of each request."""
    server.forget()
    return tuple(server.ask(answered(request), None) for request in talk.requests)


def measure(talk: Conversation, family: str) -> Played:
    """One session with pauses, and once more without."""
    with tiny_model(family) as folder:
        with led_server(folder, folder.parent / "paused", warms=True) as server:
            paused = play(talk, server)
            warming = server.totals()["warming"]
        with led_server(folder, folder.parent / "hurried") as server:
            hurried = play(talk, server)
    lengths = [told.num_prompt_tokens for told in paused]
    assert lengths == [told.num_prompt_tokens for told in hurried], "warming changed a prompt"
    row = Row(
        talk.client,
        talk.name,
        family,
        len(talk.requests) - 1,
        sum(lengths[1:]),
        sum(told.num_cached_tokens for told in paused[1:]),
        sum(told.num_cached_tokens for told in hurried[1:]),
        warming["num_warmed_tokens"],
        warming["num_used_tokens"],
    )
    return Played(row, paused, hurried)


def sessions(shared: Path, wanted: Iterable[str] = SESSIONS) -> Iterator[Conversation]:
    """The recorded sessions of these names; one of Claude Code is there with its thinking and without."""
    for talk in read_recordings(shared):
        found = (talk, unthinking(talk)) if talk.client in CLAUDE_CODE else (talk,)
        yield from (each for each in found if each.name in wanted)


def measure_all(
    shared: Path, families: Sequence[str], wanted: Iterable[str] = SESSIONS, part: Part = WHOLE
) -> Iterator[Played]:
    """The sessions on those of the families that their kind is judged on, as far as they belong to the part."""
    played_on = {name: kind.floors for kind in KINDS for name in kind.sessions}
    talks = list(sessions(shared, tuple(wanted)))
    for family in families:
        for talk in part.of(talks, family):
            if part.is_over():
                return
            if family in played_on[talk.name]:
                yield measure(talk, family)


# --- figures and tables ----------------------------------------------------------------------------------------------


def run(_num_rounds: int) -> list[Figure]:
    """Reuse per kind and family, with pauses. Nothing is timed."""
    shared = shared_folder()
    if shared is None:
        print("paused_loop: there are no recorded conversations here, nothing was measured", file=sys.stderr)
        return []
    rows = [played.row for played in measure_all(shared, tuple(BEST_OF_OTHERS))]
    print("\n".join(table(rows)), flush=True)
    return [_figure(kind, family, some) for kind, family, some in _by_kind(rows)]


def _figure(kind: Kind, family: str, rows: Sequence[Row]) -> Figure:
    reuse, hurried = _shares(rows)
    worst = min(_shares([row])[0] for row in rows)
    return Figure(
        "paused_loop",
        f"reuse of the worst session of {kind.label} with pauses, {family}",
        "",
        (worst,),
        Bound("at least", kind.floors[family]),
        f"all together {reuse:.4f}, without pauses {hurried:.4f}; {sum(row.num_requests for row in rows)} requests",
    )


def _by_kind(rows: Sequence[Row]) -> Iterator[tuple[Kind, str, list[Row]]]:
    """Each kind on each family, as far as there are rows."""
    for kind in KINDS:
        for family in kind.floors:
            if some := [row for row in rows if row.name in kind.sessions and row.family == family]:
                yield kind, family, some


def _shares(rows: Sequence[Row]) -> tuple[float, float]:
    num_prompt_tokens = max(1, sum(row.num_prompt_tokens for row in rows))
    paused, hurried = (sum(row.num_paused_tokens for row in rows), sum(row.num_hurried_tokens for row in rows))
    return paused / num_prompt_tokens, hurried / num_prompt_tokens


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Each session on each family, then each kind: the lines of a Markdown table."""
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|---" * len(HEADINGS) + "|"
    for kind, family, some in _by_kind(rows):
        yield from (_line(row.name, family, [row], kind.floors[family]) for row in some)
    for kind, family, some in _by_kind(rows):
        if len(kind.sessions) > 1:
            yield _line(f"**{kind.label}**", family, some, kind.floors[family])


def _line(name: str, family: str, rows: Sequence[Row], floor: float) -> str:
    paused, hurried = _shares(rows)
    cells = (
        name,
        family,
        str(sum(row.num_requests for row in rows)),
        f"{sum(row.num_prompt_tokens for row in rows):,}",
        f"{paused:.4f}",
        f"{sum(row.num_warmed_tokens for row in rows):,}, {sum(row.num_used_tokens for row in rows):,}",
        f"{hurried:.4f}",
        f"{floor:g}, {'pass' if paused >= floor else 'MISSED'}",
    )
    return f"| {' | '.join(cells)} |"


def requests(played: Played) -> Iterator[str]:
    """Every request of a session: what was computed on its own path, with pauses and without."""
    row = played.row
    for number, (paused, hurried) in enumerate(zip(played.paused, played.hurried, strict=True), 1):
        yield f"{row.name} {row.family} {number}: {_computed(paused)} computed, {_computed(hurried)} without pauses"


def _computed(told: Told) -> str:
    return f"{told.num_prompt_tokens - told.num_cached_tokens} of {told.num_prompt_tokens}"


def report(rows: Sequence[Row]) -> str:
    """The file that keeps the table."""
    return f"""# Reuse of recorded sessions with pauses between requests

`python -m benchmarks.paused_loop --save`: each session through the real server over HTTP, on a tiny real model that
writes the recorded answers, default settings; before every request the server is idle until it has computed what it
computes ahead (`WARM_NEXT_TURN`). Reuse is the share of prompt tokens that were not computed on the request's own path,
without the request that begins the session; beside it the same without computing ahead, which is what
[open_loop.md](open_loop.md) bounds by its oracle. Without pauses no server reaches a floor above that oracle.

The floors of Claude Code are what the best server measured beside this one reuses of it, dense and hybrid. That was
measured without thinking in the answers, so the sessions are played without any too: then there is nothing in an answer
that a dense model's template takes away again.

{chr(10).join(table(rows))}
"""


KEPT = KeptRows("paused_loop", Row, report)


def main() -> int:
    """Print the table; returns 1 when a floor is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.paused_loop", description="Reuse of sessions with pauses.")
    parser.add_argument("--shared", type=Path, default=shared_folder(), help="folder with recordings")
    parser.add_argument("--family", action="append", choices=tuple(BEST_OF_OTHERS), help="only this family")
    parser.add_argument("--session", action="append", choices=SESSIONS, help="only this session")
    parser.add_argument("--requests", action="store_true", help="every request with what was computed of it")
    parser.add_argument("--save", action="store_true", help="keep every row in results; the table is that of all rows")
    parser.add_argument("--missing", action="store_true", help="only sessions whose row is not kept yet")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no session after that time")
    arguments = parser.parse_args()
    if arguments.shared is None or not arguments.shared.is_dir():
        parser.exit(2, "There are no recordings: give --shared FOLDER.\n")
    rows = []
    part = KEPT.part(is_missing=arguments.missing, seconds=arguments.seconds)
    families = arguments.family or tuple(BEST_OF_OTHERS)
    for played in measure_all(arguments.shared, families, arguments.session or SESSIONS, part):
        rows.append(played.row)
        if arguments.save:
            KEPT.put(rows[-1:])
        if arguments.requests:
            print("\n".join(requests(played)), flush=True)
    lines = list(table(KEPT.read() if arguments.save else rows))
    print("\n".join(lines))
    return 1 if any("MISSED" in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
