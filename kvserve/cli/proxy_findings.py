"""What `kvserve doctor` looks at where BACKENDS names servers: what a `kvserve proxy` depends on, which has neither a
model nor KV. Nobody but these servers is told the secret; an issue is told neither their names nor where they are.
"""

from collections.abc import Iterator, Sequence

from kvserve.app.proxy_alone import health_of, refuse_unusable_settings
from kvserve.app.proxy_wiring import named_backends, proxy_url
from kvserve.cli.finding import ANSWERS, Finding
from kvserve.config import Settings
from kvserve.errors import SettingError, StartupError
from kvserve.proxy.backends import BackendAddress
from kvserve.settings.ports import describe_holder, local_host, somebody_listens


def proxy_findings(settings: Settings) -> Iterator[Finding]:
    """The port, each server, and what else a start would refuse."""
    port = _port(settings)
    yield port
    for number, backend in enumerate(named_backends(settings), 1):
        yield _server(number, backend, settings.proxy_secret)
    yield _start(settings, [port])


def _port(settings: Settings) -> Finding:
    port = settings.proxy_port
    if not port or not somebody_listens(local_host(settings.proxy_host), port):
        return Finding("PROXY_PORT", "ok", f"{port} is free", "free")
    body = health_of(BackendAddress("", proxy_url(settings)), None)
    if body is not None and ("backends" in body or "uptime_seconds" in body):
        return Finding("PROXY_PORT", "ok", f"{port}: {ANSWERS}", ANSWERS)
    return Finding("PROXY_PORT", "bad", f"{port} is taken by {describe_holder(port)}", "taken by another program")


def _server(number: int, backend: BackendAddress, secret: str | None) -> Finding:
    """One that is not there now may come; one that does not believe the proxy is never asked."""
    name = f"server {number}"
    body = health_of(backend, secret)
    if body is None:
        return Finding(name, "note", f"{backend.name} ({backend.base}) does not answer", "does not answer")
    told = f"version {body.get('version')}, {'drained' if body.get('draining') is True else body.get('status')}"
    if body.get("knows_proxy") is not True:
        why = "does not believe this proxy: it needs the same PROXY_SECRET, and a version that knows it"
        return Finding(name, "bad", f"{backend.name} ({backend.base}): {told}, {why}", f"{told}, does not believe")
    return Finding(name, "ok", f"{backend.name} ({backend.base}): {body.get('model')}, {told}", told)


def _start(settings: Settings, looked_at: Sequence[Finding]) -> Finding:
    """What a start refuses at once, in its own words, less what was found already and a port that is ours."""
    told = {"proxy_port" for each in looked_at if each.state == "bad" or each.shared == ANSWERS}
    try:
        refuse_unusable_settings(settings, told)
    except StartupError as error:
        key = error.key if isinstance(error, SettingError) else type(error).__name__
        return Finding("start", "bad", str(error), f"would be refused ({key})")
    return Finding("start", "ok", "nothing else is refused at once", "nothing else is refused at once")
