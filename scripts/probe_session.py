"""Four conversations that show how a server treats a history that stays, drifts, is edited or gets an insertion.

Every assistant turn in the history is the script's own, so that every server is asked the same. It knows HTTP, and the
server's trace files where it is told their place.
"""

import argparse
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from probing import pi
from probing.drift import DRIFTS
from probing.options import Target, make_parser, target_of
from probing.report import REPLY_HEADER, Expectations, Table, reply_cells, run
from probing.traces import events, trace_files
from probing.wire import Json, ProbeError, Reply

NUM_TURNS = 4
EDITED_TURN = 2
"""The turn whose newest message, a tool's result, is edited later, or gets another message behind it."""

TRACE_SECONDS = 5.0
"""A server may write a request's trace after its client has heard the end."""


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(
        "Send a growing conversation. normal: everything is reused. drift: everything is reused although fields move "
        "that mean nothing. semantic: after an edit of one character of an old tool result, reuse ends before it and "
        "the answer is that of a server that continues nothing. insert: the same for a message put into the middle."
    )
    parser.add_argument("mode", choices=[*MODES, "all"], help="which conversation")
    parser.add_argument(
        "--clear-cache",
        action="store_true",
        help="semantic and insert: compare with an emptied cache too (DELETE /v1/cache forgets all it holds)",
    )
    parser.add_argument(
        "--slack-tokens",
        type=int,
        default=24,
        metavar="N",
        help="what a turn may lose at the end of the prompt before it, where the answer began (%(default)s)",
    )
    parser.add_argument(
        "--system-chars", type=int, default=4000, metavar="N", help="length of project instructions (%(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=24, metavar="N", help="of an answer (%(default)s)")
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="PATH",
        help="a folder of the server's trace files (LOG_ROOT/<date>): expect every request there, and print its causes",
    )
    return parser.parse_args()


@dataclass(slots=True)
class Probe:
    """One run of the script: where it asks, and what it has found so far."""

    target: Target
    options: argparse.Namespace
    expectations: Expectations = field(default_factory=Expectations)
    replies: list[Reply] = field(default_factory=list)
    session: str = field(default_factory=lambda: f"probe-{secrets.token_hex(4)}")
    """The answers in the history are the script's own, so nothing but a session's name says whose history it is."""

    def ask(self, messages: Sequence[Json], **fields: object) -> Reply:
        """One greedy answer without thinking, which templates drop from history in ways of their own."""
        fields = {"session_id": self.session, **fields}
        reply = self.target.chat.chat(
            pi.chat_body(self.target.model, messages, max_tokens=self.options.max_tokens, thinking=False, **fields)
        )
        self.replies.append(reply)
        return reply

    def expect_prompt_reused(self, reply: Reply, before: Reply, name: str) -> None:
        """Expect that all of an earlier prompt was reused, but for the place where its answer began."""
        wanted = before.num_prompt_tokens - self.options.slack_tokens
        self.expectations.expect(
            reply.num_cached_tokens >= wanted,
            f"{name}: {reused(reply, before)}",
        )

    def expect_own_answer(self, messages: Sequence[Json], reply: Reply) -> None:
        """Expect the answer that the server gives when it must not continue a record, and where allowed a cold one."""
        plain = self.ask(messages, cache_mode="prefix")
        self.expectations.expect(plain.said == reply.said, 'the answer is the one of "cache_mode": "prefix"')
        if self.options.clear_cache:
            if self.target.own is None:
                raise ProbeError("--clear-cache needs --server-url")
            self.target.own.clear_cache()
            cold = self.ask(messages)
            self.expectations.expect(cold.num_cached_tokens == 0, "nothing is reused after DELETE /v1/cache")
            self.expectations.expect(cold.said == reply.said, "the answer is the one of an empty cache")


def conversation(system_chars: int) -> list[list[Json]]:
    """The messages of each request of a new conversation: a question, a call and its result, and the same once more."""
    messages = [pi.system_message(system_chars, secrets.token_hex(4))]
    requests = []
    for number in range(1, NUM_TURNS + 1):
        if number % 2:
            messages.append(pi.user_message(f"Count the lines of the notes, part {number}."))
        else:
            call = pi.own_call(number)
            messages += [pi.own_call_message(call), pi.tool_message(call, f"{number * 7} notes/{number}.txt")]
        requests.append(list(messages))
        if not number % 2:
            messages.append({"role": "assistant", "content": f"Part {number} is counted."})
    return requests


def lead(probe: Probe, requests: Sequence[Sequence[Json]]) -> list[Reply]:
    """Send one request after the other and print what was reused."""
    table = Table("turn", *REPLY_HEADER)
    replies = []
    for number, messages in enumerate(requests, start=1):
        replies.append(probe.ask(messages))
        table.add(str(number), *reply_cells(replies[-1]))
    return replies


def normal(probe: Probe) -> None:
    """A history that only grows."""
    replies = lead(probe, conversation(probe.options.system_chars))
    for number, (before, reply) in enumerate(pairwise(replies), start=2):
        probe.expect_prompt_reused(reply, before, f"turn {number}")


