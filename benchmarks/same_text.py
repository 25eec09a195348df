"""Whether fifty prompts of real text are answered in the same words however their KV came about, greedily.

    python -m benchmarks.same_text [--blas off|auto|FILE] [--prompts N] [--tokens N] [--save]

Cold (nothing is kept), five at once, warm, streamed, and restored from disk after SIGKILL, on the demo's model in
float32. With the wheel's BLAS no text may differ. With a fast one the last bits of a product depend on how many tokens
are computed at once: there a text may part from the cold one where the two best tokens are closer than the noise that
is measured on all the other tokens. A server with a planted fault shows that a difference is seen. Exit code 1 when a
bound is missed.
"""

import argparse
import http.client
import json
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.client import GREEDY, BenchmarkError
from benchmarks.figure import Bound, Figure, markdown_table
from benchmarks.machine import machine
from benchmarks.planted import faulty_server
from benchmarks.rig import START_SCRIPT, ask, settle
from benchmarks.talking import TalkingServer, fast_library, talking_model
from kvserve.engine.disk_cache import MIN_GAIN_TOKENS

PROMPTS = Path(__file__).with_name("same_text_prompts.toml")
RESULTS = Path(__file__).parent / "results"
ANSWER_TOKENS = 24
ANSWER_SECONDS = 900.0
NUM_AT_ONCE = 5
NUM_PLANTED = 5
BENCH_STRIDE = 5
"""`make bench` asks every fifth prompt; all of them take twenty minutes on two cores."""

type Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token of an answer: what it says, and by how much it is likelier than the next best one (natural logarithm)."""

    text: bytes
    gap: float


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` is empty where the client asked for none."""

    text: str
    finish_reason: str
    tokens: tuple[Drawn, ...]
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the answer to a prompt parts from the cold one: the token's place, and how far the two best are apart."""

    way: str
    number: int
    place: int
    gap: float


@dataclass(frozen=True, slots=True)
class Compared:
    """`noise` is the largest change of a gap between two ways that have drawn the same tokens so far."""

    differences: tuple[Difference, ...]
    noise: float

    @property
    def num_prompts(self) -> int:
        """How many prompts have a difference."""
        return len({each.number for each in self.differences})

    @property
    def unexplained(self) -> tuple[Difference, ...]:
        """Those that begin where the two best tokens are further apart than the noise."""
        return tuple(each for each in self.differences if each.gap >= self.noise)


# --- what is compared -------------------------------------------------------------------------------------------------


def place_of_difference(cold: Answer, other: Answer) -> int | None:
    """The place in the cold answer of the first token that the other one does not say; None where they are the same."""
    if (cold.text, cold.finish_reason) == (other.text, other.finish_reason):
        return None
    one, two = cold.text.encode(), other.text.encode()
    num_common = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    end = 0
    for place, token in enumerate(cold.tokens):
        end += len(token.text)
        if end > num_common:
            return place
    return len(cold.tokens)


def gap_at(place: int, *answers: Answer) -> float:
    """How far the two best tokens are apart there. Where an answer has ended, the other one says it; infinite where
    neither does."""
    return next((answer.tokens[place].gap for answer in answers if place < len(answer.tokens)), float("inf"))


def changes(cold: Answer, other: Answer) -> Iterator[float]:
    """By how much the gaps of two answers differ, as long as both have drawn the same tokens."""
    for one, two in zip(cold.tokens, other.tokens, strict=False):
        if one.text != two.text:
            return
        yield abs(one.gap - two.gap)


def compared(cold: Sequence[Answer], ways: Mapping[str, Sequence[Answer]]) -> Compared:
    """All answers beside the cold ones."""
    pairs = [
        (way, number, one, other)
        for way, answers in ways.items()
        for number, (one, other) in enumerate(zip(cold, answers, strict=True))
    ]
    places = [(way, number, place_of_difference(one, other), one, other) for way, number, one, other in pairs]
    differences = [
        Difference(way, number, place, gap_at(place, one, other))
        for way, number, place, one, other in places
        if place is not None
    ]
    noise = max((change for _, _, one, other in pairs for change in changes(one, other)), default=0.0)
    return Compared(tuple(differences), noise)


# --- how it is asked --------------------------------------------------------------------------------------------------


def read_prompts() -> list[Messages]:
    """All prompts, those below one system prompt side by side."""
    groups = tomllib.loads(PROMPTS.read_text("utf-8"))["group"]
    return [
        [{"role": "system", "content": group["system"]}, {"role": "user", "content": said}]
        for group in groups
        for said in group["prompts"]
    ]


