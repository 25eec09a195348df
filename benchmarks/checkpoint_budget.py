"""What a long tool loop on a hybrid model holds: the real tree and plan, payloads that are mere sizes, no model.

A second loop elides: of all but its newest five results the client shows only that there was one, as SWE-agent does.

python -m benchmarks.checkpoint_budget     the whole table
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import count

from benchmarks.figure import Bound, Figure
from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.checkpoints import MessageEnd, PromptOutline, plan_stops
from kvserve.cache.records import CacheStats, Limits
from kvserve.cache.tree import PrefixMatch, PrefixTree
from kvserve.core import Role, TokenSequence

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Sized:
    """A payload of which only the size matters."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of KV per token, and of one checkpoint."""

    kv_bytes_per_token: int
    checkpoint_bytes: int


QWEN_27B = ModelSizes(64 * KIB, 147 * MIB)
"""Qwen3.6-27B: 16 of 64 layers have KV, the others a recurrent state."""


class ToolLoop:
    """A conversation that grows: system and tools, one user message, then call and result over and over.

    `num_new_prompt_tokens` is what the requests brought that had not been computed before, `num_computed_tokens` what
    the cache made them compute.
    """

    def __init__(self, tree: PrefixTree, sizes: ModelSizes, *, num_system_tokens: int, num_user_tokens: int) -> None:
        self.tree = tree
        self._sizes = sizes
        self._tokens = count(1000)
        self.ids: list[int] = []
        self.ends: list[MessageEnd] = []
        self.system_end = num_system_tokens
        self.peak_bytes = 0
        self.num_computed_tokens = 0
        self.num_new_prompt_tokens = 0
        self._num_known = 0
        self._say("system", num_system_tokens)
        self._say("user", num_user_tokens)
        self.last_user_end = len(self.ids)

    def _say(self, role: Role, num_tokens: int) -> None:
        self.ids += [next(self._tokens) for _ in range(num_tokens)]
        self.ends.append(MessageEnd(len(self.ids), role, is_genuine_user=role == "user"))

    def turn(self, *, num_answer_tokens: int, num_result_tokens: int, num_tail_tokens: int = 3) -> PrefixMatch:
        """One request: prompt, answer, then the tool's result, which the next request brings."""
        tail = [next(self._tokens) for _ in range(num_tail_tokens)]
        prompt = TokenSequence((*self.ids, *tail))
        outline = PromptOutline(len(prompt), tuple(self.ends), self.system_end)
        self.ids += tail
        self._say("assistant", num_answer_tokens)
        match = self._serve(prompt, outline, TokenSequence(tuple(self.ids)))
        self._say("tool", num_result_tokens)
        return match

    def elide(self, num_shown_results: int) -> int:
        """The newest result that is not shown any more becomes a few tokens. Returns up to which message's end the next
        prompt is what the last one was."""
        results = [index for index, end in enumerate(self.ends) if end.role == "tool"]
        if len(results) <= num_shown_results:
            return len(self.ids)
        index = results[-num_shown_results - 1]
        start, end = self.ends[index - 1].offset, self.ends[index].offset
        note = [next(self._tokens) for _ in range(NOTE_TOKENS)]
        self.ids[start:end] = note
        moved = end - start - len(note)
        self.ends[index:] = [replace(each, offset=each.offset - moved) for each in self.ends[index:]]
        return start

    def _serve(self, prompt: TokenSequence, outline: PromptOutline, whole: TokenSequence) -> PrefixMatch:
        """Prefill `prompt` with the planned stops; `whole` is the prompt with the answer, which is replayed later."""
        match = self.tree.lookup(prompt)
        lease = self.tree.acquire(match, owner="loop")
        stops = plan_stops(
            outline,
            num_usable_tokens=match.num_usable_tokens,
            num_matched_tokens=match.num_matched_tokens,
            needs_checkpoints=True,
        )
        for stop in stops:
            self.tree.extend(lease, prompt, stop.offset, self._rows, self._state, stop.kind)
            self._evict()
        self.tree.extend(lease, whole, len(whole), self._rows, self._state, "answer")
        self.tree.mark_end(lease)
        self.tree.release(lease)
        self._evict()
        self.num_computed_tokens += len(prompt) - match.num_usable_tokens
        self.num_new_prompt_tokens += len(prompt) - self._num_known
        self._num_known = len(whole)
        return match

    def _evict(self) -> None:
        self.tree.evict()
        self.peak_bytes = max(self.peak_bytes, self.tree.stats().ram_bytes)

    def _rows(self, start: int, end: int) -> Sized:
        return Sized((end - start) * self._sizes.kv_bytes_per_token)

    def _state(self) -> Sized:
        return Sized(self._sizes.checkpoint_bytes)


