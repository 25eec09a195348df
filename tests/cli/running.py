"""`kvserve` in this process: an interpreter of its own takes longer than most of what is asked of it."""

import json
from typing import Any

from click.testing import CliRunner, Result

from kvserve.cli.commands import kvserve


def run(*words: str) -> Result:
    """The command to its end, whatever its exit code. Errors that it has no words for are raised."""
    return CliRunner().invoke(kvserve, list(words), catch_exceptions=False, prog_name="kvserve")


def told(*words: str) -> Any:
    """What it prints with --json, once it has succeeded."""
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def words_of(text: str) -> str:
    """A text without its lines: where they end depends on the width."""
    return " ".join(text.split())
