"""Recorded sessions, one per protocol, on real vocabularies with their templates, through the server's own path.

    python -m benchmarks.real_vocabularies [NAME ...] [--requests] [--save]

The models write their templates' own form in odd tokens. As much must be found again as the prompts have in common with
what was read and written before them, and as the oracle of `frozen.py` has where transformers renders the session.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figure import Bound, Figure
from benchmarks.frozen import FrozenOracle
from benchmarks.model_free import ModelFree, Told
from benchmarks.recordings import Conversation, Request, read_recordings
from benchmarks.reuse_oracle import Computed
from benchmarks.template_folders import SHARED, WHOLE_VOCABULARIES, whole_folder
from benchmarks.template_scripts import write_natively

RESULTS = Path(__file__).parent / "results" / "real_vocabularies.md"
SESSIONS = ("pi-0.87-qwen", "claude-code-2.1.330", "codex")
"""Of `/v1/chat/completions`, `/v1/messages` and `/v1/responses`."""

TOLERANCE = 0.01
HEADINGS = ("vocabulary", "session", "requests", "prompt tokens", "reuse", "in common", "oracle", "turns as written")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: what the server said of it, how many tokens its prompt has in common with what was computed before,
    and the oracle's share, None where transformers does not write it."""

    told: Told
    num_common_tokens: int
    possible: float | None
    num_turns: int


