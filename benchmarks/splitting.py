"""What an answer costs per token on its way from ids to events: detokenizer, splitter, stop strings.

Real vocabularies of 128k to 262k tokens, whose models write thinking, text and calls in their own form and in odd
tokens. Processor time; ten times as long an answer must cost ten times as much.
"""

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.client import BenchmarkError
from benchmarks.figure import Bound, Figure
from benchmarks.model_free import ModelFree
from benchmarks.recordings import REPOSITORY, Reply
from benchmarks.rig import rounds
from benchmarks.template_cases import user
from benchmarks.template_folders import SHARED, WHOLE_VOCABULARIES, whole_folder
from benchmarks.template_model import as_sent
from benchmarks.template_reference import Conversation
from benchmarks.template_scripts import tools_of, write_natively
from kvserve.core import (
    AnswerEvent,
    ContentDelta,
    GenerationDone,
    GenerationTiming,
    ReasoningDelta,
    ToolCallEnd,
    ToolSpec,
)
from kvserve.output.answer import AnswerReader
from kvserve.output.splitter import Splitter
from kvserve.output.stop import StopScanner

SHORT_BYTES, LONG_BYTES = 33_000, 330_000
"""About ten and a hundred thousand odd tokens."""

STOP_STRINGS = ("\n\nHuman:", "\nObservation:")
"""Looked for in every answer, found in none."""

MAX_GROWTH = 1.3
CALL_BYTES = 2_000
OTHER_SCRIPTS = "Größe, 東京の天気, 한글, שלום, مرحبا, ไทย, नमस्ते, 👩🏽‍💻 🏴‍☠️ ❤️, 𓀀𓁐𓂀 ꧁꧂ \ufeff\u2028, so to say. "
"""Characters of several tokens, and of as many byte tokens as they have bytes."""

_TAG_LIKE = re.compile(r"<(?![ =\d])")


@dataclass(frozen=True, slots=True)
class Spoken:
    """An answer as its model writes it behind the ids of a prompt."""

    model: ModelFree
    prompt: tuple[int, ...]
    opens_reasoning: bool
    tools: tuple[ToolSpec, ...]
    ids: tuple[int, ...]
    said: Reply

    @classmethod
    def of(cls, model: ModelFree, said: Reply) -> "Spoken":
        """What can be written of an answer."""
        asked = Conversation((user("Do it."),), tools_of(said), thinking=True)
        prompt = model.model.prompt(asked)
        ids = model.served.tokenizer.encode(prompt.shown)
        written = model.write(model.served, ids, said)
        return cls(model, ids, prompt.opens_reasoning, as_sent(asked)[1], written.ids, said)

    def seconds_per_token(self) -> float:
        """Of reading it token by token, for a client that takes each event at once."""
        started = time.thread_time()
        for _ in self._events():
            pass
        return (time.thread_time() - started) / len(self.ids)

    def _events(self) -> Iterator[Sequence[AnswerEvent]]:
        served = self.model.served
        splitter = Splitter(served.output_format, starts_in_reasoning=self.opens_reasoning, tools=self.tools)
        reader = AnswerReader(served.tokenizer.detokenizer(self.prompt), StopScanner(STOP_STRINGS), splitter)
        for token in self.ids:
            yield reader.feed([token])
        timing = GenerationTiming(0.0, 0.0, 0.0)
        yield reader.finish(GenerationDone("stop", len(self.prompt), 0, len(self.ids), timing))

    def check(self) -> None:
        """Raises BenchmarkError where another answer is read."""
        events = [event for events in self._events() for event in events]
        thought = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        text = "".join(event.text for event in events if isinstance(event, ContentDelta))
        ends = [event.call for event in events if isinstance(event, ToolCallEnd)]
        calls = [(call.name, json.loads(call.arguments)) for call in ends]
        wanted = [(name, json.loads(arguments)) for name, arguments in self.said.calls]
        if (thought.strip(), text.strip(), calls) != (self.said.reasoning.strip(), self.said.content.strip(), wanted):
            raise BenchmarkError(
                f"another answer was read: {len(thought)} + {len(text)} characters, {len(calls)} calls"
            )


def answers(num_bytes: int) -> Mapping[str, Reply]:
    """Answers of about this length, by what they are."""
    source = "\n".join(file.read_text("utf-8") for file in sorted(REPOSITORY.glob("kvserve/**/*.py")))
    text = _TAG_LIKE.sub("(", source)[:num_bytes]
    half, parts = num_bytes // 2, range(0, num_bytes, CALL_BYTES)
    others = "".join(f"{number}. {OTHER_SCRIPTS}" for number in range(num_bytes // len(OTHER_SCRIPTS.encode())))
    return {
        "thinking and text": Reply(text[:half], text[half:]),
        "other scripts": Reply(others[: len(others) // 2], others[len(others) // 2 :]),
        "one call": Reply(calls=(_call(text),)),
        "calls": Reply(calls=tuple(_call(text[start : start + CALL_BYTES]) for start in parts)),
    }


def _call(text: str) -> tuple[str, str]:
    return "write_file", json.dumps({"path": "a.py", "content": text})


def run(num_rounds: int) -> list[Figure]:
    """Per vocabulary and kind of answer: the cost of a token of a long answer : of a short one."""
    if SHARED is None:
        print("splitting: there are no real vocabularies here, nothing was measured", file=sys.stderr)
        return []
    return [figure for name in WHOLE_VOCABULARIES for figure in _figures(name, num_rounds)]


def _figures(name: str, num_rounds: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        folder = whole_folder(name, Path(scratch))
        model = ModelFree(folder, is_cuttable=True)
        sayable = write_natively(model, folder).sayable
        for kind, whole in answers(LONG_BYTES).items():
            said = sayable(whole)
            if len(said.calls) < len(whole.calls):
                continue  # its template writes one call alone
            short, long = (Spoken.of(model, each) for each in (sayable(answers(SHORT_BYTES)[kind]), said))
            short.check()
            long.check()
            yield _figure(name, kind, long, *rounds(num_rounds, short.seconds_per_token, long.seconds_per_token))


def _figure(name: str, kind: str, spoken: Spoken, short: Sequence[float], long: Sequence[float]) -> Figure:
    return Figure(
        "splitting",
        f"reading a token of an answer of {len(spoken.ids):,} : of a tenth of it, {kind}, {name}",
        "",
        tuple(mine / theirs for mine, theirs in zip(long, short, strict=True)),
        Bound("at most", MAX_GROWTH),
        f"{median(long) * 1e6:.1f} : {median(short) * 1e6:.1f} us",
    )
