"""`kvserve drain` against a real web server, and a proxy that is told things it cannot use."""

import threading
import time

import pytest

from kvserve.cli import draining
from tests.cli.running import run
from tests.web.fakes import FakeService, serving


class Working(FakeService):
    """A server with requests under way, which end."""

    num_running = 1

    def health(self) -> "tuple[int, dict[str, object]]":
        load = {"num_running": self.num_running, "num_waiting": 0}
        return 200, {"status": "ok", "draining": self.is_draining, **load}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "QUIET_SECONDS", 0.3)
    monkeypatch.setattr(draining, "_LOOK_SECONDS", 0.02)


def test_it_waits_until_nothing_runs_and_no_longer() -> None:
    """A while after the last request, since a proxy may have sent one before it saw the change."""
    service = Working()
    with serving(service) as served:
        ends = threading.Timer(0.3, lambda: setattr(service, "num_running", 0))
        ends.start()
        began = time.monotonic()
        result = run("drain", "--server-url", f"http://127.0.0.1:{served.server.port}")
        ends.join()
    assert result.exit_code == 0, result.output
    assert time.monotonic() - began > 0.55 and service.is_draining
    assert "is idle" in result.output


def test_it_gives_up_in_time_and_says_what_runs() -> None:
    """The exit code is 2; the server stays drained."""
    service = Working()
    with serving(service) as served:
        result = run("drain", "--wait", "0.1", "--server-url", f"http://127.0.0.1:{served.server.port}")
    assert result.exit_code == 2 and "1 requests still run" in result.output and service.is_draining


def test_it_is_taken_back() -> None:
    """Without waiting for anything."""
    service = Working(is_draining=True)
    with serving(service) as served:
        result = run("drain", "--undo", "--json", "--server-url", f"http://127.0.0.1:{served.server.port}")
    assert result.exit_code == 0 and '"draining": false' in result.output and not service.is_draining
