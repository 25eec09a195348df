"""What speculation brings on the demo's model that talks: thirty prompts, plain and drafted in turn on one server.

    python -m benchmarks.speculation [--blas auto|off|FILE] [--rounds N] [--save]
                                     [--prompts] [--kind KIND] [--families] [--nothing-drafted] [--draft-model]

Edits, copies, extractions and prose, alone and four at once, greedily: tokens per second drafted : plain, tokens a
step, and whether both say the same. Then led drafts on random models as deep (`drafted_families.py`), what it costs
where nothing is drafted (`nothing_drafted.py`), and what a draft model brings (`drafted_by_model.py`). Flags choose
among the four; exit code 1 when a bound is missed.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import drafted_by_model, drafted_families, nothing_drafted
from benchmarks.client import BenchmarkError
from benchmarks.figure import Bound, Figure, markdown_table
from benchmarks.led_drafts import OF_EDITS, Wanted
from benchmarks.machine import machine
from benchmarks.same_text import settings_with
from benchmarks.speculation_asked import (
    FOUR,
    MIN_TOKENS,
    Pair,
    Prompt,
    Texts,
    acceptance,
    measured,
    median_rates,
    read_prompts,
    tokens_a_step,
)
from benchmarks.talking import TalkingServer, fast_library, talking_model

RESULTS = Path(__file__).parent / "results" / "speculation.md"
TITLE = "# What speculation brings\n"
NEVER_SLOWER = Bound("at least", 0.97)
GAINS = {"edit": Bound("at least", 1.4), "copy": Bound("at least", 1.8)}
"""Of a machine with a fast BLAS, where a pass of eight tokens costs less than two of one."""

NAMES = {
    "edit": "edits",
    "copy": "copies",
    "extraction": "extractions",
    "prose": "prose",
    FOUR: "prose, four streams at once",
}
BENCH_PROMPTS = {"edit": 3, "copy": 2, "extraction": 1, "prose": 4}
"""`make bench` asks so many of each kind; all of them take half an hour a round on two cores."""


# --- the prompts ------------------------------------------------------------------------------------------------------


def bound_of(kind: str, *, is_fast: bool) -> Bound | None:
    """Prose is never slower, whatever the machine."""
    if kind in ("prose", FOUR):
        return NEVER_SLOWER
    return GAINS.get(kind) if is_fast else None


def figures(pairs: Sequence[Pair], texts: Texts, *, is_fast: bool) -> list[Figure]:
    """Per kind the speed and the tokens a step, then the texts. Raises BenchmarkError where no answer of a kind is long
    enough to be timed."""
    found = []
    for kind, name in NAMES.items():
        some = [pair for pair in pairs if pair.kind == kind]
        if not some:
            continue
        timed = [pair for pair in some if pair.is_long]
        if not timed:
            raise BenchmarkError(f"no answer of {name} has {MIN_TOKENS} tokens")
        drafted, plain = median_rates(timed)
        absolute = f"{drafted:.1f} : {plain:.1f} tokens/s"
        absolute += f", {len(some) - len(timed)} too short" if len(timed) < len(some) else ""
        ratios = tuple(pair.ratio for pair in timed)
        bound = bound_of(kind, is_fast=is_fast)
        found.append(_figure(f"{name}: tokens per second, drafted : plain", ratios, bound, absolute))
        steps = tuple(tokens_a_step([pair]) for pair in timed)
        absolute = f"{tokens_a_step(timed):.2f} of all together, {_share(acceptance(timed))} of drafted tokens accepted"
        found.append(_figure(f"{name}: tokens a step", steps, None, absolute))
    compared = texts.compared
    noise = f"noise {compared.noise:.2g}" if compared.differences else "no difference"
    num_unexplained = float(len(compared.unexplained))
    return [
        *found,
        _figure("prompts whose text differs, drafted or not", (float(compared.num_prompts),), None, noise),
        _figure("differences that noise does not explain", (num_unexplained,), Bound("at most", 0), noise),
    ]


def _figure(name: str, rounds: tuple[float, ...], bound: Bound | None, absolute: str) -> Figure:
    return Figure("speculation", name, "", rounds, bound, absolute)


def _share(share: float | None) -> str:
    return "none" if share is None else f"{share:.0%}"


def table(pairs: Sequence[Pair]) -> str:
    """A row for each prompt, or group of them, with the medians of its rounds."""
    lines = [
        "| kind | prompt | tokens | drafted : plain, tokens/s | ratio | tokens a step | accepted of drafted |",
        "|---|---|---|---|---|---|---|",
    ]
    for prompts in dict.fromkeys(pair.prompts for pair in pairs):
        some = [pair for pair in pairs if pair.prompts == prompts]
        num_tokens = sum(told.num_tokens for told in some[0].plain)
        rates, ratio = "too short", ""
        if all(pair.is_long for pair in some):
            drafted, plain = median_rates(some)
            rates, ratio = f"{drafted:.1f} : {plain:.1f}", f"{drafted / plain:.2f}"
        names = ", ".join(prompt.name for prompt in prompts)
        cells = [some[0].kind, names, f"{num_tokens:,}", rates, ratio]
        cells += [f"{tokens_a_step(some):.2f}", _share(acceptance(some))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def told(texts: Texts) -> Iterator[str]:
    """A line for each difference."""
    for each in texts.compared.differences:
        yield f"{texts.prompts[each.number].name}, {each.way}: differs from token {each.place} on, gap {each.gap:.2g}."


def answered(model: Path, library: Path | None, prompts: Sequence[Prompt], num_rounds: int) -> tuple[list[Pair], Texts]:
    """All prompts on a server of their own."""
    with (
        tempfile.TemporaryDirectory(prefix="kvserve-bench-") as folder,
        TalkingServer(model, Path(folder), settings_with(library)) as server,
    ):
        return measured(server.port, prompts, num_rounds)


def run(num_rounds: int) -> list[Figure]:
    """Some of each kind, where there is a fast BLAS; nothing where there is none, or no model."""
    library = fast_library("auto")
    model = talking_model("float32") if library is not None else None
    if model is None:
        return []
    prompts = read_prompts()
    some = [
        prompt
        for kind, number in BENCH_PROMPTS.items()
        for prompt in [each for each in prompts if each.kind == kind][:number]
    ]
    return figures(*answered(model, library, some, num_rounds), is_fast=True)


# --- the parts --------------------------------------------------------------------------------------------------------


def prompts_part(library: Path | None, num_rounds: int, kind: str | None) -> tuple[str, list[Figure], Wanted]:
    """Text, figures, and what drafts were in edits; of one kind or of all. Raises BenchmarkError without the model."""
    model = talking_model("float32" if library is not None else "4-bit")
    if model is None:
        raise BenchmarkError("there is nothing to measure with: the model cannot be fetched")
    prompts = [prompt for prompt in read_prompts() if kind in (None, prompt.kind)]
    pairs, texts = answered(model, library, prompts, num_rounds)
    found = figures(pairs, texts, is_fast=library is not None)
    text = "\n\n".join([markdown_table(found), table(pairs), *told(texts)])
    return text, found, wanted_of([pair for pair in pairs if pair.kind == "edit"])


def wanted_of(edits: Sequence[Pair]) -> Wanted:
    """What drafts were in edits; the usual where nothing was drafted."""
    share = acceptance(edits)
    return Wanted(tokens_a_step(edits), share) if share else OF_EDITS


def families_part(library: Path | None, num_rounds: int, wanted: Wanted) -> tuple[str, list[Figure]]:
    """Text and figures of led drafts on random models as deep."""
    led = drafted_families.measured(library, num_rounds, wanted)
    found = drafted_families.figures(led, is_fast=library is not None)
    lead = f"Drafts led as those of edits: {wanted.tokens_a_step:.2f} tokens a step, {wanted.acceptance:.0%} accepted."
    return f"{lead}\n\n{markdown_table(found)}", found


def with_section(text: str, title: str, body: str) -> str:
    """The file's text with this section, in the place of an older one of that title."""
    section = f"\n## {title}\n\n{body}\n"
    sections = re.split(r"^(?=\n## )", text or TITLE, flags=re.MULTILINE)
    kept = [each for each in sections if not each.startswith(f"\n## {title}\n")]
    return "".join([*kept, section])


