"""What of each prompt a server reuses over HTTP, against an oracle that knows all that it ever computed.

Reused tokens are read from the answers' usage; what was possible is found out in this process (`reuse_oracle.py`), and
an answer that is not the one of the same model alone, cold and greedy, ends the measurement.
"""

import http.client
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.client import BenchmarkError
from benchmarks.figure import Bound, Figure
from benchmarks.reuse_oracle import CONVENTIONS, Computed, GreedyModel, Rendering, possible_reuse
from benchmarks.reuse_scenarios import SCENARIOS, Ask, Reply, Sizes, Talk, Words
from benchmarks.rig import serving
from kvserve.demo.build import build_model

TOLERANCE_TOKENS = 8
MOSTLY_REUSED = 0.9
NUM_COLD_REQUESTS = 2
"""Of each conversation so many requests are asked again of an empty cache, for their time to the first text."""

ANSWER_TOKENS = 24
SIZES = Sizes(system_words=500, user_words=20, result_words=30, num_turns=4)
"""Prompts of 1.5k tokens and more, so that prefill is what a cold request waits for, also on the tiny models."""

PEERS: Mapping[tuple[str, str], str] = {
    ("user turns", "dense"): "0.90-0.91, oMLX 0.75 (0.91)",
    ("user turns", "window"): "mlx-lm, Rapid-MLX 0.90, oMLX 0.86, vllm-mlx 0.71 (0.91)",
    ("user turns", "hybrid"): "mlx-lm 0.91, Rapid-MLX 0.90, mlx-openai-server 0.83, oMLX 0.74, vllm-mlx 0 (0.91)",
    ("tool loop, answers discarded", "hybrid"): "Rapid-MLX 0.90, oMLX 0.80, mlx-lm 0.71, vllm-mlx 0 (0.91)",
    ("carrier message", "dense"): "all 0.86 (0.87)",
    ("carrier message", "hybrid"): "mlx-lm 0.66, oMLX 0.56, Rapid-MLX 0.54, vllm-mlx 0 (0.87)",
    ("parent, sub-agents, rewind, return", "hybrid"): "mlx-lm 0.81, Rapid-MLX 0.66, oMLX 0.20 (0.92)",
}
"""Reuse that others reached on such conversations, in brackets what was possible there: other texts and lengths, so a
figure is to be read against its own bracket."""

KINDS = {"qwen3": "dense", "glm4_moe_lite": "dense", "qwen3_5": "hybrid", "gemma3": "window", "gpt_oss": "window"}
"""The families that are played, by their caches; the vision checkpoint's table is that of `vision`."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One request: the length of its prompt, what was reused of it and what could have been; seconds to its text."""

    ask: Ask
    reply: Reply
    num_possible_tokens: int

    @property
    def num_missed_tokens(self) -> int:
        """Tokens that were computed again; negative where a server did better than message ends allow."""
        return self.num_possible_tokens - self.reply.num_cached_tokens


class Judge:
    """Follows a server's run from the moment it knows nothing. Raises BenchmarkError where the two disagree."""

    def __init__(
        self,
        family: str,
        folder: Path,
        answer_tokens: int,
        *,
        rendering: Rendering | None = None,
        model: GreedyModel | None = None,
    ) -> None:
        self._convention = CONVENTIONS[family]
        self._rendering = Rendering(folder, self._convention) if rendering is None else rendering
        self._model = GreedyModel(folder) if model is None else model
        self._answer_tokens = answer_tokens
        self._computed = Computed()
        self._emitted: dict[str, list[int]] = {}

    def forget(self) -> None:
        """The server was emptied."""
        self._computed = Computed()
        self._emitted = {}

    def judged(self, ask: Ask, reply: Reply) -> Judged:
        """What was possible for a request, and from now on known because of it."""
        prompt, answer = self._understood(ask, reply)
        ends = self._rendering.message_ends(prompt, ask.messages, ask.tools)
        known = self._computed.longest_prefix(prompt)
        self._computed.add([*prompt, *answer])
        if not reply.reasoning and reply.content.strip():
            said = [token for token in answer if token not in self._model.stops]
            self._emitted[reply.content] = [*self._rendering.silence(thinking=ask.thinking), *said]
        return Judged(ask, reply, possible_reuse(prompt, known, ends, is_cuttable=self._convention.is_cuttable))

    def _understood(self, ask: Ask, reply: Reply) -> tuple[list[int], list[int]]:
        """The prompt that the model over there saw, and its answer: rendered, and answered by the model here.

        A server may give an echoed answer back in the tokens that the model emitted, which say the same: of these
        prompts it is the one with the right length and the right answer.
        """
        written: list[tuple[int, int]] = []
        for prompt in self._rendering.replays(ask.messages, ask.tools, self._emitted, thinking=ask.thinking):
            if len(prompt) == reply.num_prompt_tokens:
                answer = self._model.answer(prompt, self._answer_tokens)
                written.append((len(prompt), len(answer)))
                if len(answer) == reply.num_completion_tokens and self._says(answer, reply):
                    return prompt, answer
        found = (reply.num_prompt_tokens, reply.num_completion_tokens)
        raise BenchmarkError(f"prompt and answer have {found} tokens, or say something else: here they have {written}")

    def _says(self, answer: Sequence[int], reply: Reply) -> bool:
        said, written = reply.reasoning + reply.content, self._rendering.text(answer)
        return "".join(said.split()) == "".join(written.split())


