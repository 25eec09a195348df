"""The kept file of the comparison with other servers, and its part of the page for users, with the plots.

It knows rows and files; it measures nothing. The part of the page is written between two marks, so nobody edits it.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.kept import KeptRows
from benchmarks.peer_nouns import FIGURES, MODELS
from benchmarks.peer_plots import PLOTS, draw
from benchmarks.peer_rows import (
    Row,
    by_scenario,
    figure_table,
    losses,
    machines,
    scenario_table,
    servers_table,
)
from benchmarks.peer_scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"

MORE_THAN_POSSIBLE = (
    "Possible is what a server reaches that computes nothing ahead and has the prompts that the model's template "
    "makes. kvserve computes ahead while nobody asks; some others leave out a part of what a client sends."
)

ON_PAGE = ("reuse", "cold_seconds", "warm_seconds", "tokens_per_second", "longest_gap_seconds", "peak_bytes")


def report(rows: Sequence[Row]) -> str:
    """The file that keeps the tables."""
    says = {scenario.name: scenario.says for scenario in SCENARIOS}
    models = "; ".join(f"{model.name} ({model.kind})" for model in MODELS)
    parts = [
        "# Beside other servers",
        f"`python -m benchmarks.peers --save`: {models}. The same files, requests and greedy sampling for all; on "
        "each model a server is started with an empty home, and stands still while another one is asked; in each round "
        "they take turns in the other order, and medians count. Reuse is what a server says itself, over all "
        "requests but the first; possible is what the prompts have in common with what was read and written before, up "
        "to the last end of a message where layers cannot be cut. Tiny models have random weights: their seconds are "
        "not those of a large model. Memory is that of all processes of a server, looked at once a second.",
        machines(rows),
        "\n".join(servers_table(rows)),
    ]
    for name, found in by_scenario(rows).items():
        parts += [f"## {_begun(name)}", f"{_begun(says.get(name, ''))}.", "\n".join(scenario_table(found))]
    parts += ["## Where another server is better than kvserve by more than 10 %", "\n".join(_listed(rows))]
    return "\n\n".join(parts) + "\n"


KEPT = KeptRows("peers", Row, report)


def section(rows: Sequence[Row]) -> str:
    """What the page for users says of it, marks included."""
    if not rows:
        return "\n\n".join(
            [BEGIN, "No run of `python -m benchmarks.peers --save` is kept yet, so nothing is claimed.", END]
        )
    parts = [
        BEGIN,
        "`python -m benchmarks.peers --save` ([every scenario](../benchmarks/results/peers.md)): the same models, "
        "requests and greedy sampling, one server at a time, in turns. What a server does not say is empty.",
        machines(rows),
        "\n".join(servers_table(rows)),
        *(f"![{alt}](images/{name})" for name, alt in PLOTS.items()),
    ]
    for figure in ON_PAGE:
        parts += [f"### {_begun(FIGURES[figure][0])}", "\n".join(figure_table(rows, figure))]
        parts += [MORE_THAN_POSSIBLE] if figure == "reuse" else []
    parts += ["### Where another server is better by more than 10 %", "\n".join(_listed(rows)), END]
    return "\n\n".join(parts)


def with_section(page: str, rows: Sequence[Row]) -> str:
    """The page with its part written anew. Raises ValueError for a page without the two marks."""
    found, num_found = re.subn(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: section(rows), page, flags=re.DOTALL)
    if num_found != 1:
        raise ValueError(f"{PAGE.name} has no place for the comparison")
    return found


def write_page(rows: Sequence[Row], page: Path = PAGE, images: Path = IMAGES) -> None:
    """Write the part of the page and its plots."""
    draw(rows, images)
    page.write_text(with_section(page.read_text("utf-8"), rows), "utf-8")


def _begun(said: str) -> str:
    """With a capital letter at the beginning."""
    return said[:1].upper() + said[1:]


def _listed(rows: Sequence[Row]) -> Iterator[str]:
    found = [f"- {line}" for line in losses(rows)]
    yield from found or ["Nowhere."]
