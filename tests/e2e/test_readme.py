"""The README's lines for the SDKs, pasted into a file and run as they are, on both ports."""

import os
import sys
from pathlib import Path

import pytest

from tests.e2e import pasted
from tests.e2e.installing import run
from tests.e2e.servers import ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.parametrize("sdk", ["The anthropic SDK", "The openai SDK"])
def test_the_lines_for_an_sdk_print_an_answer(open_server: ServerProcess, front: str, sdk: str, tmp_path: Path) -> None:
    """As they stand there, but for the port."""
    script = tmp_path / "pasted.py"
    script.write_text(pasted.block(sdk, "python", open_server.port_of(front)), "utf-8")
    done = run([sys.executable, str(script)], seconds=200, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
