"""First tokens on real text: what PI and OpenClaw sent, eight turns, to the demo's model, cold, warm and after SIGKILL.

    python -m benchmarks.real_text [--blas auto|off|FILE] [--client NAME] [--turns N] [--tokens N] [--no-proxy]
                                   [--rounds N] [--save]

The recorded requests in their order, streamed, on port 8080 and through LiteLLM. A system prompt that is too long for
the model is cut in its middle, so that the first prompt has 6,000 tokens. Before the last request the server is killed
as soon as the answer before it is there, and asked as soon as the next one answers. Recorded requests bring answers of
another model, which are read like everything new; so once a person asks on behind the demo model's own answer. The
first prompt and the last are read cold; what one in between would take lies between them, by its length.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.client import GREEDY, BenchmarkError, Client
from benchmarks.figure import Bound, Figure, markdown_table
from benchmarks.machine import machine
from benchmarks.model_free import ModelFree
from benchmarks.recordings import Conversation, Request, read_recordings, shared_folder
from benchmarks.rig import forget, settle
from benchmarks.talking import TalkingServer, fast_library, talking_model

RESULTS = Path(__file__).parent / "results" / "real_text.md"
CLIENTS = {"PI": "pi-0.87-qwen", "OpenClaw": "openclaw-2026.9.6"}
SHORT_CLIENTS = ("PI",)
"""Those whose prompts a machine without a fast BLAS reads in minutes."""

NUM_TURNS = 8
CONTEXT_TOKENS, MAX_CONTEXT_TOKENS = 6_000, 8_192
ANSWER_TOKENS = 4
QUESTION = "Why do you think so? Say it in one short sentence."
WARM_BOUND, KILLED_BOUND = Bound("at most", 0.03), Bound("at most", 0.1)


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request took to its first token, and of how many tokens of its prompt the KV was there."""

    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def num_new_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens


@dataclass(frozen=True, slots=True)
class Session:
    """A client's requests through one port, once: the first, a question behind the model's own answer, those that went
    on, the one behind the kill, and that one cold."""

    cold: Asked
    question: Asked
    warm: tuple[Asked, ...]
    killed: Asked
    last_cold: Asked

    def ratio(self, one: Asked) -> float:
        """What a request took : what its prompt would take cold."""
        first, last = self.cold, self.last_cold
        longer = one.num_prompt_tokens - first.num_prompt_tokens
        slope = (last.seconds - first.seconds) / max(1, last.num_prompt_tokens - first.num_prompt_tokens)
        return one.seconds / (first.seconds + longer * slope)


@dataclass(frozen=True, slots=True)
class Measured:
    """All rounds of a client on a port."""

    client: str
    port: str
    sessions: tuple[Session, ...]

    @property
    def is_long(self) -> bool:
        """Whether the bounds count: at six thousand tokens."""
        return self.sessions[0].cold.num_prompt_tokens >= 0.95 * CONTEXT_TOKENS


# --- the prompts ------------------------------------------------------------------------------------------------------


def cut_to(talk: Conversation, num_tokens: int, count: Callable[[Request], int]) -> Conversation:
    """The conversation without as much of the middle of its system prompt as its first prompt is too long."""
    first = talk.requests[0]
    if count(first) <= num_tokens:
        return talk
    low, high = 0, len(_system(first))
    while high - low > 1:
        kept = (low + high) // 2
        low, high = (kept, high) if count(_shortened(first, kept)) <= num_tokens else (low, kept)
    return replace(talk, requests=tuple(_shortened(request, low) for request in talk.requests))


def _system(request: Request) -> str:
    return str(request.body["messages"][0]["content"])


def _shortened(request: Request, num_characters: int) -> Request:
    """So much of the system prompt is left: its beginning and its end."""
    system, *others = request.body["messages"]
    text, end = _system(request), num_characters // 2
    kept = text[: num_characters - end] + text[len(text) - end :]
    return replace(request, body={**request.body, "messages": [{**system, "content": kept}, *others]})


