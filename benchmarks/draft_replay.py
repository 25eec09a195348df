"""How many tokens a step drafts from history would give, without a model: recorded sessions are answered again, and a
drafted token is right where it is the recorded one.

    python -m benchmarks.draft_replay [--chosen] [--save]

Each step takes as many drafted tokens as `best_width` says with the measured passes of the demo's model on two cores. The
parameters of the drafter are those that fit one half of the sessions best (`--chosen` replays that half and prints what
fits it now); the other half is the table. Exit status 1 where a floor is missed.
"""

import argparse
import sys
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path

from benchmarks.draft_sessions import Session, Step, halves, read_sessions
from benchmarks.figure import Bound, Figure
from benchmarks.recordings import shared_folder
from kvserve.core import DraftSource
from kvserve.drafting.kept_text import TextOwner
from kvserve.drafting.texts import DraftTexts
from kvserve.drafting.width import best_width, seconds_of_widths

RESULTS = Path(__file__).parent / "results" / "drafts.md"
SECONDS_BY_WIDTH: Mapping[int, float] = {1: 0.073, 2: 0.096, 4: 0.123, 8: 0.121, 16: 0.144, 64: 0.350}
"""Passes of the demo's model in float32 with OpenBLAS on two cores."""

FLOORS: Mapping[str, float] = {"Claude Code": 1.5, "PI": 1.7, "mini-SWE": 2.2, "OpenHands": 2.2}
MAX_DRAFT_TOKENS = 32
_SECONDS = seconds_of_widths(MAX_DRAFT_TOKENS + 1, SECONDS_BY_WIDTH)
MAX_BYTES = 64 << 20
CONTEXT_TOKENS = 100_000
SOURCES: tuple[DraftSource, ...] = ("conversation", "records")
HEADINGS = (
    *("client", "source", "sessions", "answer tokens", "steps", "tokens a step", "faster", "steps with a draft"),
    *("drafted", "accepted", "expected", "us a token", "ms a request"),
)


@dataclass(slots=True)
class Tally:
    """What drafts did for the sessions of a client. `drafted` and `accepted` are tokens that were tried, by source;
    `expected` those that the chances promised; `pass_seconds` what the passes would have taken."""

    client: str
    num_sessions: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: Counter[DraftSource] = field(default_factory=Counter)
    drafted: Counter[DraftSource] = field(default_factory=Counter)
    accepted: Counter[DraftSource] = field(default_factory=Counter)
    expected: defaultdict[DraftSource, float] = field(default_factory=lambda: defaultdict(float))
    pass_seconds: float = 0.0
    drafting_seconds: float = 0.0
    num_requests: int = 0
    reading_seconds: float = 0.0

    @property
    def tokens_a_step(self) -> float:
        return self.num_tokens / self.num_steps

    @property
    def times_faster(self) -> float:
        """Than one by one, the cost of drafting counted."""
        return self.num_tokens * SECONDS_BY_WIDTH[1] / (self.pass_seconds + self.drafting_seconds)


def replay(sessions: Sequence[Session]) -> dict[str, Tally]:
    """The tallies of the sessions' clients; each reader's sessions come one after another."""
    tallies: dict[str, Tally] = {}
    for session in sessions:
        tallies.setdefault(session.client, Tally(session.client))
    texts = {session.reader: DraftTexts(MAX_BYTES) for session in sessions}
    for session in sessions:
        tally = tallies[session.client]
        tally.num_sessions += 1
        owner = TextOwner(session.reader, session.name)
        for step in session.steps:
            _answer(texts[session.reader], owner, step, tally)
    return tallies


def _answer(texts: DraftTexts, owner: TextOwner, step: Step, tally: Tally) -> None:
    started = time.thread_time()
    drafter = texts.begin(owner, step.prompt)
    tally.reading_seconds += time.thread_time() - started
    tally.num_requests += 1
    answer, num_said = step.answer, 0
    started = time.thread_time()
    while num_said < len(answer):
        draft = drafter.propose(MAX_DRAFT_TOKENS)
        num_tried = best_width(draft.chances, SECONDS_BY_WIDTH) if draft is not None else 0
        num_right = 0
        if draft is not None and num_tried > 0:
            left = answer[num_said : num_said + num_tried]
            num_right = _num_equal(draft.tokens[:num_tried], left)
            _count(tally, draft.source, draft.chances[:num_tried], num_right)
        num_new = min(num_right + 1, len(answer) - num_said)
        drafter.follow(answer[num_said : num_said + num_new])
        num_said += num_new
        tally.num_steps += 1
        tally.pass_seconds += _SECONDS[num_tried]
    tally.drafting_seconds += time.thread_time() - started
    tally.num_tokens += len(answer)
    texts.end(drafter)


def _count(tally: Tally, source: DraftSource, chances: Sequence[float], num_right: int) -> None:
    tally.num_drafts[source] += 1
    tally.drafted[source] += len(chances)
    tally.accepted[source] += num_right
    tally.expected[source] += sum(accumulate(chances, mul))


def _num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    return next(
        (n for n, pair in enumerate(zip(tokens, others, strict=False)) if pair[0] != pair[1]),
        min(len(tokens), len(others)),
    )


def long_context(sessions: Sequence[Session]) -> Tally:
    """The last session, answered behind a hundred thousand tokens of the others."""
    tally = Tally(f"{CONTEXT_TOKENS // 1000}k tokens before", 1)
    before = array("i")
    for session in reversed(sessions[:-1]):
        before.extend(session.steps[-1].prompt)
        before.extend(session.steps[-1].answer)
        if len(before) >= CONTEXT_TOKENS:
            break
    texts = DraftTexts(MAX_BYTES)
    for step in sessions[-1].steps:
        _answer(texts, TextOwner("reader"), Step(before[:CONTEXT_TOKENS] + step.prompt, step.answer), tally)
    return tally


def table(tallies: Iterable[Tally]) -> Iterator[str]:
    """The lines of a Markdown table: a row for a client, and one for each source of its drafts."""
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|---" * len(HEADINGS) + "|"
    for tally in tallies:
        whole = (
            *(str(tally.num_sessions), f"{tally.num_tokens:,}", f"{tally.num_steps:,}", f"{tally.tokens_a_step:.2f}"),
            f"{tally.times_faster:.2f} x",
        )
        costs = (
            f"{1e6 * tally.drafting_seconds / tally.num_tokens:.0f}",
            f"{1e3 * tally.reading_seconds / tally.num_requests:.1f}",
        )
        yield _line(tally.client, "all", *whole, *_cells(tally, SOURCES), *costs)
        for source in SOURCES:
            if tally.num_drafts[source]:
                yield _line("", source, *[""] * len(whole), *_cells(tally, [source]), "", "")


def _cells(tally: Tally, sources: Sequence[DraftSource]) -> tuple[str, ...]:
    share = sum(tally.num_drafts[each] for each in sources) / tally.num_steps
    drafted, accepted = (sum(of[each] for each in sources) for of in (tally.drafted, tally.accepted))
    return f"{share:.0%}", f"{drafted:,}", f"{accepted:,}", f"{sum(tally.expected[each] for each in sources):,.0f}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
