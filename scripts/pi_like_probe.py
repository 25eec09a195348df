"""A tool loop as the PI coding agent leads it, against any server: how much of each prompt was reused.

The script plays the client: it sends, echoes the answer the way PI does, and makes up what the tools return. It knows
HTTP only.
"""

import argparse
import secrets

from probing import pi
from probing.options import Target, make_parser, share, target_of
from probing.png import picture_url
from probing.report import (
    REPLY_HEADER,
    Counters,
    Expectations,
    Table,
    expect_unmoved_counters,
    reply_cells,
    run,
)
from probing.wire import Json, Reply

FIRST_JUDGED_TURN = 3
IMAGE_TURN, MIN_IMAGE_REUSE = 2, 0.94
QUESTIONS = ("List the files of this project.", "Go on with the next file.", "And the one after that.")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(
        "Lead a PI-shaped tool loop and print the reuse of each turn. Expected: from turn 3 on at least the given "
        "share of the prompt is reused, and no correctness counter moves (hybrid_trim_miss: after the first turn). "
        "Run it on a server that nobody else uses, or the counters mean nothing."
    )
    parser.add_argument("--turns", type=int, default=6, metavar="N", help="requests to send (%(default)s)")
    parser.add_argument("--min-reuse", type=share, default=0.97, metavar="PERCENT", help="from turn 3 on (97)")
    parser.add_argument(
        "--own-calls",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="where the model calls no tool, insert a call of the script's own, so that any model gives a tool loop",
    )
    parser.add_argument(
        "--system-chars", type=int, default=12_000, metavar="N", help="length of project instructions (%(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="of an answer (%(default)s)")
    parser.add_argument(
        "--thinking", action=argparse.BooleanOptionalAction, default=True, help="what the request asks for"
    )
    parser.add_argument(
        "--image",
        type=int,
        nargs="?",
        const=320,
        metavar="SIDE",
        help="put a picture of so many pixels a side (%(const)s) into the first question; turn 2 is judged too (94)",
    )
    options = parser.parse_args()
    if options.turns < FIRST_JUDGED_TURN:
        parser.error(f"--turns must be at least {FIRST_JUDGED_TURN}, the first turn that is judged")
    return options


class Conversation:
    """The messages of one agent, continued the way PI does it."""

    def __init__(self, system_chars: int, *, own_calls: bool, image: int | None = None) -> None:
        self._own_calls = own_calls
        self._num_questions = 0
        self._num_results = 0
        self.messages: list[Json] = [pi.system_message(system_chars, secrets.token_hex(4))]
        self._ask()
        if image is not None:
            url = picture_url(image, secrets.randbelow(2**31))
            self.messages[-1]["content"].append({"type": "image_url", "image_url": {"url": url}})

    def take(self, reply: Reply) -> str:
        """Append the echo of the answer and what follows it; returns in words what that was."""
        if (message := pi.echoed(reply)) is not None:
            self.messages.append(message)
        if reply.calls:
            self.messages += [pi.tool_message(call, self._result()) for call in reply.calls]
            return ", ".join(call.name for call in reply.calls)
        self._ask()
        if not self._own_calls:
            return "a question"
        call = pi.own_call(self._num_questions)
        self.messages += [pi.own_call_message(call), pi.tool_message(call, self._result())]
        return f"{call.name} (the script's own)"

    def _ask(self) -> None:
        self.messages.append(pi.user_message(QUESTIONS[min(self._num_questions, len(QUESTIONS) - 1)]))
        self._num_questions += 1

    def _result(self) -> str:
        self._num_results += 1
        return f"notes/{self._num_results}.txt has {self._num_results * 7} lines"


def lead(target: Target, options: argparse.Namespace) -> tuple[list[Reply], list[Counters]]:
    """All turns; the counters before the first one and after each."""
    conversation = Conversation(options.system_chars, own_calls=options.own_calls, image=options.image)
    replies: list[Reply] = []
    counters = [target.own.counters()] if target.own is not None else []
    table = Table("turn", *REPLY_HEADER, "then")
    for number in range(1, options.turns + 1):
        body = pi.chat_body(
            target.model, conversation.messages, max_tokens=options.max_tokens, thinking=options.thinking
        )
        replies.append(target.chat.chat(body))
        if target.own is not None:
            counters.append(target.own.counters())
        table.add(str(number), *reply_cells(replies[-1]), conversation.take(replies[-1]))
    return replies, counters


def judge(replies: list[Reply], counters: list[Counters], min_reuse: float, *, has_image: bool) -> int:
    """Print the verdicts; returns the exit code."""
    expectations = Expectations()
    if has_image:
        reuse = replies[IMAGE_TURN - 1].reuse
        expectations.expect(
            reuse >= MIN_IMAGE_REUSE, f"image turn {IMAGE_TURN} reuses at least {MIN_IMAGE_REUSE:.1%} ({reuse:.1%})"
        )
    for number, reply in enumerate(replies, start=1):
        if number >= FIRST_JUDGED_TURN:
            expectations.expect(
                reply.reuse >= min_reuse, f"turn {number} reuses at least {min_reuse:.1%} ({reply.reuse:.1%})"
            )
    if counters:
        # A session's first turn may honestly lose what another session left unusable.
        since = {**counters[0], "hybrid_trim_miss": counters[1]["hybrid_trim_miss"]}
        expect_unmoved_counters(expectations, since, counters[-1], when="in this conversation")
    return expectations.exit_code


def main() -> int:
    """Lead the conversation and judge it."""
    options = parse_options()
    replies, counters = lead(target_of(options), options)
    return judge(replies, counters, options.min_reuse, has_image=options.image is not None)


if __name__ == "__main__":
    run(main)