def conversations(model: Path, clients: Sequence[str], num_turns: int, num_tokens: int) -> dict[str, Conversation]:
    """What these clients sent, cut to the model's context; empty without recordings. Raises BenchmarkError where the
    last prompt does not fit."""
    if (shared := shared_folder()) is None:
        return {}
    reader = ModelFree(model, is_cuttable=True)

    def count(request: Request) -> int:
        reader.forget()
        return reader.serve(request, 0, 1).num_prompt_tokens

    recorded = {talk.client: talk for talk in read_recordings(shared)}
    found = {}
    for client in clients:
        talk = recorded[CLIENTS[client]]
        talk = cut_to(replace(talk, requests=talk.requests[:num_turns]), num_tokens, count)
        if count(talk.requests[-1]) + ANSWER_TOKENS > MAX_CONTEXT_TOKENS:
            raise BenchmarkError(f"{client}: the last prompt is longer than the model's context")
        found[client] = talk
    return found


def body_of(request: Request) -> dict[str, Any]:
    """The client's body, with a short answer drawn greedily."""
    dropped = ("max_completion_tokens", "stream", "stream_options")
    body = {name: value for name, value in request.body.items() if name not in dropped}
    return {**body, **GREEDY, "model": "local", "max_tokens": ANSWER_TOKENS}


# --- what is measured -------------------------------------------------------------------------------------------------


def asked(port: int, request: Request) -> tuple[Asked, str]:
    """Ask, and read to the end; what it took, and the answer. Where the model says nothing its first token is the one
    that ends the answer. Raises BenchmarkError for an error answer."""
    with Client(port) as client:
        stream = client.send(body_of(request))
        client.run_until(lambda: stream.ended_at is not None)
    usage = stream.usage()
    first_at = stream.first_text_at or stream.ended_at
    assert first_at is not None
    num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    answer = "".join(text for _, text in stream.texts())
    return Asked(first_at - stream.sent_at, usage["prompt_tokens"], num_cached_tokens), answer


def question_behind(request: Request, answer: str) -> Request:
    """What a person asks on."""
    said = [{"role": "assistant", "content": answer}, {"role": "user", "content": QUESTION}]
    return replace(request, body={**request.body, "messages": [*request.body["messages"], *said]})


def session(server: TalkingServer, talk: Conversation, is_proxied: bool) -> Session:
    """The conversation from its beginning, on a server that knows nothing of it."""

    def ask(request: Request) -> tuple[Asked, str]:
        port = server.proxy_port if is_proxied else server.port
        assert port is not None
        return asked(port, request)

    def ask_cold(request: Request) -> Asked:
        forget(server.port)
        cold, _ = ask(request)
        if cold.num_cached_tokens:
            raise BenchmarkError(f"{cold.num_cached_tokens} tokens of a cold prompt were known")
        return cold

    first, *others, last = talk.requests
    cold, warm, second = ask_cold(first), list[Asked](), others[0]
    settle(server.port)
    one, answer = ask(second)
    warm.append(one)
    settle(server.port)
    question, _ = ask(question_behind(second, answer))
    for request in others[1:]:
        settle(server.port)
        warm.append(ask(request)[0])
    server.kill_and_start()
    killed, _ = ask(last)
    settle(server.port)
    return Session(cold, question, tuple(warm), killed, ask_cold(last))


def measured(
    model: Path, library: Path | None, talks: Mapping[str, Conversation], num_rounds: int, *, with_proxy: bool
) -> list[Measured]:
    """All clients through each port: without LiteLLM nothing waits for it behind a kill."""
    given = {"BLAS_LIBRARY": str(library) if library is not None else "off"}
    found = []
    for is_proxied in (False, True) if with_proxy else (False,):
        with (
            tempfile.TemporaryDirectory(prefix="kvserve-bench-") as folder,
            TalkingServer(model, Path(folder), given, with_proxy=is_proxied) as server,
        ):
            port = "4000" if is_proxied else "8080"
            for client, talk in talks.items():
                sessions = tuple(session(server, talk, is_proxied) for _ in range(num_rounds))
                found.append(Measured(client, port, sessions))
                print(table(found[-1:]), file=sys.stderr, flush=True)
    return found


# --- what is told -----------------------------------------------------------------------------------------------------


def figures(all_measured: Sequence[Measured], *, is_fast: bool) -> list[Figure]:
    """Warm and after the kill, to cold. The bounds are those of a machine with a fast BLAS, at 6,000 tokens."""
    found = []
    for each in all_measured:
        has_bounds = is_fast and each.is_long
        warm_bound = WARM_BOUND if has_bounds else None
        question = [(session, session.question) for session in each.sessions]
        warm = [(session, one) for session in each.sessions for one in session.warm]
        killed = [(session, session.killed) for session in each.sessions]
        where = f"{each.client}, port {each.port}: first token"
        found += [
            _figure(f"{where} behind the model's own answer : cold", question, warm_bound),
            _figure(f"{where} warm : cold", warm, warm_bound),
            _figure(f"{where} after SIGKILL : cold", killed, KILLED_BOUND if has_bounds else None),
        ]
    return found