def main(argv: Sequence[str]) -> int:
    given = _parse(argv)
    library = fast_library(given.blas)
    has_prompts = given.prompts or given.kind is not None
    is_whole = not (has_prompts or given.families or given.nothing_drafted or given.draft_model)
    found: list[Figure] = []
    wanted = OF_EDITS
    try:
        if has_prompts or is_whole:
            title = "Prompts of real text" if given.kind is None else f"Prompts of one kind: {given.kind}"
            with _section(title, given, library) as lines:
                text, some, wanted = prompts_part(library, given.rounds or 1, given.kind)
                lines.append(text)
            found += some
        if given.families or is_whole:
            with _section("Led drafts on random models", given, library) as lines:
                text, some = families_part(library, given.rounds or 3, wanted)
                lines.append(text)
            found += some
        if given.nothing_drafted or is_whole:
            with _section("Nothing drafted", given, None) as lines:
                some = nothing_drafted.run(given.rounds or 7)
                lines.append(markdown_table(some))
            found += some
        if given.draft_model or is_whole:
            with _section("A draft model", given, library) as lines:
                some = drafted_by_model.run(library, given.rounds or 1)
                lines.append(markdown_table(some))
            found += some
    except BenchmarkError as error:
        print(f"failed: {error}")
        return 1
    missed = [figure.name for figure in found if figure.is_missed]
    print(f"missed: {'; '.join(missed)}" if missed else "no bound is missed")
    return int(bool(missed))


