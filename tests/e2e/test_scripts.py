"""The probe scripts as a person runs them: through LiteLLM, with the counters read from kvserve's own port."""

import subprocess
import sys

import pytest

from tests.e2e.servers import ROOT, ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SECONDS = 500


@pytest.mark.parametrize(
    "arguments",
    [["pi_like_probe.py"], ["probe_session.py", "all", "--clear-cache"]],
    ids=lambda arguments: arguments[0],
)
def test_every_expectation_holds(open_server: ServerProcess, arguments: list[str]) -> None:
    """With the scripts' own bounds, and nothing that the server does not offer."""
    name, *rest = arguments
    ports = {"--base-url": open_server.port_of("litellm"), "--server-url": open_server.port_of("kvserve")}
    addresses = [word for option, port in ports.items() for word in (option, f"http://127.0.0.1:{port}")]
    command = [sys.executable, str(ROOT / "scripts" / name), *rest, *addresses]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not offered" not in done.stdout
