"""The PI-shaped probe against a real server."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvserve.core import Turn
from tests.laws import IS_FULL
from tests.scripts.conftest import addresses, run_script, start_script
from tests.serving import AppUnderTest, serving_app, writing

NUM_TURNS = 4 if IS_FULL else 3
SHORT = ["--turns", "3", "--system-chars", "6000", "--max-tokens", "4"]
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "notes/a.txt", "limit": 5}}\n</tool_call>'


def rows(output: str) -> list[list[str]]:
    """The cells of the table's rows."""
    return [line.split() for line in output.splitlines() if re.match(r" +\d+  ", line)]


def test_a_tool_loop_with_the_scripts_own_calls_is_reused(server: AppUnderTest) -> None:
    """A model that calls nothing still gives a tool loop; every judged turn and counter is fine, and the code is 0."""
    done = run_script("pi_like_probe.py", *addresses(server), *SHORT, "--turns", str(NUM_TURNS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[0] for row in rows(done.stdout)] == [str(turn) for turn in range(1, NUM_TURNS + 1)]
    assert done.stdout.count("bash (the script's own)") == NUM_TURNS
    assert done.stdout.count("ok    turn ") == NUM_TURNS - 2
    assert "ok    vlm_retreat did not move" in done.stdout
    assert "FAIL" not in done.stdout


@pytest.mark.long
def test_calls_of_the_model_are_answered(server: AppUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that the model writes is echoed and gets its result: the conversation grows by a call each turn."""
    with writing(server, CALL) as fields:
        real = server.app.serve

        def serve(turn: Turn, served: Any) -> Any:
            return real(replace(turn, sampling=replace(turn.sampling, **fields)), served)

        monkeypatch.setattr(server.app, "serve", serve)
        done = run_script("pi_like_probe.py", *addresses(server), *SHORT, "--max-tokens", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[-1] for row in rows(done.stdout)] == ["read"] * 3


def test_a_missed_share_is_exit_code_1(server: AppUnderTest) -> None:
    """An expectation that no server can meet fails by name."""
    done = run_script("pi_like_probe.py", *addresses(server), *SHORT, "--system-chars", "500", "--min-reuse", "100")
    assert done.returncode == 1
    assert "FAIL  turn 3 reuses at least 100.0%" in done.stdout


def test_an_address_without_a_server_is_exit_code_2() -> None:
    """Nobody there is neither success nor a failed expectation, and no traceback."""
    done = start_script("pi_like_probe.py", "--base-url", "http://127.0.0.1:9", "--server-url", "", "--turns", "3")
    assert done.returncode == 2
    assert done.stderr.startswith("error: POST http://127.0.0.1:9/v1/chat/completions: ")


def test_an_image_in_the_first_question_is_judged_at_turn_two(tmp_path: Path) -> None:
    """With `--image` the second turn must find the picture's KV, and no counter moves."""
    with serving_app(tmp_path, family="qwen3_5_vl") as server:
        done = run_script("pi_like_probe.py", *addresses(server), *SHORT, "--system-chars", "9000", "--image", "160")
        assert server.get("/v1/cache").json["num_tower_calls"] == 1
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    image turn 2 reuses at least 94.0%" in done.stdout
    assert "ok    vlm_retreat did not move" in done.stdout