@contextmanager
def _section(title: str, given: argparse.Namespace, library: Path | None) -> Iterator[list[str]]:
    """What a part puts into the list is printed once it is through, and saved: the next one may fail."""
    load_before, started = os.getloadavg(), time.monotonic()
    lines: list[str] = []
    yield lines
    minutes = (time.monotonic() - started) / 60
    blas = library.name if library else "The BLAS of the wheel"
    body = "\n\n".join([f"`{_command(given)}`", f"{machine(load_before)} {blas}; {minutes:.0f} minutes.", *lines])
    print(f"## {title}\n\n{body}\n", flush=True)
    if given.save:
        text = RESULTS.read_text("utf-8") if RESULTS.exists() else ""
        RESULTS.write_text(with_section(text, title, body), "utf-8")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.speculation", description="What speculation brings.")
    parser.add_argument("--blas", default="auto", metavar="FILE", help="auto, off (the wheel's), or a library's file")
    parser.add_argument("--prompts", action="store_true", help="the thirty prompts only, half an hour a round")
    parser.add_argument("--kind", choices=sorted(BENCH_PROMPTS), help="the prompts of that kind only")
    parser.add_argument("--families", action="store_true", help="a hybrid and a model with windows, led, only")
    parser.add_argument("--nothing-drafted", action="store_true", help="what it costs where nothing is drafted only")
    parser.add_argument("--draft-model", action="store_true", help="what a draft model brings only")
    help_text = "otherwise 1 of the prompts and of draft models, 3 led, 7 where nothing is drafted"
    parser.add_argument("--rounds", type=int, metavar="N", help=help_text)
    parser.add_argument("--save", action="store_true", help="write what was measured to benchmarks/results")
    given = parser.parse_args(argv)
    if given.rounds is not None and given.rounds < 1:
        parser.error("--rounds must be at least 1")
    return given


def _command(given: argparse.Namespace) -> str:
    """What was called, without where a library lies."""
    names = ("prompts", "families", "nothing_drafted", "draft_model")
    parts = [f"--{name.replace('_', '-')}" for name in names if getattr(given, name)]
    parts += [f"--kind {given.kind}"] if given.kind else []
    parts += [f"--rounds {given.rounds}"] if given.rounds else []
    return " ".join(["python -m benchmarks.speculation", *parts])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
