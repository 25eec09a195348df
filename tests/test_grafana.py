"""The Grafana dashboard asks for metrics that exist, and for nothing else; so do the documents."""

import json
import re
from pathlib import Path

from kvserve.observe.metric_rows import CACHE_ROWS, HEALTH_ROWS
from kvserve.observe.metrics import DISTRIBUTIONS, PREFIX, TOTALS
from kvserve.proxy.all_backends import merged_metrics
from kvserve.proxy.backend_health import Fleet

FILE = Path(__file__).resolve().parent.parent / "docs" / "grafana-dashboard.json"


def names() -> set[str]:
    """Every name that stands in /metrics."""
    rows = {f"{row.name}_total" if row.kind == "counter" else row.name for row in (*HEALTH_ROWS, *CACHE_ROWS)}
    totals = {f"{total.name}_total" for total in TOTALS} | {"explained_requests_total", "http_errors_total", "up"}
    histograms = {f"{each.name}_{part}" for each in DISTRIBUTIONS for part in ("bucket", "sum", "count")}
    return {PREFIX + name for name in rows | totals | histograms}


def test_every_panel_asks_for_something_that_is_there() -> None:
    """Panels have a place of their own, a source that can be chosen, and expressions over known names."""
    board = json.loads(FILE.read_text("utf-8"))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places) > 10
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            asked = set(re.findall(r"kvserve_\w+", target["expr"]))
            assert asked and asked <= names(), (panel["title"], asked - names())


def test_the_documents_name_metrics_that_are_there() -> None:
    """A histogram by its name, a counter with its suffix."""
    of_proxies = set(re.findall(r"^# TYPE (\w+)", merged_metrics({}, Fleet((), 8)), re.MULTILINE))
    known = names() | {PREFIX + each.name for each in DISTRIBUTIONS} | of_proxies
    for document in (*FILE.parent.glob("*.md"), FILE.parent.parent / "README.md", FILE.parent.parent / "CHANGELOG.md"):
        named = set(re.findall(r"\bkvserve_\w+", document.read_text("utf-8")))
        assert named <= known, (document.name, named - known)
    assert len(re.findall(r"kvserve_\w+", (FILE.parent / "seeing.md").read_text("utf-8"))) > 10
