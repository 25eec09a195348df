"""What was measured of a server in a scenario, the tables of it, and in what another run's order is another one.

It knows figures and words; no server, no clock and no plot.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from statistics import median

from benchmarks.peer_nouns import FIGURES, MODELS, Figures
from benchmarks.peer_scenarios import SCENARIOS
from benchmarks.peer_servers import PEERS

SERVERS = "servers"
"""In the place of a scenario: what is known of a server itself, its versions or why it takes no part."""

TOLERANCE = 1.1
"""Two figures are apart where the larger is more than so many times the other."""

NOT_COMPARED = ("start_seconds", "prompt_share")
"""Figures in which nobody is said to win."""

WHOLE_PROMPT = 0.95
"""A server whose prompts have fewer tokens than so many of another one's has read less than that one."""


@dataclass(frozen=True, slots=True)
class Row:
    """A server in a scenario on a model: medians over rounds, or in `note` why there are none. `measured_on` is the
    machine's line."""

    scenario: str
    model: str
    server: str
    figures: Figures
    num_rounds: int
    note: str
    measured_on: str

    @property
    def client(self) -> str:
        return self.scenario

    @property
    def name(self) -> str:
        return self.server

    @property
    def family(self) -> str:
        return self.model


def medians(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over the rounds that have it."""
    found: dict[str, float | None] = {}
    for each in fields(Figures):
        values = [value for figures in rounds if (value := getattr(figures, each.name)) is not None]
        found[each.name] = median(values) if values else None
    return Figures(**found)


# --- order ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turned:
    """Two servers whose order in a figure is not that of the kept run, by more than the tolerance in one of them."""

    scenario: str
    model: str
    figure: str
    servers: tuple[str, str]
    kept: tuple[float, float]
    now: tuple[float, float]

    def __str__(self) -> str:
        heading = FIGURES[self.figure][0]
        one, other = self.servers
        kept, now = (" : ".join(shown(self.figure, value) for value in pair) for pair in (self.kept, self.now))
        return f"{self.scenario}, {self.model}, {heading}: {one} : {other} was {kept}, is {now}"


def turned(kept: Sequence[Row], now: Sequence[Row]) -> list[Turned]:
    """Where the order of two servers is another one now, though their figures are apart in one of the two runs."""
    before = {(row.scenario, row.model, row.server): row.figures for row in kept}
    found = []
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in now:
        cells.setdefault((row.scenario, row.model), []).append(row)
    for (scenario, model), rows in cells.items():
        for one, other in combinations(rows, 2):
            old = [before.get((scenario, model, row.server)) for row in (one, other)]
            for figure in (name for name in FIGURES if name not in NOT_COMPARED):
                pairs = [_pair(figure, old), _pair(figure, [one.figures, other.figures])]
                if (was := pairs[0]) is None or (new := pairs[1]) is None:
                    continue
                if (are_apart(*was) or are_apart(*new)) and (was[0] < was[1]) != (new[0] < new[1]):
                    found.append(Turned(scenario, model, figure, (one.server, other.server), was, new))
    return found


def _pair(figure: str, figures: Sequence[Figures | None]) -> tuple[float, float] | None:
    values = [getattr(each, figure) if each is not None else None for each in figures]
    return (values[0], values[1]) if None not in values else None


def are_apart(one: float, other: float) -> bool:
    """By more than the tolerance."""
    return max(one, other) > TOLERANCE * min(one, other)


def losses(rows: Sequence[Row], server: str = "kvserve") -> Iterator[str]:
    """Every figure in which another server is better by more than the tolerance, the best of them; one that has read
    less than this server is told with that, beside the best of those that read all."""
    cells: dict[tuple[str, str], dict[str, Figures]] = {}
    for row in ordered(rows):
        cells.setdefault((row.scenario, row.model), {})[row.server] = row.figures
    for (scenario, model), by_server in cells.items():
        if (own := by_server.get(server)) is None:
            continue
        for figure, (heading, is_more_better) in FIGURES.items():
            value = getattr(own, figure)
            given = {name: got for name, each in by_server.items() if (got := getattr(each, figure)) is not None}
            if value is None or figure in NOT_COMPARED:
                continue
            best_first = sorted(given, key=lambda name: given[name], reverse=is_more_better)
            whole = [name for name in best_first if not _is_cut(by_server[name], own)]
            for best in dict.fromkeys((best_first[0], whole[0])):
                if best != server and given[best] != value and are_apart(given[best], value):
                    words = f"{shown(figure, value)}, {best} {shown(figure, given[best])}"
                    cut = f" with {shown('prompt_share', by_server[best].prompt_share)} of the prompt"
                    yield f"{scenario}, {model}, {heading}: {words}{cut if best not in whole else ''}"


def _is_cut(figures: Figures, own: Figures) -> bool:
    """Whether a server has read clearly less than another one."""
    share, whole = figures.prompt_share, own.prompt_share or 1.0
    return share is not None and share < WHOLE_PROMPT * whole


# --- tables -----------------------------------------------------------------------------------------------------------


def shown(figure: str, value: float | None) -> str:
    """A figure as a reader sees it."""
    if value is None:
        return ""
    if figure in ("reuse", "possible", "prompt_share"):
        return f"{100 * value:.1f} %"
    if figure == "peak_bytes":
        return f"{value / 1e6:,.0f} MB"
    if figure == "tokens_per_second":
        return f"{value:.1f}"
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.0f} ms"


def ordered(rows: Sequence[Row]) -> list[Row]:
    """As the scenarios, models and servers are listed."""
    places = [
        {SERVERS: -1, **{scenario.name: place for place, scenario in enumerate(SCENARIOS)}},
        {model.name: place for place, model in enumerate(MODELS)},
        {peer.name: place for place, peer in enumerate(PEERS)},
    ]

    def key(row: Row) -> tuple[int, ...]:
        names = (row.scenario, row.model, row.server)
        return tuple(place.get(name, len(place)) for place, name in zip(places, names, strict=True))

    return sorted(rows, key=key)


def machines(rows: Sequence[Row]) -> str:
    """What was measured on, each line once, with the models whose rows are of that run."""
    models: dict[str, dict[str, None]] = {}
    for row in ordered(rows):
        if row.scenario != SERVERS:
            models.setdefault(row.measured_on, {})[row.model] = None
    return "\n\n".join(f"{', '.join(names)}: {line}" for line, names in models.items())


def servers_table(rows: Sequence[Row]) -> Iterator[str]:
    """Who takes part, with its versions and what of its defaults was changed, or why not."""
    models = [model.name for model in MODELS if any(row.model == model.name for row in rows)]
    yield f"| {' | '.join(['Server', 'Versions, or why it takes no part', 'Started how', *map(_ready, models)])} |"
    yield "|---" * (3 + len(models)) + "|"
    remarks = {peer.name: peer.remark for peer in PEERS}
    for row in ordered([row for row in rows if row.scenario == SERVERS]):
        own = [each for each in rows if each.server == row.server]
        starts = [medians([each.figures for each in own if each.model == model]).start_seconds for model in models]
        cells = [row.server, row.note, remarks.get(row.server, ""), *(shown("start_seconds", each) for each in starts)]
        yield f"| {' | '.join(cells)} |"


def _ready(model: str) -> str:
    return f"Ready after, {model}"


def scenario_table(rows: Sequence[Row]) -> Iterator[str]:
    """One scenario's rows: a column for each figure that any of them has."""
    columns = [
        name for name in FIGURES if name != "start_seconds" and any(_value(row, name) is not None for row in rows)
    ]
    heads = ["model", "server", *(_heading(name) for name in columns), "rounds", "note"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in ordered(rows):
        cells = [_cell(row.figures, name) for name in columns]
        yield f"| {' | '.join([row.model, row.server, *cells, str(row.num_rounds), row.note])} |"


def figure_table(rows: Sequence[Row], figure: str) -> Iterator[str]:
    """One figure of all scenarios: a column for each server that has any."""
    having = [row for row in rows if _value(row, figure) is not None]
    names = [peer.name for peer in PEERS if any(row.server == peer.name for row in having)]
    bounds = ["possible"] if figure == "reuse" else []
    yield f"| {' | '.join(['scenario', 'model', *bounds, *names])} |"
    yield "|---" * (2 + len(bounds) + len(names)) + "|"
    cells: dict[tuple[str, str], dict[str, Figures]] = {}
    for row in ordered(having):
        cells.setdefault((row.scenario, row.model), {})[row.server] = row.figures
    for (scenario, model), found in cells.items():
        best = [shown("possible", max(each.possible or 0 for each in found.values()))] if bounds else []
        values = [shown(figure, getattr(found[name], figure)) if name in found else "" for name in names]
        yield f"| {' | '.join([scenario, model, *best, *values])} |"


def by_scenario(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    """In the order of the scenarios, without what is known of servers."""
    found: dict[str, list[Row]] = {}
    for row in ordered(rows):
        if row.scenario != SERVERS:
            found.setdefault(row.scenario, []).append(row)
    return found


def _value(row: Row, figure: str) -> float | None:
    value: float | None = getattr(row.figures, figure)
    return value


def _heading(figure: str) -> str:
    return "reused (possible)" if figure == "reuse" else FIGURES[figure][0]


def _cell(figures: Figures, figure: str) -> str:
    value = shown(figure, getattr(figures, figure))
    if figure != "reuse" or figures.possible is None:
        return value
    return f"{value or 'not said'} ({shown('possible', figures.possible)})"
