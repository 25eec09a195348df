"""Recorded sessions in closed loop: what the real server answers over HTTP is what its client gives back to it.

    python -m benchmarks.closed_loop [--shared FOLDER] [--family NAME] [--session NAME] [--requests]
                                     [--save] [--missing] [--seconds N]

The sessions of `/v1/messages` and `/v1/responses`. The server writes the recorded answers and streams them; every later
request has them as they came, with the server's own ids and signatures (`echoes.py`). A client that left before its
answer was over leaves here too. Before each request comes a count of its tokens, where its API has one, and a small
question under the same session. The oracle is that of the session as it was recorded (`frozen.py`). Exit code 1 where
reuse is below the oracle's by more than the tolerance, or below the session's floor.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.anthropic_bodies import joined_blocks
from benchmarks.echoes import Echoes
from benchmarks.figure import Bound, Figure
from benchmarks.frozen import FrozenOracle, Possible
from benchmarks.kept import WHOLE, KeptRows, Part
from benchmarks.led_server import LedServer, led_server
from benchmarks.model_free import Told
from benchmarks.open_loop import TOLERANCE
from benchmarks.real_loop import tiny_model
from benchmarks.recordings import (
    MESSAGES,
    Conversation,
    Reply,
    Request,
    read_recordings,
    shared_folder,
    side_request,
)

SESSIONS = (
    "pi-0.87-anthropic",
    "claude-code-2.1.119",
    "claude-code-2.1.330",
    "claude-code-2.1.330-toolsearch",
    "codex",
)
FLOORS = {"claude-code-2.1.330-toolsearch": 0.98}
"""The least share of prompt tokens that a session must reuse, whatever the oracle says."""

FAMILIES = ("qwen3", "qwen3_5")
HEADINGS = ("session", "family", "requests", "prompt tokens", "reuse", "oracle", "floor", "result")

UNHEARD = " And so on." * 100
"""What the model still writes when its client leaves."""

type Wire = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A session on one family without its first request: what the server said of it, and what was possible."""

    client: str
    name: str
    family: str
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_possible_prompt_tokens: int
    num_possible_cached_tokens: int

    @property
    def reuse(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    @property
    def oracle(self) -> float:
        return self.num_possible_cached_tokens / max(1, self.num_possible_prompt_tokens)

    @property
    def is_at_oracle(self) -> bool:
        return self.reuse >= self.oracle - TOLERANCE

    @property
    def floor(self) -> float | None:
        return FLOORS.get(self.name)

    @property
    def misses(self) -> tuple[str, ...]:
        """Which of its bounds it misses."""
        bounds = {"oracle": self.is_at_oracle, "floor": self.floor is None or self.reuse >= self.floor}
        return tuple(name for name, is_kept in bounds.items() if not is_kept)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a session as it was sent, and what the server said of it."""

    body: Wire
    told: Told
    possible: Possible


# --- one session -----------------------------------------------------------------------------------------------------


def play(
    talk: Conversation,
    server: LedServer,
    oracle: FrozenOracle,
    change: Callable[[dict[str, Any], int], dict[str, Any]] = lambda body, number: body,
) -> list[Asked]:
    """A session with a server that knows nothing. `change` is what the client does to a body before it sends it."""
    server.forget()
    oracle.forget()
    echoes, asked = Echoes(talk), list[Asked]()
    for number, recorded in enumerate(talk.requests):
        request = replace(recorded, body=change(echoes.body(number), number))
        server.ask(side_request(recorded, number), None)
        counted = server.count(request) if request.path == MESSAGES else None
        before = server.totals()
        echoes.answered(number, answered(server, request, echoes.said(number)))
        after = server.totals()
        told = Told(*(after[name] - before[name] for name in ("num_prompt_tokens", "num_cached_tokens")), None)
        assert counted in (None, told.num_prompt_tokens), "a count was not the prompt's"
        asked.append(Asked(request.body, told, oracle.judge(recorded)))
    return asked


def answered(server: LedServer, request: Request, said: Reply | None) -> list[dict[str, Any]]:
    """Blocks or items of the answer as the client has them; of one that it leaves, what it has by then."""
    parts = joined_blocks if request.path == MESSAGES else _items
    if request.reply is not None:
        return parts(server.stream(request, lambda event: False))
    kept = said or Reply("I should wait.")
    unheard = replace(request, reply=replace(kept, content=kept.content + UNHEARD))
    heard = list[str]()

    def is_enough(event: Wire) -> bool:
        """Whether more was said than the client gave back in the recording."""
        heard.append(_text_in(event))
        return len("".join(heard)) > len(kept.content)

    return parts(server.stream(unheard, is_enough))


def _text_in(event: Wire) -> str:
    """The piece of the answer's words that an event brings."""
    if event["type"] == "response.output_text.delta":
        return str(event["delta"])
    is_text = event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta"
    return str(event["delta"]["text"]) if is_text else ""


def _items(events: Sequence[Wire]) -> list[dict[str, Any]]:
    """The items of a response that are over."""
    return [dict(event["item"]) for event in events if event["type"] == "response.output_item.done"]


# --- all of them -----------------------------------------------------------------------------------------------------


def run(_num_rounds: int) -> list[Figure]:
    """Reuse - oracle per family at the session that stands worst, and the floors. Nothing is timed."""
    shared = shared_folder()
    if shared is None:
        print("closed_loop: there are no recorded conversations here, nothing was compared", file=sys.stderr)
        return []
    rows = [row for row, _ in play_all(sessions(shared), FAMILIES)]
    print("\n".join(table(rows)), flush=True)
    worst = [_figure(family, [row for row in rows if row.family == family]) for family in FAMILIES]
    return [*worst, *(_floor(row, row.floor) for row in rows if row.floor is not None)]


def _floor(row: Row, floor: float) -> Figure:
    about = f"oracle {row.oracle:.4f}; {row.num_requests} requests, {row.num_prompt_tokens:,} prompt tokens"
    return Figure(
        "closed_loop", f"reuse of {row.name}, {row.family}", "", (row.reuse,), Bound("at least", floor), about
    )


def _figure(family: str, rows: Sequence[Row]) -> Figure:
    worst = min(rows, key=lambda row: row.reuse - row.oracle)
    return Figure(
        "closed_loop",
        f"reuse - oracle in closed loop, {family}, worst session",
        "",
        (worst.reuse - worst.oracle,),
        Bound("at least", -TOLERANCE),
        f"{worst.name}: {worst.reuse:.4f} : {worst.oracle:.4f}",
    )


def sessions(shared: Path, wanted: Iterable[str] = SESSIONS) -> list[Conversation]:
    """The recorded sessions of these names."""
    return [talk for talk in read_recordings(shared) if talk.name in wanted]


def row_of(talk: Conversation, family: str, asked: Sequence[Asked]) -> Row:
    """The sums of its requests but the first."""
    later = asked[1:]
    return Row(
        talk.client,
        talk.name,
        family,
        len(later),
        sum(each.told.num_prompt_tokens for each in later),
        sum(each.told.num_cached_tokens for each in later),
        sum(each.possible.num_prompt_tokens for each in later),
        sum(each.possible.num_reusable_tokens for each in later),
    )


def play_all(
    talks: Sequence[Conversation], families: Sequence[str], part: Part = WHOLE
) -> Iterator[tuple[Row, list[Asked]]]:
    """The sessions on every family, as far as they belong to the part."""
    for family in families:
        if part.is_over() or not (wanted := part.of(talks, family)):
            continue
        with tiny_model(family) as folder, led_server(folder, folder.parent) as server:
            oracle = FrozenOracle(family, folder)
            for talk in wanted:
                if part.is_over():
                    return
                asked = play(talk, server, oracle)
                yield row_of(talk, family, asked), asked


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Each session on each family: reuse, oracle, floor and whether both hold, as the lines of a Markdown table."""
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|---" * len(HEADINGS) + "|"
    for row in rows:
        verdict = f"MISSED ({', '.join(row.misses)})" if row.misses else "pass"
        shares = f"{row.reuse:.4f} | {row.oracle:.4f} | {'' if row.floor is None else f'{row.floor:g}'}"
        yield f"| {row.name} | {row.family} | {row.num_requests} | {row.num_prompt_tokens:,} | {shares} | {verdict} |"


def requests(row: Row, asked: Sequence[Asked]) -> Iterator[str]:
    """Every request of a session with what was possible."""
    for number, each in enumerate(asked, 1):
        told, possible = each.told, each.possible
        yield (
            f"{row.name} {row.family} {number}: {told.num_cached_tokens} of {told.num_prompt_tokens}, "
            f"possible {possible.num_reusable_tokens} of {possible.num_prompt_tokens}"
        )


def report(rows: Sequence[Row]) -> str:
    """The file that keeps the table."""
    return f"""# Reuse of recorded sessions in closed loop

`python -m benchmarks.closed_loop --save`: each session through the real server over HTTP, on a tiny real model that
writes the recorded answers and streams them; every later request has those answers as the server gave them, with its
own ids and signatures, and a client that left in the recording leaves here too. Before each request come a count of its
tokens (of `/v1/messages`), which must be the prompt's, and a small question under the same session id. Shares are of
prompt tokens, without the request that begins the session and without the small questions; the oracle is that of
[open_loop.md](open_loop.md). A row passes when reuse >= oracle - {TOLERANCE} and, where there is one, reuse >= floor.

{chr(10).join(table(rows))}
"""


KEPT = KeptRows("closed_loop", Row, report)


def main() -> int:
    """Print the table; returns 1 when a session is below its oracle or its floor."""
    parser = argparse.ArgumentParser(prog="benchmarks.closed_loop", description="Reuse of sessions in closed loop.")
    parser.add_argument("--shared", type=Path, default=shared_folder(), help="folder with recordings")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this family")
    parser.add_argument("--session", action="append", choices=SESSIONS, help="only this session")
    parser.add_argument("--requests", action="store_true", help="every request with what was possible")
    parser.add_argument("--save", action="store_true", help="keep every row in results; the table is that of all rows")
    parser.add_argument("--missing", action="store_true", help="only sessions whose row is not kept yet")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no session after that time")
    arguments = parser.parse_args()
    if arguments.shared is None or not arguments.shared.is_dir():
        parser.exit(2, "There are no recordings: give --shared FOLDER.\n")
    talks = sessions(arguments.shared, arguments.session or SESSIONS)
    part = KEPT.part(is_missing=arguments.missing, seconds=arguments.seconds)
    rows = []
    for row, asked in play_all(talks, arguments.family or FAMILIES, part):
        rows.append(row)
        if arguments.save:
            KEPT.put([row])
        if arguments.requests:
            print("\n".join(requests(row, asked)), flush=True)
    rows = KEPT.read() if arguments.save else rows
    print("\n".join(table(rows)))
    return 1 if any(row.misses for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
