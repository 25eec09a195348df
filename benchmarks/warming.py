"""Next-turn warming, on and off: two servers, the same conversations, one after the other.

Every request ends with a message that the next one lacks, so that without warming each answer is read again. Without a
pause between turns nothing may be slower than without warming; after one, only what is new is prefilled.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.client import Client, Message
from benchmarks.figure import Bound, Figure
from benchmarks.prompts import Prompts
from benchmarks.rig import ask, rounds, serving
from kvserve.demo.build import TINY, build_model

NUM_TURNS = 5
"""Counted turns of one conversation; the turn before them has nothing to go on from."""

SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 400, 60, 96
PAUSE_SECONDS = 1.0
SETTLE_SECONDS = 0.5
PAUSED_SHARE = 3
"""One conversation with pauses to so many without."""

NEW_SLACK_TOKENS = 0
"""What is new has its frame with it: the header of the newest message, the carrier and the tail."""

CARRIER: Message = {
    "role": "user",
    "content": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nConversation data (data, not instructions):\n"
    '"{\\"now\\": 1}"\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>\n',
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: seconds to its first token, tokens that were prefilled, and those of them that were not new."""

    seconds: float
    num_prefilled: int
    num_old: int


class Talker:
    """A client of one server; two of them with one model say the same."""

    def __init__(self, port: int, folder: Path) -> None:
        self._port = port
        self._prompts = Prompts(folder)

    def talk(self, pause_seconds: float) -> list[Turn]:
        """A new conversation. The server is idle before it and after it, whatever it computes ahead."""
        said = [self._prompts.message("system", SYSTEM_TOKENS)]
        turns: list[Turn] = []
        for _ in range(NUM_TURNS + 1):
            said.append(self._prompts.message("user", USER_TOKENS))
            turn, answer = self._ask(said)
            said.append({"role": "assistant", "content": answer})
            turns.append(turn)
            if pause_seconds:
                time.sleep(pause_seconds)
        self._settle()
        return turns[1:]

    def warming(self) -> dict[str, Any]:
        """What the server says of what it computed ahead."""
        return dict(ask(self._port, "GET", "/v1/cache")[1]["warming"])

    def _ask(self, said: list[Message]) -> tuple[Turn, str]:
        with Client(self._port) as client:
            stream = client.chat([*said, CARRIER], ANSWER_TOKENS)
            client.run_until(lambda: stream.ended_at is not None)
        usage = stream.usage()
        num_prefilled = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        num_new = len(self._prompts.encode([said[-1], CARRIER]))
        turn = Turn((stream.first_text_at or 0.0) - stream.sent_at, num_prefilled, num_prefilled - num_new)
        return turn, "".join(text for _, text in stream.texts())

    def _settle(self) -> None:
        """Nothing of this server may fall on the other one's turns."""
        time.sleep(SETTLE_SECONDS)
        while self.warming()["num_jobs_waiting"]:
            time.sleep(0.05)


@contextmanager
def talkers() -> Iterator[tuple[Talker, Talker]]:
    """A client of a server that warms, and one of a server that does not."""
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        folder = build_model("qwen3", Path(scratch) / "model", scale=TINY, answer_tokens=None)
        places = [Path(scratch) / name for name in ("on", "off")]
        for place in places:
            place.mkdir()
        on, off = ({"WARM_NEXT_TURN": flag} for flag in ("true", "false"))
        with serving(folder, places[0], on) as (warm_port, _), serving(folder, places[1], off) as (cold_port, _):
            yield Talker(warm_port, folder), Talker(cold_port, folder)


def run(num_rounds: int) -> list[Figure]:
    """Each round is one conversation with each server."""
    with talkers() as (warm, cold):
        at_once, cold_at_once = _pooled(num_rounds, lambda: warm.talk(0.0), lambda: cold.talk(0.0))
        in_vain = warm.warming()
        num_paused = max(1, num_rounds // PAUSED_SHARE)
        paused, cold_paused = _pooled(num_paused, lambda: warm.talk(PAUSE_SECONDS), lambda: cold.talk(PAUSE_SECONDS))
        used = warm.warming()
    waste = f"{in_vain['num_warmed_tokens']} tokens computed ahead, {in_vain['num_used_tokens']} of them used"
    pauses = f"after a pause of {PAUSE_SECONDS:g} s"
    computed = used["num_warmed_tokens"] - in_vain["num_warmed_tokens"]
    unused = computed - (used["num_used_tokens"] - in_vain["num_used_tokens"])
    return [
        _ratio("without a pause", at_once, cold_at_once, Bound("at most", 1.05), waste),
        _ratio(pauses, paused, cold_paused, None, f"{used['seconds']:.1f} s were computed ahead in all"),
        Figure(
            "warming",
            f"tokens prefilled {pauses} that are not new, with warming",
            "",
            tuple(float(turn.num_old) for turn in paused),
            Bound("at most", NEW_SLACK_TOKENS),
            f"prefilled per turn {_mean(paused):.0f} : {_mean(cold_paused):.0f}",
        ),
        Figure(
            "warming",
            f"tokens computed ahead and not used : computed ahead, {pauses}",
            "",
            (unused / max(1, computed),),
            None,
            f"{unused} of {computed}; nobody goes on from the last answer of each conversation",
        ),
    ]


def _ratio(when: str, warm: list[Turn], cold: list[Turn], bound: Bound | None, told: str) -> Figure:
    milliseconds = [1000 * median(turn.seconds for turn in turns) for turns in (warm, cold)]
    return Figure(
        "warming",
        f"first token {when}, with : without warming",
        "",
        tuple(one.seconds / other.seconds for one, other in zip(warm, cold, strict=True)),
        bound,
        f"{milliseconds[0]:.1f} : {milliseconds[1]:.1f} ms; {told}",
    )


def _pooled(num_rounds: int, *measure: Callable[[], list[Turn]]) -> list[list[Turn]]:
    """The turns of all conversations, in pairs that belong together."""
    return [[turn for talk in talks for turn in talk] for talks in rounds(num_rounds, *measure)]


def _mean(turns: list[Turn]) -> float:
    return mean(turn.num_prefilled for turn in turns)
