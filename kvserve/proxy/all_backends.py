"""Puts together what several backends say of themselves: JSON, metrics, health, and a page. It knows the form of these
answers and asks nobody.
"""

import html
import json
import math
import re
from collections.abc import Mapping, Sequence

from kvserve.core import JsonObject
from kvserve.proxy.backend_health import Fleet, PlainAnswer

type Said = Mapping[str, PlainAnswer | None]
"""Each backend's answer by its name; None where it gave none."""

_FAMILY = re.compile(r"# (?:HELP|TYPE) (\S+) ?(.*)")
_SAMPLE = re.compile(r"([^{ ]+)(?:\{(.*)\})?( .+)", re.DOTALL)
_NO_ANSWER: JsonObject = {"error": {"message": "This server gives no answer.", "code": "not_ready"}}


def merged_json(said: Said, *, needs_all: bool) -> tuple[int, JsonObject]:
    """The bodies by backend, and a status: the worst one if all of them have to have done it, else the best one.

    A server that gives no answer counts as 503: what was to be deleted is still there.
    """
    statuses = [answer.status if answer is not None else 503 for answer in said.values()]
    bodies = {name: _json(answer) if answer is not None else _NO_ANSWER for name, answer in said.items()}
    return (max if needs_all else min)(statuses, default=503), {"backends": bodies}


def newest_json(said: Said) -> tuple[int, JsonObject]:
    """The body that tells of the request that ended last, and whose it is; else the first answer that says why there is
    none. Where a server gave none that is a 503: the newest may be there."""
    found = [
        (_ended_seconds_ago(body), {**body, "backend": name})
        for name, answer in said.items()
        if answer is not None and answer.status == 200 and isinstance(body := _json(answer), dict)
    ]
    if found:
        return 200, min(found, key=lambda each: each[0])[1]
    if None in said.values() or not said:
        return 503, _NO_ANSWER
    others = [(answer.status, _json(answer)) for answer in said.values() if answer is not None]
    return next(((status, body) for status, body in others if isinstance(body, dict)), (503, _NO_ANSWER))


def _ended_seconds_ago(body: JsonObject) -> float:
    """How long ago by its server's own clock; a version that does not say it comes last."""
    seconds = body.get("ended_seconds_ago")
    return seconds if isinstance(seconds, int | float) else math.inf


def merged_agents(said: Said) -> tuple[int, JsonObject]:
    """One list of all agents, and which servers gave none: theirs are missing in it."""
    bodies = {name: _json(answer) for name, answer in said.items() if answer is not None and answer.status == 200}
    lists = {
        name: body["agents"]
        for name, body in bodies.items()
        if isinstance(body, dict) and isinstance(body.get("agents"), list)
    }
    found = {"agents": [agent for agents in lists.values() for agent in agents]}
    missing = [name for name in said if name not in lists]
    return 200 if lists else 503, {**found, "missing_backends": missing} if missing else found


def _json(answer: PlainAnswer) -> object:
    try:
        return json.loads(answer.body)
    except ValueError:
        return {"error": {"message": f"This server answered {answer.status} and no JSON.", "code": None}}


# --- metrics ---------------------------------------------------------------------------------------------------------


def merged_metrics(said: Said, fleet: Fleet) -> str:
    """All samples in Prometheus's text format, each family once, with the backend as the first label; and what the
    proxy itself counts."""
    families: dict[str, list[str]] = {}
    for name, answer in said.items():
        if answer is not None and answer.status == 200:
            _add_samples(families, name, answer.body.decode("utf-8", "replace"))
    return "".join(f"{line}\n" for lines in (*families.values(), _own_metrics(fleet)) for line in lines)


def _add_samples(families: dict[str, list[str]], backend: str, text: str) -> None:
    family: list[str] = families.setdefault("", [])
    for line in text.splitlines():
        if match := _FAMILY.match(line):
            family = families.setdefault(match[1], [])
            if line not in family:
                family.append(line)
        elif match := _SAMPLE.fullmatch(line):
            rest = f",{match[2]}" if match[2] else ""
            family.append(f'{match[1]}{{backend="{_escaped(backend)}"{rest}}}{match[3]}')


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _own_metrics(fleet: Fleet) -> list[str]:
    """What one proxy sees and does; another one counts for itself."""
    ready = {each.name: int(fleet.state(each) == "ready") for each in fleet.backends}
    counts: Sequence[tuple[str, str, str, Mapping[str, int]]] = (
        ("kvserve_proxy_backend_ready", "gauge", "1 while this proxy sends the server new requests.", ready),
        ("kvserve_proxy_requests_total", "counter", "Requests that this proxy sent there.", fleet.num_requests),
        (
            "kvserve_proxy_tried_elsewhere_total",
            "counter",
            "Requests that went on to another server, since this one gave no answer or had no room.",
            fleet.num_passed_over,
        ),
    )
    lines = []
    for name, kind, words, numbers in counts:
        lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
        lines += [f'{name}{{backend="{_escaped(each)}"}} {numbers.get(each, 0)}' for each in ready]
    return lines


# --- health ----------------------------------------------------------------------------------------------------------


def merged_health(fleet: Fleet) -> tuple[int, JsonObject]:
    """What was seen of each, and 200 while one is ready."""
    backends = {each.name: {**fleet.seen(each).body, "state": fleet.state(each)} for each in fleet.backends}
    is_ready = any(each["state"] in ("ready", "busy") for each in backends.values())
    return (200 if is_ready else 503), {"status": "ok" if is_ready else "loading", "backends": backends}


_COLUMNS = (
    ("Model", "model"),
    ("Version", "version"),
    ("Running", "num_running"),
    ("Waiting", "num_waiting"),
    ("KV in RAM", "ram_bytes"),
    ("KV on disk", "disk_bytes"),
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="5">
<title>kvserve: all servers</title>
</head>
<body>
<h1>Servers behind this proxy</h1>
<table border="1" cellpadding="6">
<tr><th>Server</th><th>State</th>{heads}</tr>
{rows}
</table>
</body>
</html>
"""
PAGE_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def page_of_all(fleet: Fleet) -> str:
    """How each server is, with a link to its own dashboard, as /health shows it: without a key and without a script."""
    rows = []
    for backend in fleet.backends:
        body = fleet.seen(backend).body
        cells = [_shown(name, body.get(name)) for _, name in _COLUMNS]
        name = html.escape(backend.name)
        link = f'<a href="/backends/{name}/dashboard">{name}</a>'
        rows.append("".join(f"<td>{cell}</td>" for cell in (link, fleet.state(backend), *cells)))
    heads = "".join(f"<th>{title}</th>" for title, _ in _COLUMNS)
    return _PAGE.format(heads=heads, rows="\n".join(f"<tr>{row}</tr>" for row in rows))


def _shown(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.2f} GiB"
    return html.escape(str(value)) if value is not None else "-"
