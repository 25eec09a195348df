"""How many tokens a step drafts from history would give, without a model: recorded sessions are answered again, and a
drafted token is right where it is the recorded one.

    python -m benchmarks.draft_replay [--save]

Each step takes as many drafted tokens as the engine would with the measured passes of the demo's model on two cores.
The parameters of the drafter are those that fit one half of the sessions (`draft_fit.py`); the other half is the table.
Exit status 1 where a floor is missed.
"""

import argparse
import sys
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from operator import mul
from pathlib import Path

from benchmarks.draft_sessions import VOCABULARY, Session, Step, halves, read_sessions
from benchmarks.figure import Bound, Figure
from benchmarks.recordings import shared_folder
from kvserve.core import DraftSource
from kvserve.drafting.kept_text import TextOwner
from kvserve.drafting.texts import DraftTexts
from kvserve.engine.pass_costs import MAX_PASS_TOKENS, PassCosts

RESULTS = Path(__file__).parent / "results" / "drafts.md"
SECONDS_BY_WIDTH: Mapping[int, float] = {1: 0.073, 2: 0.096, 4: 0.123, 8: 0.121, 16: 0.144}
"""Passes of the demo's model in float32 with OpenBLAS on two cores."""

FLOORS: Mapping[str, float] = {"Claude Code": 1.5, "PI": 1.7, "mini-SWE": 2.2, "OpenHands": 2.2}
MAX_MICROSECONDS = 50.0
"""A token, follow, propose and width together, at a hundred thousand tokens of context."""

MAX_BYTES = 64 << 20
CONTEXT_TOKENS = 100_000
SOURCES: tuple[DraftSource, ...] = ("conversation", "records")
HEADINGS = (
    *("client", "source", "sessions", "answer tokens", "steps", "tokens a step", "faster", "steps with a draft"),
    *("drafted", "accepted", "expected", "us a token", "ms a request"),
)


_LENGTH = 1
"""Passes are taken to cost the same at any length of the row."""


def _measured_costs() -> PassCosts:
    costs = PassCosts()
    for width, seconds in SECONDS_BY_WIDTH.items():
        costs.note(width, _LENGTH, seconds)
    return costs


_COSTS = _measured_costs()


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
        draft = drafter.propose(MAX_PASS_TOKENS - 1)
        num_tried = _COSTS.num_worth(draft.chances, _LENGTH, 0, goes_back=False) if draft is not None else 0
        num_right = 0
        if draft is not None and num_tried > 0:
            left = answer[num_said : num_said + num_tried]
            num_right = _num_equal(draft.tokens[:num_tried], left)
            _count(tally, draft.source, draft.chances[:num_tried], num_right)
        num_new = min(num_right + 1, len(answer) - num_said)
        drafter.follow(answer[num_said : num_said + num_new])
        num_said += num_new
        tally.num_steps += 1
        tally.pass_seconds += _seconds(num_tried + 1)
    tally.drafting_seconds += time.thread_time() - started
    tally.num_tokens += len(answer)
    texts.end(drafter)


def _seconds(width: int) -> float:
    return _COSTS.seconds(width, _LENGTH) or 0.0


def _count(tally: Tally, source: DraftSource, chances: Sequence[float], num_right: int) -> None:
    tally.num_drafts[source] += 1
    tally.drafted[source] += len(chances)
    tally.accepted[source] += num_right
    tally.expected[source] += sum(accumulate(chances, mul))


def _num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(tokens, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def long_context(sessions: Sequence[Session]) -> Tally:
    """PI's first session, answered behind a hundred thousand tokens of other clients."""
    tally = Tally(f"PI behind {CONTEXT_TOKENS // 1000}k tokens", 1)
    before = array("i")
    for session in sessions:
        if session.client != "PI" and len(before) < CONTEXT_TOKENS:
            before.extend(session.steps[-1].prompt)
    texts = DraftTexts(MAX_BYTES)
    for step in next(each.steps for each in sessions if each.client == "PI"):
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


def run(_num_rounds: int) -> list[Figure]:
    """Tokens a step of each client that has a floor, on the sessions that chose nothing, and what drafting costs."""
    tallies, far = _measured()
    if not tallies:
        print("drafts: there are no recorded conversations here, nothing was compared", file=sys.stderr)
        return []
    print("\n".join(table([*tallies.values(), far])), flush=True)
    return [*(_figure(tallies[client], floor) for client, floor in FLOORS.items()), _cost(far)]


def _measured() -> tuple[dict[str, Tally], Tally]:
    shared = shared_folder()
    _, reported = halves(list(read_sessions(shared))) if shared is not None else ((), [])
    return replay(reported), long_context(reported) if reported else Tally("")


def _figure(tally: Tally, floor: float) -> Figure:
    about = f"{tally.num_tokens:,} tokens in {tally.num_steps:,} steps, {tally.times_faster:.2f} x"
    bound = Bound("at least", floor)
    return Figure("drafts", f"tokens a step, {tally.client}", "", (tally.tokens_a_step,), bound, about)


def _cost(tally: Tally) -> Figure:
    microseconds = 1e6 * tally.drafting_seconds / tally.num_tokens
    bound = Bound("at most", MAX_MICROSECONDS)
    return Figure("drafts", f"drafting, {tally.client}", "us a token", (microseconds,), bound, "")


def report(rows: Sequence[str]) -> str:
    """The file that keeps the table."""
    milliseconds = ", ".join(f"{1e3 * each:.0f}" for each in SECONDS_BY_WIDTH.values())
    return f"""# Drafts from history, replayed without a model

`python -m benchmarks.draft_replay --save`: recorded sessions on the tokens of {VOCABULARY}. Each answer is given
again and a drafted token is accepted where it is the recorded one, as by a model that writes what was recorded.
The width of a step is the engine's choice (`PassCosts.num_worth`) with passes of
{", ".join(map(str, SECONDS_BY_WIDTH))} tokens in {milliseconds} ms. The drafter's parameters were
chosen by one half of the sessions (`draft_fit.py`); this is the other half, and sessions that say the same are all in
one half. Records are what the same client's sessions before it in this half said.

- faster: than a token a pass, by these passes and what drafting took. Nothing of a model is in it.
- drafted, accepted: tokens that were tried; expected: so many the chances had promised.
- us a token: follow, propose and the choice of width, per token of the answer; ms a request: indexing what is new of
  its prompt. Processor time of one thread.
- the last row: a session behind {CONTEXT_TOKENS:,} tokens of other clients, for its cost.

{chr(10).join(rows)}
"""


def main(arguments: Sequence[str]) -> int:
    """Print the table; returns 1 where a floor is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.draft_replay", description="Drafts from history, replayed.")
    parser.add_argument("--save", action="store_true", help="write the table to results/drafts.md")
    given = parser.parse_args(arguments)
    tallies, far = _measured()
    if not tallies:
        parser.exit(2, "The recordings and tokenizers (shared, in or beside the repository) are not here.\n")
    rows = list(table([*tallies.values(), far]))
    print("\n".join(rows))
    if given.save:
        RESULTS.write_text(report(rows), encoding="utf-8")
    missed = [client for client, floor in FLOORS.items() if tallies[client].tokens_a_step < floor]
    print("\n".join(f"{client}: below its floor of {FLOORS[client]}" for client in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
