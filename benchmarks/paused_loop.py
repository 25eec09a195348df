"""Recorded sessions of PI through the real server over HTTP, left alone between two requests as a person leaves it.

    python -m benchmarks.paused_loop [--shared FOLDER] [--family NAME] [--save]

Where a template drops old thinking, what was behind it is in no earlier prompt, and the most that can be reused without
a pause lies below the floor (`open_loop`). An idle engine computes it while the user thinks, as a server does by
default (`WARM_NEXT_TURN`). Cached tokens are those that were not computed on the request's own path. The control is the
same server, told to compute nothing ahead. Exit code 1 where a floor is missed.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figure import Bound, Figure
from benchmarks.kept import KeptRows
from benchmarks.led_server import LedServer, led_server
from benchmarks.open_loop import FLOORS
from benchmarks.real_loop import answered, tiny_model
from benchmarks.recordings import Conversation, read_recordings, shared_folder
from benchmarks.reuse_oracle import RECORDED_FAMILIES

KIND, CLIENTS, FLOOR = FLOORS[0]
HEADINGS = ("client", "family", "requests", "prompt tokens", "with pauses", "computed ahead, used", "without", "floor")


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

    @property
    def reuse(self) -> float:
        """Cached : prompt tokens, with pauses."""
        return self.num_paused_tokens / max(1, self.num_prompt_tokens)


def play(talk: Conversation, server: LedServer) -> tuple[int, int]:
    """Prompt and cached tokens of its requests but the first one."""
    server.forget()
    told = [server.ask(answered(request), None) for request in talk.requests]
    return sum(each.num_prompt_tokens for each in told[1:]), sum(each.num_cached_tokens for each in told[1:])


def measure(talk: Conversation, family: str) -> Row:
    """One session with pauses, and once more without."""
    with tiny_model(family) as folder:
        with led_server(folder, folder.parent / "paused", warms=True) as server:
            num_prompt_tokens, num_paused_tokens = play(talk, server)
            warming = server.totals()["warming"]
        with led_server(folder, folder.parent / "hurried") as server:
            num_same_tokens, num_hurried_tokens = play(talk, server)
    assert num_prompt_tokens == num_same_tokens, "warming changed a prompt"
    return Row(
        talk.client,
        talk.name,
        family,
        len(talk.requests) - 1,
        num_prompt_tokens,
        num_paused_tokens,
        num_hurried_tokens,
        warming["num_warmed_tokens"],
        warming["num_used_tokens"],
    )


def measure_all(shared: Path, families: Sequence[str]) -> Iterator[Row]:
    """Every recorded session of PI on every family."""
    for talk in read_recordings(shared):
        if talk.client in CLIENTS:
            yield from (measure(talk, family) for family in families)


# --- figures and tables ----------------------------------------------------------------------------------------------


def run(_num_rounds: int) -> list[Figure]:
    """Reuse of PI per family, with pauses. Nothing is timed."""
    shared = shared_folder()
    if shared is None:
        print("paused_loop: there are no recorded conversations here, nothing was measured", file=sys.stderr)
        return []
    rows = list(measure_all(shared, RECORDED_FAMILIES))
    print("\n".join(table(rows)), flush=True)
    return [_figure(family, [row for row in rows if row.family == family]) for family in RECORDED_FAMILIES]


def _figure(family: str, rows: Sequence[Row]) -> Figure:
    reuse, hurried = _shares(rows)
    return Figure(
        "paused_loop",
        f"reuse of {KIND} with pauses, {family}",
        "",
        (reuse,),
        Bound("at least", FLOOR),
        f"without pauses {hurried:.4f}; {sum(row.num_requests for row in rows)} requests",
    )


def _shares(rows: Sequence[Row]) -> tuple[float, float]:
    num_prompt_tokens = max(1, sum(row.num_prompt_tokens for row in rows))
    paused, hurried = (sum(row.num_paused_tokens for row in rows), sum(row.num_hurried_tokens for row in rows))
    return paused / num_prompt_tokens, hurried / num_prompt_tokens


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Each session on each family, then each family: the lines of a Markdown table."""
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|---" * len(HEADINGS) + "|"
    for row in rows:
        yield _line(row.client, row.family, [row])
    for family in dict.fromkeys(row.family for row in rows):
        yield _line(f"**{KIND}**", family, [row for row in rows if row.family == family], FLOOR)


def _line(name: str, family: str, rows: Sequence[Row], floor: float | None = None) -> str:
    paused, hurried = _shares(rows)
    verdict = "" if floor is None else f"{floor:g}, {'pass' if paused >= floor else 'MISSED'}"
    cells = (
        name,
        family,
        str(sum(row.num_requests for row in rows)),
        f"{sum(row.num_prompt_tokens for row in rows):,}",
        f"{paused:.4f}",
        f"{sum(row.num_warmed_tokens for row in rows):,}, {sum(row.num_used_tokens for row in rows):,}",
        f"{hurried:.4f}",
        verdict,
    )
    return f"| {' | '.join(cells)} |"


def report(rows: Sequence[Row]) -> str:
    """The file that keeps the table."""
    return f"""# Reuse of PI's recorded sessions with pauses between requests

`python -m benchmarks.paused_loop --save`: each session through the real server over HTTP, on a tiny real model that
writes the recorded answers, default settings; before every request the server is idle until it has computed what it
computes ahead (`WARM_NEXT_TURN`). Reuse is the share of prompt tokens that were not computed on the request's own path,
without the request that begins the session; beside it the same without computing ahead, which is what
[open_loop.md](open_loop.md) bounds by its oracle. Without pauses no server reaches a floor above that oracle.

{chr(10).join(table(rows))}
"""


KEPT = KeptRows("paused_loop", Row, report)


def main() -> int:
    """Print the table; returns 1 when a floor is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.paused_loop", description="Reuse of PI's sessions with pauses.")
    parser.add_argument("--shared", type=Path, default=shared_folder(), help="folder with recordings")
    parser.add_argument("--family", action="append", choices=RECORDED_FAMILIES, help="only this family")
    parser.add_argument("--save", action="store_true", help="keep every row in results; the table is that of all rows")
    arguments = parser.parse_args()
    if arguments.shared is None or not arguments.shared.is_dir():
        parser.exit(2, "There are no recordings: give --shared FOLDER.\n")
    rows = []
    for row in measure_all(arguments.shared, arguments.family or RECORDED_FAMILIES):
        rows.append(row)
        if arguments.save:
            KEPT.put([row])
    lines = list(table(KEPT.read() if arguments.save else rows))
    print("\n".join(lines))
    return 1 if any("MISSED" in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