@dataclass(frozen=True, slots=True)
class Row:
    """A session on one vocabulary without its first request."""

    vocabulary: str
    session: str
    asked: tuple[Asked, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(each.told.num_prompt_tokens for each in self.asked)

    @property
    def reuse(self) -> float:
        return sum(each.told.num_cached_tokens for each in self.asked) / self.num_prompt_tokens

    @property
    def common(self) -> float:
        return sum(each.num_common_tokens for each in self.asked) / self.num_prompt_tokens

    @property
    def oracle(self) -> float | None:
        """None where transformers does not write all of its requests."""
        shares = [(each.told.num_prompt_tokens, each.possible) for each in self.asked]
        known = [size * share for size, share in shares if share is not None]
        return sum(known) / self.num_prompt_tokens if len(known) == len(shares) else None

    @property
    def lead(self) -> float:
        """Reuse - the most that was to be had."""
        return self.reuse - max(self.common, self.oracle or 0.0)


def play(talk: Conversation, vocabulary: str, model: ModelFree, oracle: FrozenOracle) -> Row:
    """A session with a server that knows nothing."""
    model.forget()
    oracle.forget()
    computed, asked = Computed(), list[Asked]()
    for number, request in enumerate(talk.requests):
        told = model.serve(request, number)
        prompt = model.context[: told.num_prompt_tokens]
        num_common = min(computed.longest_prefix(prompt), len(prompt) - 1)
        computed.add(model.context)
        num_turns = sum(message["role"] == "assistant" for message in request.messages)
        asked.append(Asked(told, num_common, possible_share(oracle, request), num_turns))
    return Row(vocabulary, talk.name, tuple(asked[1:]))


def possible_share(oracle: FrozenOracle, request: Request) -> float | None:
    """How much of a request was computed before, None where transformers does not write it."""
    try:
        possible = oracle.judge(request)
    except Exception as error:  # noqa: BLE001  # a template raises whatever it likes
        print(f"no oracle: {type(error).__name__}: {' '.join(str(error).split())[:120]}", file=sys.stderr)
        return None
    return possible.num_reusable_tokens / possible.num_prompt_tokens


def play_all(names: Iterable[str] = tuple(WHOLE_VOCABULARIES)) -> Iterator[Row]:
    """The sessions on these vocabularies; none where there are no recordings."""
    talks = [talk for talk in read_recordings(SHARED) if talk.name in SESSIONS] if SHARED is not None else []
    for name in names if talks else ():
        with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
            folder = whole_folder(name, Path(scratch))
            model = ModelFree(folder, is_cuttable=True)
            write_natively(model, folder)
            oracle = FrozenOracle(name, folder)
            yield from (play(talk, name, model, oracle) for talk in talks)


def run(_num_rounds: int) -> list[Figure]:
    """Reuse - what was to be had, per vocabulary at its worst session. Nothing is timed."""
    rows = list(play_all())
    if not rows:
        print("real_vocabularies: there are no recorded conversations here, nothing was compared", file=sys.stderr)
    print("\n".join(table(rows)), flush=True)
    return [_figure(name, [row for row in rows if row.vocabulary == name]) for name in WHOLE_VOCABULARIES if rows]


def _figure(name: str, rows: Sequence[Row]) -> Figure:
    worst = min(rows, key=lambda row: row.lead)
    about = f"{worst.session}: {worst.reuse:.4f} : {worst.reuse - worst.lead:.4f}"
    bound = Bound("at least", -TOLERANCE)
    return Figure(
        "real_vocabularies", f"reuse - common or oracle, {name}, worst session", "", (worst.lead,), bound, about
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|---" * len(HEADINGS) + "|"
    for row in rows:
        written = sum(each.told.num_replayed_turns for each in row.asked)
        cells = (
            *(row.vocabulary, row.session, str(len(row.asked)), f"{row.num_prompt_tokens:,}"),
            *(f"{row.reuse:.4f}", f"{row.common:.4f}", "none" if row.oracle is None else f"{row.oracle:.4f}"),
            f"{written} of {sum(each.num_turns for each in row.asked)}",
        )
        yield f"| {' | '.join(cells)} |"


def requests(row: Row) -> Iterator[str]:
    """Each request, with the server's own explanation."""
    for number, each in enumerate(row.asked, 1):
        told, possible = each.told, "none" if each.possible is None else f"{each.possible:.4f}"
        yield (
            f"{row.vocabulary} {row.session} {number}: {told.num_cached_tokens} of {told.num_prompt_tokens}, "
            f"{each.num_common_tokens} in common, oracle {possible}, {told.num_replayed_turns} of {each.num_turns} "
            f"turns as written; {told.cause}, {told.num_lost_tokens} tokens"
        )


def report(rows: Sequence[Row]) -> str:
    """The file that keeps the table."""
    return f"""# Recorded sessions on real vocabularies

`python -m benchmarks.real_vocabularies --save`: one client for each protocol, on real tokenizers of 128k to 262k tokens
with the templates of their families, through the server's own path without a model; what the model writes are the
recorded answers in the template's own form, in odd tokens. Where a template cannot write all of an answer (Llama 3.1
writes no thinking, and one call without words), the client of the recording gives back more than the model wrote.
Shares are of prompt tokens without the request that begins a session.

- reuse: what was found again.
- in common: how much of the prompts' ids stands at the beginning of something that was read and written before.
- oracle: how much of what transformers renders of the client's frozen bodies does (`frozen.py`), where it renders all
  of them. Reuse may not be below either by more than {TOLERANCE}.
- turns as written: how many of the history's answers stand in the prompts with the model's own tokens.

{chr(10).join(table(rows))}
"""


def main(arguments: Sequence[str]) -> int:
    """Print the table; returns 1 where less was found again than was to be had."""
    parser = argparse.ArgumentParser(prog="benchmarks.real_vocabularies", description="Sessions on real vocabularies.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these vocabularies")
    parser.add_argument("--requests", action="store_true", help="every request, and why it lost something")
    parser.add_argument("--save", action="store_true", help="write the table of all to results/real_vocabularies.md")
    given = parser.parse_args(arguments)
    rows = list(play_all(given.names or tuple(WHOLE_VOCABULARIES)))
    if not rows:
        parser.exit(2, "The recordings and tokenizers (shared, in or beside the repository) are not here.\n")
    print("\n".join(table(rows)))
    for row in rows if given.requests else ():
        print("\n".join(requests(row)))
    if given.save and not given.names:
        RESULTS.write_text(report(rows), encoding="utf-8")
    return 1 if any(row.lead < -TOLERANCE for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
