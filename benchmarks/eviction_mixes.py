"""What each eviction score costs in mixes of traffic: tokens computed again that an unlimited cache would have reused.

python -m benchmarks.eviction_mixes [--save]

agents          six users, one recorded conversation after the other (as `eviction_simulator`)
pauses          six people's long conversations, with pauses of half a minute to 25 minutes
side requests   the same with titles and other small questions beside, and every ten minutes a script's thirty
forks           the same as pauses, and twice in each conversation five sub-agents go on from one place
"""

import argparse
import bisect
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.eviction_scores import SCORES
from benchmarks.eviction_simulator import (
    KINDS,
    Conversation,
    ModelSizes,
    Rendered,
    Request,
    Simulation,
    corpus_folder,
    interleave,
    pieces,
    read_conversations,
    render,
)
from kvserve.cache.checkpoints import MessageEnd, PromptOutline
from kvserve.cache.eviction import AGEING_POWER, Ageing, Candidate, Score, value_score
from kvserve.cache.kept_path import EvictedNodes
from kvserve.core import TokenSequence

RESULTS = Path(__file__).parent / "results" / "eviction_mixes.md"
NUM_PEOPLE = 6
MIN_REQUESTS, MIN_TOKENS = 8, 8000
NUM_FORKS, NUM_FORK_TURNS = 5, 5
SCRIPT_SECONDS, NUM_OF_SCRIPT = 600.0, 30
BUDGETS = {"dense": (60_000, 120_000), "hybrid 27B": (150_000, 300_000)}
"""All of the cache, in tokens of KV; on the hybrid a state takes those of 2,352."""

type Event = tuple[float, str, Request]


# --- traffic ----------------------------------------------------------------------------------------------------------


def title_prompt(folder: Path) -> list[Rendered]:
    """The messages of a recorded client's request for a title, but for the last one."""
    body = json.loads((folder / "recordings" / "opencode" / "01.json").read_text("utf-8"))["body"]
    messages = (json.loads(body) if isinstance(body, str) else body)["messages"]
    return [render(message) for message in messages[:-1]]


@dataclass
class Traffic:
    """The requests of one mix, drawn once."""

    title: Sequence[Rendered]
    seed: int
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def people(self, conversations: Sequence[Conversation], *, with_sides: bool, with_forks: bool) -> list[Event]:
        """Each person has one long conversation after the other."""
        order = [each for each in conversations if _is_long(each)]
        self.random.shuffle(order)
        for person in range(NUM_PEOPLE):
            now = 40.0 * person
            for number, conversation in enumerate(order[person::NUM_PEOPLE]):
                now = self._talk(now, f"{person}/{number}", conversation, with_sides, with_forks)
        if with_sides:
            self._script()
        return sorted(self.events, key=lambda event: event[0])

    def _talk(self, now: float, name: str, conversation: Conversation, with_sides: bool, with_forks: bool) -> float:
        forks_at = {self.random.randrange(2, max(3, len(conversation) - 5)) for _ in range(2 * with_forks)}
        until_pause = self.random.randint(3, 9)
        for number, request in enumerate(conversation):
            self.events.append((now, name, request))
            if number in forks_at:
                now = self._fork(now, name, conversation[number : number + NUM_FORK_TURNS])
            until_pause -= 1
            if with_sides and (number % 4 == 0 or not until_pause):
                self.events += [(now + 0.1 * (each + 1), f"{name}/{number}.{each}", self._side()) for each in range(3)]
            now += self._pause() if not until_pause else min(max(request.gap_seconds, 1.0), 60.0)
            until_pause = until_pause or self.random.randint(3, 9)
        return now + self._pause()

    def _pause(self) -> float:
        kind = self.random.random()
        longest = (30, 120) if kind < 0.6 else (120, 600) if kind < 0.9 else (600, 1500)
        return self.random.uniform(*longest)

    def _fork(self, now: float, name: str, requests: Sequence[Request]) -> float:
        """Sub-agents go on from the first of these, each with other words; the conversation waits for the last."""
        cut = requests[0].outline.message_ends[-1].offset
        last = now
        for number in range(NUM_FORKS):
            at, words = now + 1 + number / 2, self._words(40)
            for request in requests:
                if request.prompt.ids[:cut] != requests[0].prompt.ids[:cut]:
                    break
                self.events.append((at, name, _with_words(request, cut, words)))
                at += self.random.uniform(2, 8)
            last = max(last, at)
        return last

    def _side(self) -> Request:
        """A small question behind the same instructions, answered in a few words."""
        ids = [token for message in self.title for token in message.ids]
        system_end = len(self.title[0].ids)
        ids += self._words(self.random.randint(60, 400))
        end = len(ids)
        ids += pieces("<assistant>")
        outline = PromptOutline(len(ids), (MessageEnd(end, "user", is_genuine_user=True),), system_end)
        return Request(TokenSequence(tuple(ids)), TokenSequence((*ids, *self._words(12))), outline, 0.0)

    def _script(self) -> None:
        now, end = SCRIPT_SECONDS / 2, max(at for at, _, _ in self.events)
        while now < end:
            self.events += [(now + 1.5 * each, f"script {now}/{each}", self._side()) for each in range(NUM_OF_SCRIPT)]
            now += SCRIPT_SECONDS

    def _words(self, number: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(1 << 18) for _ in range(number))


def _is_long(conversation: Conversation) -> bool:
    longest = max(len(request.prompt) for request in conversation)
    return len(conversation) >= MIN_REQUESTS and longest >= MIN_TOKENS and not conversation[-1].prompt.images


