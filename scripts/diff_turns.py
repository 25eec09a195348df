"""Where two consecutive turns of a trace begin to differ: the first line and character, with the text before and after.

It reads trace files (LOG_ROOT/<date>/cache-session-*.log) and knows their line format, nothing of a running server.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from probing.options import share
from probing.report import Expectations, run
from probing.traces import events, trace_files

CONTEXT_CHARS = 60


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """One request of a trace; `text` is None where the prompt was too long for it."""

    time: str
    request_id: str
    text: str | None
    num_prompt_tokens: int
    num_cached_tokens: int


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Print the first difference between consecutive turns of trace files.",
        allow_abbrev=False,
        epilog="Exit code: 0, 1 where --min-common is missed, 2 where there is nothing to read.",
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="PATH", help="trace files, or folders of them")
    parser.add_argument(
        "--against",
        choices=["previous", "nearest"],
        default="previous",
        help="compare each turn with the one before it, or with the earlier one that it has most in common with "
        "(%(default)s)",
    )
    parser.add_argument("--field", default="prompt", metavar="NAME", help="the text to compare (%(default)s)")
    parser.add_argument(
        "--min-common",
        type=share,
        metavar="PERCENT",
        help="fail where two turns have less in common than this share of the earlier one's text",
    )
    return parser.parse_args()


def sessions(files: Sequence[Path], field: str) -> dict[str, list[TracedTurn]]:
    """The turns of each session in the order of time; older files of a session (.1.log, ...) belong to it."""
    found: dict[str, list[TracedTurn]] = {}
    for file in files:
        name = str(file.with_name(file.name.partition(".")[0]))
        found.setdefault(name, []).extend(read_turns(file, field))
    for turns in found.values():
        turns.sort(key=lambda turn: turn.time)
    return found


def read_turns(file: Path, field: str) -> Iterator[TracedTurn]:
    """The turns of one file. Raises ProbeError where it cannot be read."""
    for name, fields in events(file):
        if name == "turn":
            yield TracedTurn(
                time=str(fields.get("time", "")),
                request_id=str(fields.get("request_id", "?")),
                text=fields.get(field),
                num_prompt_tokens=int(fields.get("num_prompt_tokens") or 0),
                num_cached_tokens=int(fields.get("num_cached_tokens") or 0),
            )


def num_common(one: str, other: str) -> int:
    """Characters that both texts begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def earlier_turn(turns: Sequence[TracedTurn], position: int, against: str) -> TracedTurn:
    """The turn that the one at `position` is compared with."""
    text = turns[position].text
    if against == "previous" or text is None:
        return turns[position - 1]
    return max(reversed(turns[:position]), key=lambda turn: num_common(turn.text or "", text))


def describe(earlier: TracedTurn, turn: TracedTurn) -> float | None:
    """Print how the turn differs from the earlier one; returns the share of the earlier text that both begin with."""
    reuse = turn.num_cached_tokens / turn.num_prompt_tokens if turn.num_prompt_tokens else 0.0
    print(
        f"{turn.time} {turn.request_id}: {turn.num_cached_tokens:,} of {turn.num_prompt_tokens:,} reused, {reuse:.1%}"
    )
    if turn.text is None or earlier.text is None:
        print("  the text was too long for the trace")
        return None
    common = num_common(earlier.text, turn.text)
    part = common / len(earlier.text) if earlier.text else 1.0
    if common == len(earlier.text):
        print(f"  continues {earlier.request_id} ({common:,} characters)")
        return part
    before = turn.text[:common]
    line, column = before.count("\n") + 1, common - before.rfind("\n")
    print(
        f"  differs from {earlier.request_id} at line {line}, column {column} (character {common:,}, {part:.1%} of it)"
    )
    start = max(0, common - CONTEXT_CHARS)
    print(f"    both   {json.dumps(before[start:], ensure_ascii=False)}")
    for word, text in (("before", earlier.text), ("after ", turn.text)):
        print(f"    {word} {json.dumps(text[common : common + CONTEXT_CHARS], ensure_ascii=False)}")
    return part


def main() -> int:
    """Describe every turn of every session but the first."""
    options = parse_options()
    expectations = Expectations()
    for name, turns in sessions(trace_files(options.traces), options.field).items():
        print(f"=== {name}: {len(turns)} turns")
        for position in range(1, len(turns)):
            turn, earlier = turns[position], earlier_turn(turns, position, options.against)
            part = describe(earlier, turn)
            if options.min_common is not None and part is not None and part < options.min_common:
                expectations.expect(False, f"{turn.request_id} has at least {options.min_common:.1%} in common")
    return expectations.exit_code


if __name__ == "__main__":
    run(main)
