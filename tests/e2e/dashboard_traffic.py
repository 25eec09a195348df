"""What the dashboard's tests and screenshots show: conversations that are led with a tiny model, by clients that do
what costs reuse, and a past of many requests that is put where the server keeps what ended.

That past is numbers only, as they are kept: nothing in it was computed, and it shows no more than that the page bears
so much and finds it again.
"""

import random
import time
from collections.abc import Sequence
from typing import Any

from kvserve.observe.request_history import MINUTE_SECONDS, MinuteSums
from tests.observe.past import ended
from tests.serving import AppUnderTest

WORDS = ("window", "piano", "door", "drum", "stair", "river", "mill", "boat", "letter", "baker", "garden", "lamp")
CLIENTS = (
    "claude-cli/2.1.331 (external, cli)",
    "codex_cli_rs/0.169.0 (Linux)",
    "opencode/1.18.33",
    "pi/0.87.1",
    "OpenAI/Python 1.109.1",
)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": f"It can {name}.", "parameters": {"type": "object"}}}
    for name in ("read", "write", "search", "run")
]


def text(number: int, num_words: int) -> str:
    """Words that are the same for the same number."""
    drawn = random.Random(number)
    return " ".join(drawn.choice(WORDS) for _ in range(num_words)) + "."


class Talker:
    """A client that leads one conversation. `clock`: its system prompt tells the time, which moves with each third
    turn; `edits`: each fourth turn changes the first question; `tools`: a tool's description is another one in each
    third turn."""

    def __init__(self, app: AppUnderTest, number: int, num_words: int, habit: str = "") -> None:
        self._app = app
        self._number = number
        self._habit = habit
        self._system = f"You are helper {number % 3}. {text(number % 3, num_words)}"
        self._history: list[dict[str, str]] = []
        self._num_turns = 0

    def turn(self) -> None:
        """One more question."""
        self._num_turns += 1
        if self._habit == "edits" and self._num_turns % 4 == 0:
            self._history[0] = {"role": "user", "content": f"Rather: {text(self._num_turns, 20)}"}
        self._history.append({"role": "user", "content": text(100 * self._number + self._num_turns, 30)})
        clock = f" It is 12:{self._num_turns // 3:02d}:07 now." if self._habit == "clock" else ""
        tools = {"tools": self._tools()} if self._habit == "tools" else {}
        said = self._app.chat(
            [{"role": "system", "content": f"You help.{clock} {self._system}"}, *self._history],
            session_id=f"work-{self._number}",
            enable_thinking=False,
            max_tokens=12,
            headers={"User-Agent": CLIENTS[self._number % len(CLIENTS)]},
            **tools,
        )
        self._history.append({"role": "assistant", "content": said.content})

    def _tools(self) -> list[dict[str, Any]]:
        changed = {**TOOLS[0]["function"], "description": f"It can read, version {self._num_turns // 3}."}
        return [{"type": "function", "function": changed}, *TOOLS[1:]]


HABITS = ("clock", "", "edits", "", "tools", "", "", "")


def lead(app: AppUnderTest, *, num_sessions: int, num_turns: int, num_words: int) -> None:
    """Conversations beside one another, turn by turn."""
    talkers = [Talker(app, number, num_words, HABITS[number % len(HABITS)]) for number in range(num_sessions)]
    for _ in range(num_turns):
        for talker in talkers:
            talker.turn()


CAUSES: Sequence[dict[str, Any]] = (
    {"cause": "nothing lost", "summary": "All that was known of this prompt was reused."},
    {
        "cause": "message changed",
        "role": "system",
        "looks_like": "a time",
        "summary": "The client sent another text than before from message 0 (system), character 53 on. It looks like a "
        "time.",
        "remedy": "The system prompt has a time at character 53 that is another one than before: have the client leave "
        "it out, keep it still within a conversation, or say it in the newest message.",
    },
    {
        "cause": "message changed",
        "role": "user",
        "summary": "The client sent another text than before from message 4 (user), character 9 on.",
        "remedy": "Append to the history instead of changing it.",
    },
)


def put_past(app: AppUnderTest, *, num_requests: int, num_sessions: int) -> None:
    """Requests of the last hours, spread over sessions, into what the server keeps of those that ended."""
    history, drawn, now = app.app.observability._history, random.Random(7), time.time()
    for number in range(num_requests):
        session = number % num_sessions
        num_prompt = 2_000 + 150 * (number // num_sessions)
        is_miss = drawn.random() < 0.1
        num_lost = drawn.choice((70, 1_711)) if is_miss else 0
        why = CAUSES[1 if num_lost > 1_000 else 2] if is_miss else CAUSES[0]
        at = now - 6 * 3_600 * (1 - number / num_requests)
        num_cached = num_prompt - 150 - num_lost
        row = ended(
            f"reqpast{number:017d}",
            ended_at=round(at, 1),
            session=f"past-{session}-0123456789ab",
            conversation=f"{session:012x}",
            client=CLIENTS[session % len(CLIENTS)].split(" (")[0],
            num_prompt_tokens=num_prompt,
            num_cached_tokens=num_cached,
            num_prefilled_tokens=num_prompt - num_cached,
            num_generated_tokens=drawn.randrange(20, 400),
            first_token_seconds=0.4 + num_lost / 500,
            prefill_rate=512.0,
            decode_rate=round(20 + 5 * drawn.random(), 1),
            seconds_saved=num_cached / 512,
            end="stop",
            num_lost_tokens=num_lost,
            seconds_lost=num_lost / 512,
            branch=session + 1,
            **why,
        )
        history.add(row, on_disk=True)
        tokens = row.num_prompt_tokens, row.num_cached_tokens, row.num_generated_tokens
        history.count(MinuteSums(int(at) // MINUTE_SECONDS, 1, *tokens, num_cached / 512, num_prompt - num_cached))
