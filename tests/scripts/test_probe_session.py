"""The session probe against a real server: each of its conversations, and what it says when one goes wrong."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvserve.core import Turn
from tests.laws import sampled
from tests.scripts.conftest import addresses, run_script, script, start_script
from tests.serving import AppUnderTest, eventually

SHORT = ["--system-chars", "500", "--max-tokens", "4"]
NUM_TURNS_BEFORE_THE_EDIT = 4


@pytest.mark.parametrize("mode", sampled(("normal", "drift"), {"normal"}))
def test_a_history_that_means_the_same_is_reused(server: AppUnderTest, mode: str) -> None:
    """Each turn reuses the whole prompt before it."""
    done = run_script("probe_session.py", mode, *addresses(server), *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert done.stdout.count(" tokens reused of the ") == {"normal": 3, "drift": 12}[mode]


@pytest.mark.parametrize("mode", sampled(("semantic", "insert"), {"semantic"}))
def test_a_changed_history_is_computed_again(server: AppUnderTest, mode: str) -> None:
    """Reuse ends at the change, and the answer is that of a server that has seen nothing."""
    done = run_script("probe_session.py", mode, *addresses(server), *SHORT, "--clear-cache")
    assert done.returncode == 0, done.stdout + done.stderr
    for sentence in ("reuse ends at the change", "the answer is the one of an empty cache"):
        assert f"ok    {sentence}" in done.stdout


@pytest.mark.long
def test_every_request_stands_in_the_traces(
    server: AppUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokens that its answer told, and its cause; traces of somebody else's requests are exit code 1."""
    server.chat("The day has a folder now.", max_tokens=1)
    assert eventually(lambda: any(server.log_root.rglob("cache-session-*.log")))
    day = max(server.log_root.iterdir())
    done = run_script("probe_session.py", "insert", *addresses(server), *SHORT, "--traces", str(day))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    7 of 7 requests stand in the traces as they were answered" in done.stdout
    assert "messages left out" in done.stdout or "message changed" in done.stdout
    (tmp_path / "cache-session-other.log").write_text('turn request_id="req0" num_prompt_tokens=7\n')
    monkeypatch.setattr(script("probe_session.py"), "TRACE_SECONDS", 0.0)
    other = run_script("probe_session.py", "normal", *addresses(server), *SHORT, "--traces", str(tmp_path))
    assert other.returncode == 1 and "FAIL  0 of 4 requests stand in the traces" in other.stdout, other.stdout


def test_a_turn_that_loses_more_than_allowed_is_exit_code_1(server: AppUnderTest) -> None:
    """With a slack below zero not even perfect reuse is enough; the sentence says what was missed."""
    done = start_script("probe_session.py", "normal", *addresses(server), *SHORT, "--slack-tokens", "-100000")
    assert done.returncode == 1
    assert "FAIL  turn 2: " in done.stdout


def test_a_wrong_answer_is_exit_code_1(server: AppUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose answer depends on what it has seen before is found out."""
    real = server.app.serve
    num_turns = 0

    def forgetful(turn: Turn, served: Any) -> Any:
        nonlocal num_turns
        num_turns += 1
        messages = turn.messages[:-2] if num_turns == NUM_TURNS_BEFORE_THE_EDIT + 1 else turn.messages
        return real(replace(turn, messages=messages), served)

    monkeypatch.setattr(server.app, "serve", forgetful)
    done = run_script("probe_session.py", "semantic", *addresses(server), *SHORT)
    assert done.returncode == 1
    assert 'FAIL  the answer is the one of "cache_mode": "prefix"' in done.stdout


@pytest.mark.parametrize(
    ("num_cached", "said"),
    [
        (90, "90 tokens reused of the 110 seen before"),
        (108, "108 tokens reused of the 110 seen before"),
        (115, "110 tokens reused of the 110 seen before, and 5 that were computed ahead"),
    ],
)
def test_never_more_is_reused_than_was_seen(num_cached: int, said: str) -> None:
    """An answer was seen as its prompt was; what a server computes ahead of a request is named as that."""
    probe = script("probe_session.py")
    counts = SimpleNamespace(num_prompt_tokens=100, num_completion_tokens=10)
    assert probe.reused(SimpleNamespace(num_cached_tokens=num_cached), counts) == said