def answer(port: int, messages: Messages, num_tokens: int, **fields: Any) -> Answer:
    """Ask with log-probabilities. Raises BenchmarkError for an error answer."""
    asked = {"messages": messages, "max_tokens": num_tokens, "logprobs": True, "top_logprobs": 2, **GREEDY, **fields}
    body = json.loads(_sent(port, asked))
    [choice] = body["choices"]
    drawn = (Drawn(bytes(each["bytes"]), _gap(each["top_logprobs"])) for each in choice["logprobs"]["content"])
    return _answer(choice["message"]["content"] or "", choice["finish_reason"], tuple(drawn), body["usage"])


def streamed(port: int, messages: Messages, num_tokens: int) -> Answer:
    """Ask as most clients do: streamed, without log-probabilities."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = _sent(port, {"messages": messages, "max_tokens": num_tokens, **GREEDY, **options}).decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event.get("choices", ())]
    [reason] = (choice["finish_reason"] for choice in choices if choice.get("finish_reason"))
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return _answer(text, reason, (), events[-1]["usage"])


def _answer(text: str, reason: str, tokens: tuple[Drawn, ...], usage: Mapping[str, Any]) -> Answer:
    return Answer(text, reason, tokens, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def _gap(best: Sequence[Mapping[str, float]]) -> float:
    first, second = sorted((each["logprob"] for each in best), reverse=True)
    return first - second


def _sent(port: int, body: Mapping[str, Any]) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        found = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise BenchmarkError(f"the server answered {response.status}: {found[:500]!r}")
    return found


def at_once(port: int, prompts: Sequence[Messages], num_tokens: int) -> list[Answer]:
    """Ask so many prompts at a time. Raises BenchmarkError where they did not run beside one another."""
    found: list[Answer] = []
    for start in range(0, len(prompts), NUM_AT_ONCE):
        some = prompts[start : start + NUM_AT_ONCE]
        with ThreadPoolExecutor(len(some)) as pool:
            futures = [pool.submit(answer, port, messages, num_tokens) for messages in some]
            most = 0
            while not all(future.done() for future in futures):
                most = max(most, ask(port, "GET", "/health")[1]["num_running"])
                time.sleep(0.05)
        if most < len(some):
            raise BenchmarkError(f"{most} of {len(some)} requests ran at once")
        found += [future.result() for future in futures]
    return found


def check_reuse(way: str, answers: Sequence[Answer], *, is_kept: bool) -> None:
    """Raises BenchmarkError where a prompt was not restored that should be, or restored where nothing is kept. A rest
    that no file is read for may be missing."""
    for number, each in enumerate(answers):
        num_missing = each.num_prompt_tokens - each.num_cached_tokens
        if num_missing > MIN_GAIN_TOKENS if is_kept else each.num_cached_tokens:
            found = f"{each.num_cached_tokens} of {each.num_prompt_tokens} tokens"
            raise BenchmarkError(f"{way}, prompt {number}: {found} were found")


def asked_all_ways(server: TalkingServer, prompts: Sequence[Messages], num_tokens: int) -> dict[str, list[Answer]]:
    """The answers by the way in which their KV came about; what was asked at once is what the later ways find."""

    def each(ask_one: Callable[..., Answer], **fields: Any) -> list[Answer]:
        return [ask_one(server.port, messages, num_tokens, **fields) for messages in prompts]

    ways = {"cold": each(answer, ttl=0)}
    check_reuse("cold", ways["cold"], is_kept=False)
    ways["at once"] = at_once(server.port, prompts, num_tokens)
    ways["warm"] = each(answer)
    ways["streamed"] = each(streamed)
    settle(server.port)
    server.kill_and_start()
    ways["from disk"] = each(answer)
    for way in ("warm", "streamed", "from disk"):
        check_reuse(way, ways[way], is_kept=True)
    return ways


def settings_with(library: Path | None) -> dict[str, str]:
    """Nothing is computed ahead of a request, neither at the start nor in between."""
    blas = {"BLAS_LIBRARY": str(library) if library is not None else "off"}
    return {**blas, "PREWARM_PREFIXES": "0"}


def measured(
    model: Path, library: Path | None, prompts: Sequence[Messages], num_tokens: int
) -> tuple[dict[str, list[Answer]], list[Answer]]:
    """The answers by their ways, and those of a server with a planted fault to the first prompts."""
    some = prompts[:NUM_PLANTED]
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as folder:
        scratch = Path(folder)
        for each in (scratch / "whole", scratch / "planted"):
            each.mkdir()
        with TalkingServer(model, scratch / "whole", settings_with(library), script=START_SCRIPT) as server:
            ways = asked_all_ways(server, prompts, num_tokens)
        script = faulty_server(scratch / "planted")
        with TalkingServer(model, scratch / "planted", settings_with(library), script=script) as server:
            for messages in some:
                answer(server.port, messages, 1)
            planted = [answer(server.port, messages, num_tokens) for messages in some]
        check_reuse("planted", planted, is_kept=True)
    return ways, planted


# --- what is told -----------------------------------------------------------------------------------------------------


def figures(ways: Mapping[str, Sequence[Answer]], planted: Sequence[Answer], *, is_fast: bool) -> list[Figure]:
    """Prompts that differ, differences that noise does not explain, and whether the planted fault is seen."""
    others = {way: answers for way, answers in ways.items() if way != "cold"}
    whole = compared(ways["cold"], others)
    control = compared(ways["cold"][: len(planted)], {"planted": planted})
    seen = [each for each in control.differences if each.gap >= whole.noise]
    of = f"of {len(ways['cold'])} prompts"
    noise = f"noise {whole.noise:.2g}"
    return [
        _count(f"{of} those whose text differs: {', '.join(others)}", whole.num_prompts, 1 if is_fast else 0, noise),
        _count("differences that begin where noise does not explain them", len(whole.unexplained), 0, noise),
        _figure(
            "with a planted fault: differences that are seen", len(seen), Bound("at least", 1), f"of {len(planted)}"
        ),
    ]


def _count(name: str, number: int, limit: int, absolute: str) -> Figure:
    return _figure(name, number, Bound("at most", limit), absolute)


def _figure(name: str, number: int, bound: Bound, absolute: str) -> Figure:
    return Figure("same_text", name, "", (float(number),), bound, absolute)


def told(ways: Mapping[str, Sequence[Answer]]) -> str:
    """A line for each way, and one for each difference."""
    lines = ["| way | tokens of prompts | of them found | answers that differ |", "|---|---|---|---|"]
    for way, answers in ways.items():
        prompts, found = (sum(getattr(each, f"num_{name}_tokens") for each in answers) for name in ("prompt", "cached"))
        num = compared(ways["cold"], {way: answers}).num_prompts
        lines.append(f"| {way} | {prompts:,} | {found:,} | {num} |")
    for each in compared(ways["cold"], ways).differences:
        cold, other = ways["cold"][each.number].text, ways[each.way][each.number].text
        lines.append(
            f"\nPrompt {each.number}, {each.way}: token {each.place}, gap {each.gap:.2g}: {cold!r} : {other!r}"
        )
    return "\n".join(lines)


def run(num_rounds: int) -> list[Figure]:
    """Every fifth prompt with the wheel's BLAS, once; nothing where the model cannot be fetched."""
    model = talking_model("float32")
    if model is None:
        return []
    ways, planted = measured(model, None, read_prompts()[::BENCH_STRIDE], ANSWER_TOKENS)
    return figures(ways, planted, is_fast=False)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.same_text", description="The same text, however KV came about.")
    parser.add_argument("--blas", default="off", metavar="FILE", help="off (the wheel's), auto, or a library's file")
    parser.add_argument("--prompts", type=int, metavar="N", help="so many of them, of all kinds; otherwise all")
    parser.add_argument("--tokens", type=int, default=ANSWER_TOKENS, metavar="N", help="of an answer at most")
    parser.add_argument("--save", action="store_true", help="write the tables to benchmarks/results")
    given = parser.parse_args(argv)
    load_before = os.getloadavg()
    library = fast_library(given.blas)
    model = talking_model("float32")
    if model is None or (given.blas == "auto" and library is None):
        print("There is nothing to measure with: no model, or no fast BLAS.", file=sys.stderr)
        return 1
    prompts = read_prompts()
    prompts = prompts[:: max(1, len(prompts) // given.prompts)][: given.prompts] if given.prompts else prompts
    started = time.monotonic()
    ways, planted = measured(model, library, prompts, given.tokens)
    found = figures(ways, planted, is_fast=library is not None)
    minutes = (time.monotonic() - started) / 60
    head = f"{machine(load_before)} {library.name if library else 'The BLAS of the wheel'}; {minutes:.0f} minutes."
    text = f"{head}\n\n{markdown_table(found)}\n\n{told(ways)}"
    print(text)
    if given.save:
        name = "same_text_fast_blas.md" if library else "same_text.md"
        (RESULTS / name).write_text(f"# The same text, however KV came about\n\n{text}\n", "utf-8")
    return int(any(figure.is_missed for figure in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
