"""The plots of the comparison with other servers, as small SVG files that are the same for the same rows.

It knows rows and matplotlib, which is imported where something is drawn: it is there for development only.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_nouns import MODELS
from benchmarks.peer_rows import Row, by_scenario
from benchmarks.peer_servers import PEERS

PLOTS: Mapping[str, str] = {
    "peers_reuse.svg": "Share of prompt tokens that each server reused on the tiny hybrid, and what was possible",
    "peers_first_token.svg": "Milliseconds to the first token of a warm request on the tiny hybrid, by server",
    "peers_streams.svg": "Tokens per second of four streams, and the longest gap of a stream beside a long prompt",
}
"""File -> what it shows, for who cannot see it."""

COLOURS = ("#0b6e4f", "#c8553d", "#3a6ea5", "#8e6c8a", "#b8860b", "#5c5c5c")
"""One for each server, in their order; told apart in grey too."""

STYLE: Mapping[str, Any] = {
    "svg.hashsalt": "kvserve",
    "svg.fonttype": "none",
    "font.size": 8,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
HYBRID = "qwen3_5"


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Write all plots into the folder. Raises ImportError without matplotlib."""
    import matplotlib  # for development only
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(dict(STYLE)):
        for name, make in ((name, MAKERS[name]) for name in PLOTS):
            figure = Figure(figsize=(7.2, 3.0), layout="constrained")
            make(figure, rows)
            _legend(figure)
            figure.savefig(folder / name, format="svg", metadata={"Date": None, "Creator": None})


def _reuse(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    cells = {name: found for name, found in _on(rows, HYBRID).items() if any(r.figures.possible for r in found)}
    _bars(axes, cells, "reuse", scale=100)
    for place, found in enumerate(cells.values()):
        possible = 100 * max(row.figures.possible or 0 for row in found)
        axes.plot([place - 0.45, place + 0.45], [possible, possible], color="black", linewidth=1)
    axes.set_ylabel("% of prompt tokens reused")
    axes.set_title(f"Reuse, tiny hybrid ({HYBRID}); the line is what was possible")


def _first_token(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    cells = {name: found for name, found in _on(rows, HYBRID).items() if any(r.figures.warm_seconds for r in found)}
    _bars(axes, cells, "warm_seconds", scale=1000)
    axes.set_ylabel("ms")
    _plain_ticks(axes)
    axes.set_title(f"First token of a warm request, tiny hybrid ({HYBRID}); less is better")


def _streams(figure: Any, rows: Sequence[Row]) -> None:
    left, right = figure.subplots(1, 2)
    for axes, scenario, field, title in (
        (left, "four streams", "tokens_per_second", "Four streams: tokens per second"),
        (right, "stall", "longest_gap_seconds", "Longest gap beside a long prompt: seconds"),
    ):
        found = by_scenario(rows).get(scenario, [])
        cells = {model.name: [row for row in found if row.model == model.name] for model in MODELS}
        _bars(axes, {name: each for name, each in cells.items() if each}, field, scale=1)
        _plain_ticks(axes)
        axes.set_title(title)


MAKERS = {"peers_reuse.svg": _reuse, "peers_first_token.svg": _first_token, "peers_streams.svg": _streams}


def _on(rows: Sequence[Row], model: str) -> dict[str, list[Row]]:
    cells = {name: [row for row in found if row.model == model] for name, found in by_scenario(rows).items()}
    return {name: found for name, found in cells.items() if found}


def _bars(axes: Any, cells: Mapping[str, Sequence[Row]], field: str, scale: float) -> None:
    """A group for each cell, a bar for each server that has the figure."""
    names = [
        peer.name
        for peer in PEERS
        if any(
            row.server == peer.name and getattr(row.figures, field) is not None
            for each in cells.values()
            for row in each
        )
    ]
    width = 0.9 / max(1, len(names))
    for number, name in enumerate(names):
        points = [
            (place - 0.45 + (number + 0.5) * width, scale * value)
            for place, found in enumerate(cells.values())
            for row in found
            if row.server == name and (value := getattr(row.figures, field)) is not None
        ]
        colour = COLOURS[[peer.name for peer in PEERS].index(name)]
        axes.bar([x for x, _ in points], [y for _, y in points], width=width, color=colour, label=name)
        for x, y in points:
            if y == 0:  # nothing was reused, which is not the same as nothing was said
                axes.text(x, y, "0", ha="center", va="bottom", fontsize=6)
    axes.set_xticks(range(len(cells)), [name.replace(" ", "\n") for name in cells])


def _legend(figure: Any) -> None:
    """One for all axes, above them: each server once."""
    named = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    names = [peer.name for peer in PEERS if peer.name in named]
    if names:
        handles = [named[name] for name in names]
        figure.legend(handles, names, fontsize=7, ncols=len(names), loc="outside upper center", frameon=False)


def _plain_ticks(axes: Any) -> None:
    """A logarithmic axis with numbers as they are read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
