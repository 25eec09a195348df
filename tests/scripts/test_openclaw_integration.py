"""The OpenClaw-shaped traffic against a real server, with a short system prompt to be quick."""

from dataclasses import replace
from typing import Any

import pytest

from kvserve.core import TextBlock, Turn
from tests.laws import IS_FULL
from tests.scripts.conftest import addresses, run_script, script, start_script
from tests.serving import AppUnderTest

SHORT = ["--system-chars", "1000", "--max-tokens", "2"]


def test_the_message_that_vanishes_costs_only_itself(server: AppUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From turn 3 on the prompt is reused; with so short a one the vanishing message weighs more. Of six turns the
    default run takes three."""
    num_turns = 6 if IS_FULL else 3
    monkeypatch.setattr(script("test_openclaw_integration.py"), "NUM_TURNS", num_turns)
    done = run_script("test_openclaw_integration.py", *addresses(server), *SHORT, "--min-reuse", "75")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok    turn ") == num_turns - 2
    assert "ok    the new date is computed" in done.stdout


@pytest.mark.long
def test_a_server_that_keeps_the_old_date_is_found_out(server: AppUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model must see anew and does not is a failed expectation."""
    real = server.app.serve

    def of_yesterday(turn: Turn, served: Any) -> Any:
        system, *rest = turn.messages
        text = "".join(block.text for block in system.blocks if isinstance(block, TextBlock))
        blocks = (TextBlock(text.replace("2026-11-21", "2026-11-20")),)
        messages = (replace(system, blocks=blocks), *rest)
        return real(replace(turn, messages=messages), served)

    monkeypatch.setattr(server.app, "serve", of_yesterday)
    done = start_script("test_openclaw_integration.py", *addresses(server), *SHORT, "--min-reuse", "0")
    assert done.returncode == 1
    assert "FAIL  the new date is computed" in done.stdout