@dataclass(frozen=True, slots=True)
class LoopReport:
    """What the loop holds at its end, and from where three kinds of next request would start."""

    stats: CacheStats
    peak_bytes: int
    checkpoint_kinds: dict[str, int]
    checkpoint_offsets: tuple[int, ...]
    num_tokens: int
    num_computed_tokens: int
    num_new_prompt_tokens: int
    system_end: int
    last_user_end: int
    next_turn: PrefixMatch
    again_from_user: PrefixMatch
    new_conversation: PrefixMatch

    @property
    def num_lost_tokens(self) -> int:
        """Tokens that had been computed and were, or would be by those next requests, computed again."""
        return (
            self.num_computed_tokens
            - self.num_new_prompt_tokens
            + self.next_turn.num_trim_missed_tokens
            + (self.last_user_end - self.again_from_user.num_usable_tokens)
            + (self.system_end - self.new_conversation.num_usable_tokens)
        )


def run_tool_loop(
    sizes: ModelSizes = QWEN_27B,
    *,
    num_turns: int = 100,
    max_bytes: int = 12 * GIB,
    max_checkpoint_bytes: int = 4 * GIB,
) -> LoopReport:
    """A tool loop of `num_turns` requests under a budget of RAM and of checkpoints."""
    tree = _tree(sizes, max_bytes, max_checkpoint_bytes)
    loop = ToolLoop(tree, sizes, num_system_tokens=8000, num_user_tokens=300)
    for number in range(num_turns):
        loop.turn(num_answer_tokens=120 + number % 7 * 20, num_result_tokens=200 + number % 11 * 60)
    checkpoints = [node.checkpoint for nodes in tree.sequences() for node in nodes if node.checkpoint]
    fresh = (1, 2, 3, 4)
    return LoopReport(
        stats=tree.stats(),
        peak_bytes=loop.peak_bytes,
        checkpoint_kinds=dict(Counter(checkpoint.kind for checkpoint in checkpoints)),
        checkpoint_offsets=tuple(sorted(checkpoint.offset for checkpoint in checkpoints)),
        num_tokens=len(loop.ids),
        num_computed_tokens=loop.num_computed_tokens,
        num_new_prompt_tokens=loop.num_new_prompt_tokens,
        system_end=loop.system_end,
        last_user_end=loop.last_user_end,
        next_turn=tree.lookup(TokenSequence((*loop.ids, *fresh))),
        again_from_user=tree.lookup(TokenSequence((*loop.ids[: loop.last_user_end], *fresh))),
        new_conversation=tree.lookup(TokenSequence((*loop.ids[: loop.system_end], *fresh))),
    )


def run_eliding_loop(
    sizes: ModelSizes = QWEN_27B,
    *,
    num_turns: int = 60,
    num_shown_results: int = 5,
    max_bytes: int = 12 * GIB,
    max_checkpoint_bytes: int = 4 * GIB,
) -> tuple[int, int]:
    """Peak bytes of such a loop, and how many tokens were computed again although the prompt before had them, up to a
    message's end, at the same place."""
    loop = ToolLoop(_tree(sizes, max_bytes, max_checkpoint_bytes), sizes, num_system_tokens=8000, num_user_tokens=300)
    num_lost = num_same = 0
    for number in range(num_turns):
        match = loop.turn(num_answer_tokens=120 + number % 7 * 20, num_result_tokens=200 + number % 11 * 60)
        num_lost += max(0, num_same - match.num_usable_tokens) if number else 0
        # of a prompt that only grew the answer before the newest result is not yet at a place to start from
        num_same = min(loop.elide(num_shown_results), loop.ends[-2].offset)
    return loop.peak_bytes, num_lost


