"""Recorded sessions in closed loop on real vocabularies: the real server over HTTP, whose tiny real model is led: it
writes the recorded answers in its template's own form and in odd tokens.

    python -m benchmarks.vocabulary_loops [NAME ...] [--session NAME] [--requests] [--save] [--missing] [--seconds N]

What its client got is what it gives back. As much must be found again as the prompts have in common with what the model
read and wrote before, and as the oracle of `frozen.py` has where transformers renders the session; and the client must
have got what the model was to say, to the letter. Six turns of chats on the same vocabularies: `template_loops.py`.
"""

import argparse
import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.closed_loop import UNHEARD, answered
from benchmarks.echoes import Echoes
from benchmarks.figure import Bound, Figure
from benchmarks.frozen import FrozenOracle
from benchmarks.kept import WHOLE, KeptRows, Part
from benchmarks.led_server import LedServer, led_server
from benchmarks.model_free import Script
from benchmarks.real_vocabularies import TOLERANCE, possible_share
from benchmarks.recordings import (
    MESSAGES,
    Conversation,
    Reply,
    Request,
    Wire,
    blocks_said,
    items_said,
    read_recordings,
)
from benchmarks.reuse_oracle import Computed
from benchmarks.template_folders import SHARED, WHOLE_VOCABULARIES, add_weights, whole_folder
from benchmarks.template_model import load_model
from benchmarks.template_reference import Reference
from benchmarks.template_scripts import NativeScripts
from kvserve.requests.served_model import ServedModel

SESSIONS = ("pi-0.87-anthropic", "claude-code-2.1.330", "codex")
"""Two of `/v1/messages` and one of `/v1/responses`."""

HEADINGS = (
    *("vocabulary", "session", "requests", "prompt tokens", "reuse", "in common", "oracle", "answers to the letter"),
    "result",
)