def play(talk: Talk, judge: Judge, send: Callable[[Ask], Reply]) -> list[Judged]:
    """Lead a conversation to its end and judge every request."""
    found: list[Judged] = []
    try:
        ask = next(talk)
        while True:
            reply = send(ask)
            found.append(judge.judged(ask, reply))
            ask = talk.send(reply)
    except StopIteration:
        return found


# --- over HTTP --------------------------------------------------------------------------------------------------------


def chat(port: int, ask: Ask, answer_tokens: int) -> Reply:
    """Ask greedily and as a stream. Raises BenchmarkError for anything but a whole answer."""
    body = {
        "messages": list(ask.messages),
        **({"tools": list(ask.tools)} if ask.tools else {}),
        "max_tokens": answer_tokens,
        "temperature": 0,
        "repetition_penalty": 1.0,
        "chat_template_kwargs": {"enable_thinking": ask.thinking},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        sent_at = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise BenchmarkError(f"the server answered {response.status}: {response.read()[:500]!r}")
        return _put_together(response, sent_at)
    finally:
        connection.close()


def _put_together(response: http.client.HTTPResponse, sent_at: float) -> Reply:
    parts: dict[str, str] = {"reasoning_content": "", "content": ""}
    usage: Mapping[str, Any] | None = None
    first_text_at: float | None = None
    for payload in _payloads(response):
        if "error" in payload:
            raise BenchmarkError(f"the stream failed: {payload['error']}")
        usage = payload.get("usage") or usage
        for choice in payload["choices"]:
            for name in parts:
                parts[name] += choice["delta"].get(name) or ""
        if first_text_at is None and any(parts.values()):
            first_text_at = time.perf_counter()
    if usage is None:
        raise BenchmarkError("the answer ended without usage")
    return Reply(
        reasoning=parts["reasoning_content"],
        content=parts["content"],
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        num_completion_tokens=usage["completion_tokens"],
        first_text_seconds=(first_text_at or time.perf_counter()) - sent_at,
    )


def _payloads(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


def clear_cache(port: int) -> None:
    """Let the server forget all KV."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("DELETE", "/v1/cache")
        status = connection.getresponse().status
    finally:
        connection.close()
    if status != 200:
        raise BenchmarkError(f"DELETE /v1/cache was answered with {status}")


# --- the benchmark ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Led:
    """A conversation that was led to its end, and seconds to the first text, warm and cold, of some of its requests."""

    family: str
    scenario: str
    requests: tuple[Judged, ...]
    first_text_seconds: tuple[tuple[float, float], ...]

    @property
    def warm_over_cold(self) -> list[float]:
        return [warm / cold for warm, cold in self.first_text_seconds]

    @property
    def reuse(self) -> float:
        """Share of the prompt tokens that was reused; the first request, which finds nothing, does not count."""
        return sum(each.reply.num_cached_tokens for each in self.requests[1:]) / self._num_prompt_tokens

    @property
    def possible(self) -> float:
        return sum(each.num_possible_tokens for each in self.requests[1:]) / self._num_prompt_tokens

    @property
    def num_missed_tokens(self) -> int:
        """Of the request that missed most."""
        return max(each.num_missed_tokens for each in self.requests)

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(each.reply.num_prompt_tokens for each in self.requests[1:])

    @property
    def peers(self) -> str:
        return PEERS.get((self.scenario, KINDS[self.family]), "not measured")


def run(num_rounds: int) -> list[Figure]:
    """Every conversation on every family; prints the table of families and conversations on its way."""
    figures: list[Figure] = []
    all_led: list[Led] = []
    for family in KINDS:
        led = [each for seed in range(num_rounds) for each in _lead_all(family, seed)]
        all_led += led[: len(SCENARIOS)]
        figures += [_reuse_figure([each for each in led if each.scenario == name]) for name in SCENARIOS]
        figures.append(time_figure(led))
        print(f"reuse: {family} is through", file=sys.stderr, flush=True)
    print(table(all_led))
    return figures


def _lead_all(family: str, seed: int) -> Iterator[Led]:
    """All conversations on one family, each with a server that knows nothing."""
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        folder = build_model(family, Path(scratch) / "model", answer_tokens=ANSWER_TOKENS)
        with serving(folder, Path(scratch), {}) as (port, _):
            judge = Judge(family, folder, ANSWER_TOKENS)
            words = Words(SIZES, takes_tools=CONVENTIONS[family].takes_tools, seed=seed)
            settle_in(port, words)
            for scenario, talk in SCENARIOS.items():
                clear_cache(port)
                judge.forget()
                requests = play(talk(words), judge, lambda ask: chat(port, ask, ANSWER_TOKENS))
                yield timed(family, scenario, requests, port, judge)


def settle_in(port: int, words: Words) -> None:
    """The first forward passes of a process compile kernels: none of them is measured."""
    chat(port, Ask((words.system(), words.user())), ANSWER_TOKENS)


def timed(family: str, scenario: str, requests: Sequence[Judged], port: int, judge: Judge) -> Led:
    """Ask the last requests that were reused almost whole again, of a server that knows nothing.

    It has forgotten in which tokens the model wrote what the client echoes, so its prompt may be another one of the
    same text, with another answer: the judge looks at it as at a first request.
    """
    mostly = [each for each in requests if each.reply.num_cached_tokens > MOSTLY_REUSED * each.reply.num_prompt_tokens]
    pairs: list[tuple[float, float]] = []
    for each in mostly[-NUM_COLD_REQUESTS:]:
        clear_cache(port)
        judge.forget()
        cold = judge.judged(each.ask, chat(port, each.ask, ANSWER_TOKENS)).reply
        if cold.num_cached_tokens:
            raise BenchmarkError("an emptied server is not empty")
        pairs.append((each.reply.first_text_seconds, cold.first_text_seconds))
    return Led(family, scenario, tuple(requests), tuple(pairs))


def _reuse_figure(rounds: Sequence[Led]) -> Figure:
    first = rounds[0]
    return Figure(
        "reuse",
        f"{first.family}, {first.scenario}: possible - reused, worst request",
        "tokens",
        tuple(float(each.num_missed_tokens) for each in rounds),
        Bound("at most", TOLERANCE_TOKENS),
        f"{first.reuse:.3f} of {first.possible:.3f}",
    )


def time_figure(led: Sequence[Led], benchmark: str = "reuse") -> Figure:
    """Seconds to the first text of all these conversations' requests, warm : cold. Raises BenchmarkError for none."""
    pairs = [pair for each in led for pair in each.first_text_seconds]
    if not pairs:
        raise BenchmarkError("no request was reused almost whole")
    warm, cold = (1000 * median(seconds) for seconds in zip(*pairs, strict=True))
    name = f"{led[0].family}: first text, warm : cold, where more than {MOSTLY_REUSED:g} is reused"
    ratios = tuple(warm / cold for warm, cold in pairs)
    return Figure(benchmark, name, "", ratios, Bound("at most", 0.5), f"{warm:.0f} : {cold:.0f} ms")


def table(all_led: Sequence[Led]) -> str:
    """Families and conversations, in markdown."""
    lines = [
        "| family | conversation | requests | reused | possible | worst miss | warm : cold | others (possible) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for led in all_led:
        ratio = f"{median(led.warm_over_cold):.2f}" if led.warm_over_cold else "reuse below 0.9"
        cells = [led.family, led.scenario, str(len(led.requests)), f"{led.reuse:.3f}", f"{led.possible:.3f}"]
        lines.append(f"| {' | '.join([*cells, str(led.num_missed_tokens), ratio, led.peers])} |")
    return "\n".join(lines)