def _tree(sizes: ModelSizes, max_bytes: int, max_checkpoint_bytes: int) -> PrefixTree:
    now = count()
    return PrefixTree(
        BlockHasher(16, "benchmark"),
        Limits(max_bytes, max_checkpoint_bytes, max_entries=24, max_entries_per_owner=2),
        needs_checkpoints=True,
        cut_payload=lambda _payload, start, end: Sized((end - start) * sizes.kv_bytes_per_token),
        clock=lambda: float(next(now)),
    )


BUDGETS_GIB = ((6, 2), (8, 3), (12, 4))
"""RAM in all, and for checkpoints."""


def run(_num_rounds: int) -> list[Figure]:
    """For small budgets: the peak, and what must be computed although it was computed before. Nothing is timed."""
    reports = {
        budget: run_tool_loop(max_bytes=budget * GIB, max_checkpoint_bytes=share * GIB) for budget, share in BUDGETS_GIB
    }
    figures = [figure for budget, report in reports.items() for figure in _figures(budget, report)]
    return [*figures, _eliding_figure(*BUDGETS_GIB[-1])]


def _eliding_figure(budget: int, share: int) -> Figure:
    peak, lost = run_eliding_loop(max_bytes=budget * GIB, max_checkpoint_bytes=share * GIB)
    return Figure(
        "checkpoint_budget",
        f"60-turn tool loop that shows five results, 27B hybrid, {budget} GiB: tokens computed twice",
        "",
        (float(lost),),
        Bound("at most", 0),
        f"peak {peak / GIB:.2f} GiB",
    )


def _figures(budget: int, report: LoopReport) -> tuple[Figure, Figure]:
    name = f"100-turn tool loop on a 27B hybrid, {budget} GiB"
    held = f"{report.peak_bytes / GIB:.2f} GiB, {report.stats.num_checkpoints} states at the end"
    lost = report.num_lost_tokens
    return (
        Figure(
            "checkpoint_budget",
            f"{name}: peak : budget",
            "",
            (report.peak_bytes / (budget * GIB),),
            Bound("at most", 1),
            held,
        ),
        Figure(
            "checkpoint_budget",
            f"{name}: tokens computed twice",
            "",
            (float(lost),),
            Bound("at most", 0),
            f"of {report.num_tokens:,}; in the loop, at the next turn, from the user message, from the system prompt",
        ),
    )


NOTE_TOKENS = 12
"""What is left of a result that is not shown any more."""


def main() -> None:
    """Print the report for budgets from small to large."""
    print("100-turn tool loop on a 27B hybrid: 64 KiB of KV per token, 147 MiB per checkpoint")
    print("budget  of it states  peak     KV       states  #states  next turn from  last user from  system from")
    for budget, share in ((6, 2), (8, 3), (12, 4), (16, 8), (64, 48)):
        report = run_tool_loop(max_bytes=budget * GIB, max_checkpoint_bytes=share * GIB)
        stats = report.stats
        print(
            f"{budget:3d} GiB  {share:3d} GiB       {report.peak_bytes / GIB:5.2f}    "
            f"{(stats.ram_bytes - stats.checkpoint_bytes) / GIB:5.2f}    {stats.checkpoint_bytes / GIB:5.2f}   "
            f"{stats.num_checkpoints:5d}    {report.next_turn.num_usable_tokens:6d} of {report.num_tokens:6d}  "
            f"{report.again_from_user.num_usable_tokens:5d} of {report.last_user_end:5d}  "
            f"{report.new_conversation.num_usable_tokens:5d} of {report.system_end:5d}"
        )
        print(f"         {report.checkpoint_kinds}; computed {report.num_computed_tokens} prompt tokens in all")


if __name__ == "__main__":
    main()