def drift(probe: Probe) -> None:
    """One conversation per field that moves."""
    for name, drifted in DRIFTS.items():
        print(f"moving: {name}")
        requests = conversation(probe.options.system_chars)
        replies = lead(probe, [drifted(messages, number) for number, messages in enumerate(requests, start=1)])
        if (explanation := explain(probe, replies[-1])) is not None:
            rules = ", ".join(explanation.get("rules") or ())
            probe.expectations.expect(bool(rules), f"{name}: the explanation names the rules that fired ({rules})")
        for number, (before, reply) in enumerate(pairwise(replies), start=2):
            probe.expect_prompt_reused(reply, before, f"{name}, turn {number}")


def semantic(probe: Probe) -> None:
    """One character of an old tool result changes."""
    requests = conversation(probe.options.system_chars)
    position = len(requests[EDITED_TURN - 1]) - 1
    result = requests[-1][position]
    edited = list(requests[-1])
    edited[position] = {**result, "content": "9" + result["content"][1:]}
    compare(probe, requests, edited, position)


def insert(probe: Probe) -> None:
    """A message appears in the middle of the history."""
    requests = conversation(probe.options.system_chars)
    position = len(requests[EDITED_TURN - 1])
    inserted = pi.user_message("Leave out the empty lines.")
    compare(probe, requests, [*requests[-1][:position], inserted, *requests[-1][position:]], position)


def compare(probe: Probe, requests: Sequence[Sequence[Json]], changed: Sequence[Json], position: int) -> None:
    """Lead the conversation, then send its last request with another message at this position, behind `EDITED_TURN`."""
    replies = lead(probe, requests)
    print("the same with the change:")
    reply = probe.ask(changed)
    Table("turn", *REPLY_HEADER).add(str(NUM_TURNS), *reply_cells(reply))
    if (explanation := explain(probe, reply)) is not None:
        difference = explanation.get("first_difference") or {}
        found = difference.get("message_index")
        probe.expectations.expect(found == position, f"the explanation finds message {position} changed ({difference})")
    seen = replies[EDITED_TURN - 1].num_prompt_tokens
    probe.expectations.expect(
        reply.num_cached_tokens <= seen,
        f"reuse ends at the change: {reply.num_cached_tokens:,} tokens, the changed turn had {seen:,}",
    )
    probe.expect_prompt_reused(reply, replies[EDITED_TURN - 2], "what stands before the change")
    again = probe.ask(requests[-1])
    probe.expect_prompt_reused(again, replies[-1], "the unchanged conversation, sent again")
    probe.expect_own_answer(changed, reply)


def reused(reply: Reply, before: Reply) -> str:
    """How much of what the server has seen was reused: the prompt before and its answer. More than that was computed
    ahead of this request."""
    num_seen = before.num_prompt_tokens + before.num_completion_tokens
    num_ahead = max(0, reply.num_cached_tokens - num_seen)
    ahead = f", and {num_ahead:,} that were computed ahead" if num_ahead else ""
    return f"{reply.num_cached_tokens - num_ahead:,} tokens reused of the {num_seen:,} seen before{ahead}"


def explain(probe: Probe, reply: Reply) -> Json | None:
    """What the server says of a request, None where it does not offer that."""
    explanation = probe.target.own.explain(reply.request_id) if probe.target.own is not None else None
    if explanation is None:
        print("--    /v1/cache/explain: not offered by this server")
    return explanation


def expect_traces(probe: Probe, folder: Path) -> None:
    """Expect an event of every request in the trace files, with the tokens that its answer told."""
    sent = {reply.request_id: reply for reply in probe.replies}
    end = time.monotonic() + TRACE_SECONDS
    while True:
        turns = [fields for file in trace_files([folder]) for name, fields in events(file) if name == "turn"]
        traced = [turn for turn in turns if turn.get("request_id") in sent]
        if len(traced) >= len(sent) or time.monotonic() > end:
            break
        time.sleep(0.2)
    causes = Counter(str(turn.get("cause")) for turn in traced)
    print("--    causes: " + ", ".join(f"{cause} ({number})" for cause, number in causes.most_common()))
    num_same = sum(
        (turn.get("num_prompt_tokens"), turn.get("num_cached_tokens"))
        == (reply.num_prompt_tokens, reply.num_cached_tokens)
        for turn in traced
        if (reply := sent[turn["request_id"]])
    )
    probe.expectations.expect(
        len(traced) == num_same == len(sent),
        f"{num_same} of {len(sent)} requests stand in the traces as they were answered",
    )


MODES: Mapping[str, Callable[[Probe], None]] = {
    "normal": normal,
    "drift": drift,
    "semantic": semantic,
    "insert": insert,
}


def main() -> int:
    """Lead the conversations that were asked for."""
    options = parse_options()
    probe = Probe(target_of(options), options)
    for name in MODES if options.mode == "all" else (options.mode,):
        print(f"=== {name}: {MODES[name].__doc__}")
        MODES[name](probe)
    if options.traces is not None:
        expect_traces(probe, options.traces)
    return probe.expectations.exit_code


if __name__ == "__main__":
    run(main)
