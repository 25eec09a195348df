"""The scripts as a person starts them, against a server in this process; it knows their command line only."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import AppUnderTest, serving_app

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SECONDS = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A small dense model on a free port, without LiteLLM."""
    with serving_app(tmp_path_factory.mktemp("server"), "qwen3") as app:
        yield app


def run_script(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a script to its end with the interpreter of the tests."""
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def addresses(server: AppUnderTest) -> list[str]:
    """The options that point a script at a server without a proxy."""
    url = f"http://127.0.0.1:{server.port}"
    return ["--base-url", url, "--server-url", url, "--timeout", "60"]