@dataclass(frozen=True, slots=True)
class Row:
    """A session on one vocabulary without its first request, whose answer is one of `num_answers`; `oracle` None where
    transformers does not write all of its requests."""

    client: str
    name: str
    family: str
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_common_tokens: int
    oracle: float | None
    num_answers: int
    num_exact_answers: int

    @property
    def reuse(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    @property
    def common(self) -> float:
        return self.num_common_tokens / max(1, self.num_prompt_tokens)

    @property
    def lead(self) -> float:
        """Reuse - the most that was to be had."""
        return self.reuse - max(self.common, self.oracle or 0.0)

    @property
    def misses(self) -> tuple[str, ...]:
        """Which of its bounds it misses."""
        bounds = {"reuse": self.lead >= -TOLERANCE, "letters": self.num_exact_answers == self.num_answers}
        return tuple(name for name, is_kept in bounds.items() if not is_kept)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: tokens of its prompt, how many were found and how many are those of something before it; the share
    that the oracle has, None without one; whether its client got the model's words."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_common_tokens: int
    possible: float | None
    is_exact: bool


@dataclass
class Writer:
    """Writes what a server's model is to say, and remembers prompt and answer of each row."""

    scripts: NativeScripts
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def __call__(self, served: ServedModel, prompt: Sequence[int], reply: Reply) -> Script:
        script = self.scripts(served, prompt, reply)
        self.rows.append((tuple(prompt), script.tokens))
        return script


# --- one session -----------------------------------------------------------------------------------------------------


def play(
    talk: Conversation,
    server: LedServer,
    writer: Writer,
    oracle: FrozenOracle,
    between: Callable[[int], None] = lambda number: None,
) -> list[Asked]:
    """A session with a server that knows nothing; `between` is called before each request. Raises BenchmarkError where
    the server counts other tokens than its model reads."""
    server.forget()
    oracle.forget()
    echoes, computed, asked = Echoes(talk, may_call_less=True), Computed(), list[Asked]()
    for number, recorded in enumerate(talk.requests):
        between(number)
        request = replace(recorded, body=echoes.body(number))
        counted = server.count(request) if request.path == MESSAGES else None
        before = server.totals()
        parts = answered(server, request, echoes.said(number))
        after = server.totals()
        echoes.answered(number, parts)
        prompt, written = writer.rows[-1]
        num_prompt, num_cached = (after[name] - before[name] for name in ("num_prompt_tokens", "num_cached_tokens"))
        assert num_prompt == len(prompt) and counted in (None, num_prompt), "a count was not the prompt's"
        num_common = min(computed.longest_prefix(prompt), len(prompt) - 1)
        computed.add(prompt + written)
        is_exact = is_to_the_letter(request, _said(request, parts), echoes.said(number), writer.scripts)
        asked.append(Asked(num_prompt, num_cached, num_common, possible_share(oracle, recorded), is_exact))
    return asked


def _said(request: Request, parts: Sequence[Wire]) -> Reply:
    """What the client was told."""
    if not parts:
        return Reply()
    return blocks_said(parts) if request.path == MESSAGES else items_said(parts)


def is_to_the_letter(request: Request, heard: Reply, said: Reply | None, scripts: NativeScripts) -> bool:
    """Whether a client heard what its model was to say, as far as the template can write it, the client stayed, and it
    wants to be shown thinking. White space around thinking and words is the template's own form."""
    if request.reply is None:
        kept = scripts.sayable(said or Reply("I should wait."))
        return f"{kept.content}{UNHEARD}".strip().startswith(heard.content.strip())
    wanted = scripts.sayable(request.reply)
    is_hidden = (request.body.get("thinking") or {}).get("display") == "omitted"
    return _letters(heard) == _letters(replace(wanted, reasoning="") if is_hidden else wanted)


def _letters(said: Reply) -> tuple[str, str, list[tuple[str, object]]]:
    calls = [(name, json.loads(arguments or "{}")) for name, arguments in said.calls]
    return said.reasoning.strip(), said.content.strip(), calls


def row_of(talk: Conversation, family: str, asked: Sequence[Asked]) -> Row:
    """The sums of its requests but the first, and all of its answers."""
    later = asked[1:]
    num_prompt = sum(each.num_prompt_tokens for each in later)
    known = [each.num_prompt_tokens * each.possible for each in later if each.possible is not None]
    return Row(
        talk.client,
        talk.name,
        family,
        len(later),
        num_prompt,
        sum(each.num_cached_tokens for each in later),
        sum(each.num_common_tokens for each in later),
        round(sum(known) / num_prompt, 6) if len(known) == len(later) else None,
        len(asked),
        sum(each.is_exact for each in asked),
    )


# --- all of them -----------------------------------------------------------------------------------------------------


def sessions(wanted: Iterable[str] = SESSIONS) -> list[Conversation]:
    """The recorded sessions of these names; none without the recordings."""
    return [talk for talk in read_recordings(SHARED) if talk.name in wanted] if SHARED is not None else []


@contextlib.contextmanager
def served(name: str) -> Iterator[tuple[LedServer, Writer, FrozenOracle]]:
    """A running server with a tiny model of a whole vocabulary, what its model says, and the oracle."""
    with tempfile.TemporaryDirectory(prefix="kvserve-loop-") as scratch:
        folder = add_weights(whole_folder(name, Path(scratch)))
        writer = Writer(NativeScripts(load_model(folder), Reference(folder)))
        with led_server(folder, Path(scratch), write=writer) as server:
            yield server, writer, FrozenOracle(name, folder)


def play_all(
    talks: Sequence[Conversation], names: Iterable[str] = tuple(WHOLE_VOCABULARIES), part: Part = WHOLE
) -> Iterator[tuple[Row, list[Asked]]]:
    """The sessions on these vocabularies, as far as they belong to the part."""
    for name in names:
        if part.is_over() or not (wanted := part.of(talks, name)):
            continue
        with served(name) as (server, writer, oracle):
            for talk in wanted:
                if part.is_over():
                    return
                asked = play(talk, server, writer, oracle)
                yield row_of(talk, name, asked), asked


def run(_num_rounds: int) -> list[Figure]:
    """Reuse - what was to be had, and answers that are not to the letter, over all sessions. Nothing is timed."""
    rows = [row for row, _ in play_all(sessions())]
    if not rows:
        print("vocabulary_loops: there are no recorded conversations here, nothing was compared", file=sys.stderr)
        return []
    print("\n".join(table(rows)), flush=True)
    worst = min(rows, key=lambda row: row.lead)
    about = f"{worst.family}, {worst.name}: {worst.reuse:.4f} : {worst.reuse - worst.lead:.4f}"
    num_other = sum(row.num_answers - row.num_exact_answers for row in rows)
    num_answers = sum(row.num_answers for row in rows)
    name = "reuse - common or oracle over HTTP, worst session"
    return [
        Figure("vocabulary_loops", name, "", (worst.lead,), Bound("at least", -TOLERANCE), about),
        Figure(
            "vocabulary_loops",
            "answers that a client got otherwise than they were to be said",
            "",
            (float(num_other),),
            Bound("at most", 0),
            f"of {num_answers} in {len(rows)} sessions",
        ),
    ]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|---" * len(HEADINGS) + "|"
    for row in rows:
        cells = (
            *(row.family, row.name, str(row.num_requests), f"{row.num_prompt_tokens:,}"),
            *(f"{row.reuse:.4f}", f"{row.common:.4f}", "none" if row.oracle is None else f"{row.oracle:.4f}"),
            f"{row.num_exact_answers} of {row.num_answers}",
            f"MISSED ({', '.join(row.misses)})" if row.misses else "pass",
        )
        yield f"| {' | '.join(cells)} |"


def requests(row: Row, asked: Sequence[Asked]) -> Iterator[str]:
    """Every request of a session."""
    for number, each in enumerate(asked, 1):
        oracle = "none" if each.possible is None else f"{each.possible:.4f}"
        yield (
            f"{row.family} {row.name} {number}: {each.num_cached_tokens} of {each.num_prompt_tokens}, "
            f"{each.num_common_tokens} in common, oracle {oracle}{'' if each.is_exact else ', NOT TO THE LETTER'}"
        )


def report(rows: Sequence[Row]) -> str:
    """The file that keeps the table."""
    return f"""# Recorded sessions in closed loop on real vocabularies

`python -m benchmarks.vocabulary_loops --save`: one client for each protocol of agents, through the real server over
HTTP, on tiny real models that have the real tokenizers of 128k to 262k tokens and the templates of their families. What
the model writes are the recorded answers in the template's own form, in odd tokens, as far as the template can write
them (Llama 3.1 writes no thinking, and one call without words); its client gives back what it got, with the server's
ids and signatures, and leaves where it left in the recording. Shares are of prompt tokens without the request that
begins a session.

- reuse: what the server found again.
- in common: how much of the prompts' ids stands at the beginning of something that the model read and wrote before.
- oracle: that of the session as it was recorded (`frozen.py`), where transformers renders all of it. Reuse may not be
  below either by more than {TOLERANCE}.
- answers to the letter: how many of the answers, thinking, words and calls with their values, came to the client as the
  model was to say them, but for white space around thinking and words, which is the template's own form, and thinking
  that the client wants omitted (Claude Code).

Measured so far: {len(rows)} of {len(SESSIONS) * len(WHOLE_VOCABULARIES)} sessions; `--missing` measures the others.
Closed loops of six turns of `/v1/chat/completions` on the same vocabularies are in [templates.md](templates.md).

{chr(10).join(table(rows))}
"""


KEPT = KeptRows("vocabulary_loops", Row, report)


def main(arguments: Sequence[str]) -> int:
    """Print the table; returns 1 where less was found again than was to be had, or something else was heard."""
    parser = argparse.ArgumentParser(prog="benchmarks.vocabulary_loops", description="Sessions on real vocabularies.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these vocabularies")
    parser.add_argument("--session", action="append", choices=SESSIONS, help="only this session")
    parser.add_argument("--requests", action="store_true", help="every request with what was to be had")
    parser.add_argument("--save", action="store_true", help="keep every row in results; the table is that of all rows")
    parser.add_argument("--missing", action="store_true", help="only sessions whose row is not kept yet")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no session after that time")
    given = parser.parse_args(arguments)
    talks = sessions(given.session or SESSIONS)
    if not talks:
        parser.exit(2, "The recordings and tokenizers (shared, in or beside the repository) are not here.\n")
    part, rows = KEPT.part(is_missing=given.missing, seconds=given.seconds), list[Row]()
    for row, asked in play_all(talks, given.names or tuple(WHOLE_VOCABULARIES), part):
        rows.append(row)
        if given.save:
            KEPT.put([row])
        if given.requests:
            print("\n".join(requests(row, asked)), flush=True)
    rows = KEPT.read() if given.save else rows
    print("\n".join(table(rows)))
    return 1 if any(row.misses for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