def _figure(name: str, asked_in: Sequence[tuple[Session, Asked]], bound: Bound | None) -> Figure:
    seconds = median(one.seconds for _, one in asked_in)
    ratios = tuple(session.ratio(one) for session, one in asked_in)
    new = median(one.num_new_tokens for _, one in asked_in)
    absolute = f"{seconds:.2f} : {seconds / median(ratios):.1f} s, {new:.0f} tokens computed"
    return Figure("real_text", name, "", ratios, bound, absolute)


def table(all_measured: Sequence[Measured]) -> str:
    """The medians, a row for each client and port."""
    lines = [
        "| client, port | prompt | cold | question | recorded turn | after SIGKILL |",
        "|---|---|---|---|---|---|",
    ]
    for each in all_measured:
        cold = [session.cold for session in each.sessions]
        question = [session.question for session in each.sessions]
        warm = [one for session in each.sessions for one in session.warm]
        killed = [session.killed for session in each.sessions]
        longest = max(one.num_prompt_tokens for one in killed)
        lengths = f"{cold[0].num_prompt_tokens:,} to {longest:,} tokens"
        cells = " | ".join(
            f"{median(one.seconds for one in some):.2f} s ({_new(some)} tokens)" for some in (question, warm, killed)
        )
        lines.append(
            f"| {each.client}, {each.port} | {lengths} | {median(one.seconds for one in cold):.1f} s | {cells} |"
        )
    return "\n".join(lines)


def _new(some: Sequence[Asked]) -> str:
    return f"{median(one.num_new_tokens for one in some):.0f}"


def run(num_rounds: int) -> list[Figure]:
    """With a fast BLAS where there is one, else only what is read in minutes, on one port; nothing where model or
    recordings are not to be had."""
    library = fast_library("auto")
    model = talking_model("float32" if library is not None else "4-bit")
    if model is None:
        return []
    clients = list(CLIENTS) if library is not None else SHORT_CLIENTS
    talks = conversations(model, clients, NUM_TURNS, CONTEXT_TOKENS)
    if not talks:
        return []
    is_fast = library is not None
    return figures(measured(model, library, talks, num_rounds, with_proxy=is_fast), is_fast=is_fast)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.real_text", description="First tokens on real text.")
    parser.add_argument("--blas", default="auto", metavar="FILE", help="auto, off (the wheel's), or a library's file")
    parser.add_argument("--client", action="append", choices=CLIENTS, help="all, or PI where there is no fast BLAS")
    parser.add_argument(
        "--turns", type=int, default=NUM_TURNS, metavar="N", help="requests of a session, three at least"
    )
    parser.add_argument("--tokens", type=int, default=CONTEXT_TOKENS, metavar="N", help="of the first prompt at most")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each session")
    parser.add_argument("--no-proxy", action="store_true", help="port 8080 only")
    parser.add_argument("--save", action="store_true", help="write the tables to benchmarks/results/real_text.md")
    given = parser.parse_args(argv)
    if given.turns < 3:
        parser.error("--turns must be at least 3")
    load_before = os.getloadavg()
    library = fast_library(given.blas)
    model = talking_model("float32" if library is not None else "4-bit")
    clients = given.client or (list(CLIENTS) if library is not None else SHORT_CLIENTS)
    talks = conversations(model, clients, given.turns, given.tokens) if model is not None else {}
    if model is None or not talks:
        print("There is nothing to measure with: no model, or no recordings.", file=sys.stderr)
        return 1
    sessions = measured(model, library, talks, given.rounds, with_proxy=not given.no_proxy)
    found = figures(sessions, is_fast=library is not None)
    head = f"{machine(load_before)} {library.name + ', float32' if library else 'The BLAS of the wheel, 4 bits'}."
    text = f"{head}\n\n{table(sessions)}\n\n{markdown_table(found)}"
    print(text)
    if given.save:
        RESULTS.write_text(f"# First tokens on real text\n\n{text}\n", "utf-8")
    return int(any(figure.is_missed for figure in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
