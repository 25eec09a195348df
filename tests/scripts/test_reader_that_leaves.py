"""`... | head`: a program whose reader leaves ends quietly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100
MUCH = """
import sys
sys.path.insert(0, "scripts")
from probing.report import run
def main():
    for number in range(100_000):
        print("line", number)
    return 0
run(main)
"""


def ended(*command: str) -> "subprocess.CompletedProcess[bytes]":
    """A command whose standard output nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    try:
        return subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=ROOT, timeout=SECONDS, check=False)
    finally:
        os.close(write)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("-c", MUCH), 141),
        (("install_and_run.py", "--help"), 141),
        (("start_llm.py", "--help"), 0),
    ],
    ids=["a script", "install_and_run.py", "start_llm.py"],
)
def test_a_reader_that_leaves_is_no_error(command: tuple[str, ...], code: int) -> None:
    """No traceback and no word of it, and the exit code that shells know."""
    done = ended(sys.executable, *command)
    assert done.stderr == b"" and done.returncode == code
