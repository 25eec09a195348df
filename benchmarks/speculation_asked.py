"""The thirty prompts of speculation asked of a server, each plain and drafted in turn, and whether both say the same.

Before each answer the server forgets everything: what it wrote the last time would be a draft that is always right. It
prints no table and knows no bound.
"""

import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.client import GREEDY, BenchmarkError, Client, Stream
from benchmarks.decode_rate import Arrived, tokens_per_second
from benchmarks.rig import ask, forget, settle
from benchmarks.same_text import Answer, Compared, Messages, answer, compared

PROMPTS = Path(__file__).with_name("speculation_prompts.toml")
ANSWER_TOKENS = {"edit": 448, "copy": 448, "extraction": 160, "prose": 192}
"""Enough for a whole file; kinds in the order in which they are told."""

FOUR = "four streams"
"""The kind of a pair whose prompts ran at once: prose."""

NUM_AT_ONCE, GROUP_STRIDE = 4, 2
MIN_TOKENS = 32
"""An answer that ends before says little of speed."""

WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: str
    name: str
    system: str
    said: str

    @property
    def messages(self) -> Messages:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": self.said}]

    @property
    def max_tokens(self) -> int:
        return ANSWER_TOKENS[self.kind]


@dataclass(frozen=True, slots=True)
class Told:
    """An answer as a client of streams gets it. Of the tokens that were drafted and went through the model it drew
    `num_accepted` itself."""

    text: str
    finish_reason: str
    arrived: Arrived
    num_accepted: int = 0
    num_rejected: int = 0

    @property
    def num_tokens(self) -> int:
        return self.arrived.num_tokens

    @property
    def num_steps(self) -> int:
        """Passes of the model: each draws one token that was not drafted."""
        return self.num_tokens - self.num_accepted


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, or several at once, in one round: the answers without drafts, and with them."""

    prompts: tuple[Prompt, ...]
    plain: tuple[Told, ...]
    drafted: tuple[Told, ...]

    @property
    def kind(self) -> str:
        return self.prompts[0].kind if len(self.prompts) == 1 else FOUR

    @property
    def is_long(self) -> bool:
        """Whether the answers say anything of speed."""
        return min(told.num_tokens for told in (*self.plain, *self.drafted)) >= MIN_TOKENS

    @property
    def plain_rate(self) -> float:
        """Tokens per second."""
        return tokens_per_second([told.arrived for told in self.plain])

    @property
    def drafted_rate(self) -> float:
        return tokens_per_second([told.arrived for told in self.drafted])

    @property
    def ratio(self) -> float:
        return self.drafted_rate / self.plain_rate


@dataclass(frozen=True, slots=True)
class Texts:
    """The prompts that were asked again because texts differed, and how all answers to them compare."""

    prompts: tuple[Prompt, ...]
    compared: Compared


def tokens_a_step(pairs: Iterable[Pair]) -> float:
    """Of all drafted answers together; those of rows beside one another as if each were alone."""
    answers = [told for pair in pairs for told in pair.drafted]
    return sum(told.num_tokens for told in answers) / sum(told.num_steps for told in answers)


def acceptance(pairs: Iterable[Pair]) -> float | None:
    """The share of drafted tokens that the model drew itself; None where nothing was drafted."""
    answers = [told for pair in pairs for told in pair.drafted]
    num_accepted = sum(told.num_accepted for told in answers)
    num_drafted = num_accepted + sum(told.num_rejected for told in answers)
    return num_accepted / num_drafted if num_drafted else None


def read_prompts() -> list[Prompt]:
    """All of them, those of a kind side by side."""
    found = tomllib.loads(PROMPTS.read_text("utf-8"))
    return [
        Prompt(kind, each["name"], found["systems"][kind], each["said"].strip())
        for kind in ANSWER_TOKENS
        for each in found[kind]
    ]


def groups_of(prompts: Sequence[Prompt]) -> list[tuple[Prompt, ...]]:
    """The prose prompts that are asked at once."""
    prose = [prompt for prompt in prompts if prompt.kind == "prose"]
    starts = range(0, len(prose) - NUM_AT_ONCE + 1, GROUP_STRIDE)
    return [tuple(prose[start : start + NUM_AT_ONCE]) for start in starts]


# --- how it is asked --------------------------------------------------------------------------------------------------


def told_by(stream: Stream) -> Told:
    """A stream that is over. Raises BenchmarkError for an error answer and for one without text."""
    texts, usage = stream.texts(), stream.usage()
    if not texts:
        raise BenchmarkError("an answer has no text")
    details = usage.get("completion_tokens_details") or {}
    return Told(
        "".join(text for _, text in texts),
        stream.finish_reason(),
        Arrived(tuple((at, len(text)) for at, text in texts), usage["completion_tokens"]),
        details.get("accepted_prediction_tokens", 0),
        details.get("rejected_prediction_tokens", 0),
    )


def ask_at_once(
    port: int, prompts: Sequence[Prompt], *, is_drafted: bool, max_tokens: int | None = None
) -> tuple[Told, ...]:
    """Ask a server that knows nothing of these prompts. Raises BenchmarkError for an error answer, and where a plain
    one was drafted."""
    forget_all(port)
    field = {} if is_drafted else {"speculation": False}
    with Client(port) as client:
        streams = [
            client.send({"messages": prompt.messages, "max_tokens": max_tokens or prompt.max_tokens, **GREEDY, **field})
            for prompt in prompts
        ]
        client.run_until(lambda: all(stream.ended_at is not None for stream in streams))
    answers = tuple(told_by(stream) for stream in streams)
    if not is_drafted and any(told.num_accepted or told.num_rejected for told in answers):
        raise BenchmarkError("an answer was drafted that was not to be")
    if num_from_records(ask(port, "GET", "/v1/cache")[1]):
        raise BenchmarkError("an answer was drafted from another one, which was forgotten")
    return answers


def num_from_records(cache: Mapping[str, Any]) -> int:
    """Drafted tokens, by the body of `GET /v1/cache`, that come from other conversations."""
    from_records = cache.get("speculation", {}).get("by_source", {}).get("records", {})
    return int(from_records.get("num_drafted_tokens", 0))


def forget_all(port: int) -> None:
    """The server has nothing left to do for the last answer, and nothing left of it."""
    settle(port)
    forget(port)


type Ask = Callable[[Sequence[Prompt], bool], tuple[Told, ...]]
"""Asks these prompts at once, drafted or not."""


def pair_of(prompts: Sequence[Prompt], ask: Ask, *, is_drafted_first: bool) -> Pair:
    """Both answers, one behind the other."""
    found = {is_drafted: ask(prompts, is_drafted) for is_drafted in (is_drafted_first, not is_drafted_first)}
    return Pair(tuple(prompts), found[False], found[True])


def all_pairs(prompts: Sequence[Prompt], ask: Ask, num_rounds: int) -> list[Pair]:
    """Each prompt alone, and prose at once as well; which side is first changes with each pair and each round."""
    found = []
    jobs = [*((prompt,) for prompt in prompts), *groups_of(prompts)]
    for number in range(num_rounds):
        for place, job in enumerate(jobs):
            pair = pair_of(job, ask, is_drafted_first=(number + place) % 2 == 1)
            found.append(pair)
            print(line_of(pair), file=sys.stderr, flush=True)
    return found


def line_of(pair: Pair) -> str:
    """What is told of a pair at once."""
    name = ", ".join(prompt.name for prompt in pair.prompts)
    if not pair.is_long:
        return f"{pair.kind}: {name}: an answer is too short to be timed"
    return f"{pair.kind}: {name}: {pair.ratio:.2f} x, {tokens_a_step([pair]):.2f} tokens a step"


def measured(port: int, prompts: Sequence[Prompt], num_rounds: int) -> tuple[list[Pair], Texts]:
    """All pairs of a server, and how far their texts are the same."""

    def ask(some: Sequence[Prompt], is_drafted: bool) -> tuple[Told, ...]:
        return ask_at_once(port, some, is_drafted=is_drafted)

    for is_drafted in (False, True):  # the first passes of a process are slow, and drafts are another one's width
        ask_at_once(port, prompts[:1], is_drafted=is_drafted, max_tokens=WARM_UP_TOKENS)
    pairs = all_pairs(prompts, ask, num_rounds)

    def judge(prompt: Prompt, is_drafted: bool) -> Answer:
        forget_all(port)
        fields = {} if is_drafted else {"speculation": False}
        return answer(port, prompt.messages, prompt.max_tokens, **fields)

    return pairs, compared_texts(pairs, judge)


# --- whether both say the same ----------------------------------------------------------------------------------------


def compared_texts(pairs: Sequence[Pair], judge: Callable[[Prompt, bool], Answer]) -> Texts:
    """Whether all answers to a prompt are the same. Where they are not, `judge` asks those prompts and one of each kind
    once more, with log-probabilities, plain and drafted: so noise is measured, and how close the two best tokens were
    where an answer parts from the plain one."""
    answers: dict[Prompt, list[Told]] = {}
    for pair in pairs:
        for prompt, *both in zip(pair.prompts, pair.plain, pair.drafted, strict=True):
            answers.setdefault(prompt, []).extend(both)
    differing = [
        prompt for prompt, told in answers.items() if len({(each.text, each.finish_reason) for each in told}) > 1
    ]
    if not differing:
        return Texts((), Compared((), 0.0))
    firsts = {prompt.kind: prompt for prompt in reversed(answers)}
    asked = [*differing, *(prompt for prompt in firsts.values() if prompt not in differing)]
    plain = [judge(prompt, False) for prompt in asked]
    ways = {"drafted again": [judge(prompt, True) for prompt in asked]}
    for number in range(max(len(answers[prompt]) for prompt in asked)):
        ways[f"answer {number}"] = [
            _as_answer(answers[prompt][number]) if number < len(answers[prompt]) else one
            for prompt, one in zip(asked, plain, strict=True)
        ]
    return Texts(tuple(asked), compared(plain, ways))


def _as_answer(told: Told) -> Answer:
    return Answer(told.text, told.finish_reason, (), 0, 0)


def median_rates(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Tokens per second, drafted and plain."""
    return median(pair.drafted_rate for pair in pairs), median(pair.plain_rate for pair in pairs)
