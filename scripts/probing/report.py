"""What a script prints, and whether its expectations held. It knows tables and verdicts, not what was measured."""

import os
import sys
from collections.abc import Callable

from probing.wire import COUNTERS, ProbeError, Reply

BROKEN_PIPE = 141
"""The exit code of a program that ended because nobody read what it wrote, as shells give it."""

type Counters = dict[str, int | None]


class Expectations:
    """Prints each expectation with its verdict and remembers the failures."""

    def __init__(self) -> None:
        self.num_failed = 0

    def expect(self, holds: bool, sentence: str) -> None:
        """Print one line; a failed one makes the exit code 1."""
        self.num_failed += not holds
        print(f"{'ok  ' if holds else 'FAIL'}  {sentence}")

    @property
    def exit_code(self) -> int:
        return 1 if self.num_failed else 0


class Table:
    """A table whose rows appear as they are known: the last column is as wide as it wants, the others are right-aligned
    below their headings."""

    _MIN_WIDTH = 7

    def __init__(self, *header: str) -> None:
        self._widths = [max(len(heading), self._MIN_WIDTH) for heading in header]
        self.add(*header)

    def add(self, *cells: str) -> None:
        """Print one row, as many cells as headings."""
        aligned = [cell.rjust(width) for cell, width in zip(cells[:-1], self._widths, strict=False)]
        print("  ".join([*aligned, cells[-1]]).rstrip(), flush=True)


REPLY_HEADER = ("prompt", "cached", "reuse", "answer", "ttft")


def reply_cells(reply: Reply) -> tuple[str, ...]:
    """The cells of `REPLY_HEADER` for one answer: tokens of prompt, cached part and answer, seconds to the first."""
    ttft = "-" if reply.ttft_seconds is None else f"{reply.ttft_seconds:.2f} s"
    counts = (f"{reply.num_prompt_tokens:,}", f"{reply.num_cached_tokens:,}", f"{reply.reuse:.1%}")
    return (*counts, f"{reply.num_completion_tokens:,}", ttft)


def expect_unmoved_counters(expectations: Expectations, since: Counters, until: Counters, *, when: str) -> None:
    """Expect that no counter moved; one that the server does not offer is said, not judged."""
    for name in COUNTERS:
        first, last = since.get(name), until.get(name)
        if first is None or last is None:
            print(f"--    {name}: not offered by this server")
        else:
            expectations.expect(last == first, f"{name} did not move {when} ({last - first:+d})")


def run(main: Callable[[], int]) -> None:
    """End the process with the script's exit code; 2 where it could not be run, `BROKEN_PIPE` where its reader left."""
    try:
        code = main()
        sys.stdout.flush()
    except ProbeError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except BrokenPipeError:  # whoever reads this has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    sys.exit(code)
