"""Traffic of OpenClaw's shape against any server: a long system prompt, twelve tools, and a last user message that is
gone from the next request. It knows HTTP only."""

import argparse
import secrets
from dataclasses import replace

from probing import openclaw, pi
from probing.openclaw import SystemPrompt
from probing.options import Target, make_parser, share, target_of
from probing.report import REPLY_HEADER, Expectations, Table, expect_unmoved_counters, reply_cells, run
from probing.wire import Call, Json, Reply

FIRST_JUDGED_TURN = 3
NUM_TURNS = 6
CHARS_PER_TOKEN = 12
"""More than any tokenizer puts into one token of such text, so that a bound in tokens is on the safe side."""


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(
        f"Lead a conversation of {NUM_TURNS} requests in OpenClaw's shape. Expected: from turn 3 on at least the given "
        "share of the prompt is reused although each request ends with a message that the next one lacks; call ids "
        "are letters and digits; a new date in the system prompt reaches the model; no correctness counter moves "
        "(hybrid_trim_miss: after the first turn)."
    )
    parser.add_argument("--min-reuse", type=share, default=0.97, metavar="PERCENT", help="from turn 3 on (97)")
    parser.add_argument(
        "--system-chars", type=int, default=48_000, metavar="N", help="length of the system prompt (%(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of an answer (%(default)s)")
    return parser.parse_args()


def follow(reply: Reply, turn: int) -> list[Json]:
    """What the client adds after an answer: its echo, and results of its calls or a question with a call of our own."""
    echo = openclaw.echoed(reply)
    messages = [] if echo is None else [echo]
    calls = [replace(call, call_id=openclaw.plain_id(call.call_id)) for call in reply.calls]
    if not calls:
        calls = [openclaw.own_call(turn)]
        messages += [openclaw.user_text(turn, "Go on with the next file."), pi.own_call_message(calls[0])]
    return [*messages, *(result(call, turn) for call in calls)]


def result(call: Call, turn: int) -> Json:
    """What a tool printed."""
    return pi.tool_message(call, f"{turn * 7} notes/{turn}.txt")


def lead(target: Target, options: argparse.Namespace, prompt: SystemPrompt) -> Expectations:
    """All turns, judged as they come, and at last one with a new date."""
    expectations = Expectations()
    table = Table("turn", *REPLY_HEADER, "")
    messages = [openclaw.user_text(0, "List the files and read the notes.")]
    since = target.own.counters() if target.own is not None else {}
    replies: list[Reply] = []
    for turn in range(1, NUM_TURNS + 1):
        replies.append(target.chat.chat(openclaw.chat_body(target.model, prompt, messages, options.max_tokens)))
        table.add(str(turn), *reply_cells(replies[-1]), "")
        if turn == 1 and target.own is not None:
            since["hybrid_trim_miss"] = target.own.counters()["hybrid_trim_miss"]
        if turn < NUM_TURNS:
            messages += follow(replies[-1], turn)
    until = target.own.counters() if target.own is not None else {}
    tomorrow = replace(prompt, date="2026-11-21")
    fresh = target.chat.chat(openclaw.chat_body(target.model, tomorrow, messages, options.max_tokens))
    table.add(str(NUM_TURNS), *reply_cells(fresh), "with a new date")
    judge(expectations, replies, options.min_reuse)
    expect_new_date(expectations, fresh, tomorrow)
    if target.own is not None:
        expect_unmoved_counters(expectations, since, until, when="in this conversation")
    return expectations


def judge(expectations: Expectations, replies: list[Reply], min_reuse: float) -> None:
    """The reuse of the later turns, and the form of call ids."""
    for turn, reply in enumerate(replies, start=1):
        if turn >= FIRST_JUDGED_TURN:
            expectations.expect(
                reply.reuse >= min_reuse, f"turn {turn} reuses at least {min_reuse:.1%} ({reply.reuse:.1%})"
            )
        for call in reply.calls:
            expectations.expect(call.call_id.isalnum(), f"turn {turn}: the call id {call.call_id!r} is alphanumeric")


def expect_new_date(expectations: Expectations, reply: Reply, prompt: SystemPrompt) -> None:
    """Expect that what stands behind the changed date was computed: otherwise the model saw the old one."""
    num_computed = reply.num_prompt_tokens - reply.num_cached_tokens
    wanted = prompt.num_chars_after_date // CHARS_PER_TOKEN
    expectations.expect(
        num_computed >= wanted,
        f"the new date is computed, with the {wanted:,} tokens or more behind it ({num_computed:,})",
    )


def main() -> int:
    """Lead the conversation and judge it."""
    options = parse_options()
    prompt = SystemPrompt(options.system_chars, secrets.token_hex(4), "2026-11-20")
    return lead(target_of(options), options, prompt).exit_code


if __name__ == "__main__":
    run(main)