def _with_words(request: Request, cut: int, words: tuple[int, ...]) -> Request:
    """The same request with other words from `cut` on."""
    prompt, whole = (
        TokenSequence((*each.ids[:cut], *words, *each.ids[cut:])) for each in (request.prompt, request.whole)
    )
    ends = tuple(
        replace(end, offset=end.offset + len(words)) if end.offset > cut else end
        for end in request.outline.message_ends
    )
    return Request(prompt, whole, PromptOutline(len(prompt), ends, request.outline.system_end), request.gap_seconds)


def mixes(conversations: Sequence[Conversation], title: Sequence[Rendered]) -> dict[str, list[Event]]:
    """Each mix by its name."""
    return {
        "agents": list(interleave(conversations, NUM_PEOPLE, 0)),
        "pauses": Traffic(title, 1).people(conversations, with_sides=False, with_forks=False),
        "side requests": Traffic(title, 1).people(conversations, with_sides=True, with_forks=False),
        "forks": Traffic(title, 1).people(conversations, with_sides=False, with_forks=True),
    }


# --- scores -----------------------------------------------------------------------------------------------------------


class GreedyDual:
    """Greedy-Dual-Size-Frequency (Cherkasova 1998): what leaves raises the clock, and a use adds the clock of then."""

    def __init__(self) -> None:
        self.now = 0.0
        self._times, self._clocks = [-math.inf], [0.0]

    def __call__(self, candidate: Candidate) -> Ageing:
        cost = (candidate.end - candidate.start) * (1 + math.log2(1 + candidate.num_uses))
        clock = self._clocks[bisect.bisect_right(self._times, candidate.used_at) - 1]
        return Ageing(1.0, clock + cost / max(candidate.num_bytes, 1))

    def note(self, score: float) -> None:
        """This left."""
        if score > self._clocks[-1]:
            self._times.append(self.now)
            self._clocks.append(score)


ATTENTION_TOKENS = 32768
"""Depth at which attention costs as much as the rest of a model."""


def by_work(candidate: Candidate) -> Ageing:
    """The default score until decision 0041: what is brief is like anything else, and deep tokens are dearer."""
    start, end = candidate.start, candidate.end
    dearer = 1 + (start + end) / (2 * ATTENTION_TOKENS)
    ageing = alike(candidate)
    return replace(ageing, slope=ageing.slope * dearer ** (-1 / AGEING_POWER))


def alike(candidate: Candidate) -> Ageing:
    """The default score without its handicap for what is brief."""
    return value_score(replace(candidate, is_brief=False))


RIVALS: dict[str, Score] = {
    "value": value_score,
    "brief alike": alike,
    "alike, by work": by_work,
    "age_length_frequency": SCORES["age_length_frequency"],
    "lru": SCORES["lru"],
}


def num_reused(events: Sequence[Event], score: Score, sizes: ModelSizes, max_bytes: int) -> int:
    """Prompt tokens that were reused."""
    simulation = Simulation(score, max_bytes, sizes)
    for now, owner, request in events:
        simulation.serve(now, owner, request)
    return simulation.num_reused_tokens


def num_reused_by_greedy_dual(events: Sequence[Event], sizes: ModelSizes, max_bytes: int) -> int:
    """The same with GreedyDual, which hears of what leaves."""
    score = GreedyDual()
    simulation = Simulation(score, max_bytes, sizes)
    ranks = simulation.tree._sweep._ranks

    def tell(evicted: EvictedNodes) -> None:
        node = evicted.nodes[0]
        score.note((ranks.of_state(node) if evicted.is_state_only else ranks.of_leaf(node)).ageing.since)

    simulation.tree.before_eviction(tell)
    for now, owner, request in events:
        score.now = now
        simulation.serve(now, owner, request)
    return simulation.num_reused_tokens


# --- table ------------------------------------------------------------------------------------------------------------


def table(traffic: dict[str, list[Event]]) -> Iterator[str]:
    """The lines of a Markdown table: thousands of tokens that eviction let be computed again."""
    names = [*RIVALS, "gdsf"]
    yield f"| model, mix (requests, million prompt tokens), tokens of KV | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for kind, sizes in KINDS:
        for mix, events in traffic.items():
            best = num_reused(events, SCORES["lru"], sizes, 2**60)
            num_tokens = sum(len(request.prompt) for _, _, request in events) / 1e6
            for budget in BUDGETS[kind]:
                max_bytes = budget * sizes.kv_bytes_per_token
                reused = [num_reused(events, score, sizes, max_bytes) for score in RIVALS.values()]
                reused.append(num_reused_by_greedy_dual(events, sizes, max_bytes))
                lost = " | ".join(f"{(best - each) / 1000:,.0f}" for each in reused)
                yield f"| {kind}, {mix} ({len(events):,}, {num_tokens:.1f}), {budget:,} | {lost} |"


HEAD = """# What eviction costs in traffic as it comes

`python -m benchmarks.eviction_mixes --save`: thousands of prompt tokens that were computed again because they had left
a cache of that size, in the mixes that the file describes; the real tree and checkpoint plan, payloads of mere sizes.
Lower is better. `value` is what decides; decision 0041 says why.
"""


def main() -> None:
    """Print the table; with --save keep it too."""
    parser = argparse.ArgumentParser(description="Compare eviction scores in mixes of traffic.")
    parser.add_argument("--save", action="store_true", help="write results/eviction_mixes.md")
    arguments = parser.parse_args()
    folder = corpus_folder()
    if folder is None or not (folder.parent / "recordings").is_dir():
        parser.exit(2, "There is no shared/corpus or shared/recordings here.\n")
    lines = []
    for line in table(mixes(read_conversations(folder), title_prompt(folder.parent))):
        print(line, flush=True)
        lines.append(line)
    if arguments.save:
        RESULTS.write_text("\n".join([HEAD, *lines]) + "\n", "utf-8")
        print(f"kept in {RESULTS.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
