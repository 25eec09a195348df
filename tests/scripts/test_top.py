"""The terminal's view of a real server: one look at it, and what it says where nobody is there."""

from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.scripts.conftest import run_script, script, start_script
from tests.serving import (
    CHAT_PATH,
    COMPLETION_PATH,
    AppUnderTest,
    chat_body,
    encode_request,
    eventually,
    serving_app,
)

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = {"role": "system", "content": "You count birds. " * 20}


def test_one_look_shows_requests_sessions_and_the_miss(server: AppUnderTest) -> None:
    """Totals of the hour, a session with the branch that left another one, and why the last request computed again."""
    first = [SYSTEM, {"role": "user", "content": "How many swans are there?"}]
    answer = app_chat(server, first)
    history = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And how many geese?"}]
    app_chat(server, history)
    edited = [SYSTEM, {"role": "user", "content": "How many swans were there?"}, *history[2:]]
    app_chat(server, edited)
    assert eventually(lambda: "message changed" in str(server.app.observability.dashboard()["misses"]))
    done = run_script("top.py", "--server-url", f"http://127.0.0.1:{server.port}", "--once")
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "3 requests" in shown and "message changed (message 1, char 15)" in shown, done.stdout
    assert "branch 1:" in shown and "branch 2:" in shown
    assert "message changed 1" in shown, "causes are counted"
    assert "swans" not in shown, "no text of a prompt"


def test_the_place_in_a_raw_prompt_is_a_character(server: AppUnderTest) -> None:
    """It has no message to be named."""
    text = "Count the ducks by the river, then those by the lake, then those by the sea, and say how many they are. "
    for number in range(2):
        body = {"prompt": f"Day {number}. {text * 3}", "max_tokens": 1, "session_id": "raw"}
        assert server.post(COMPLETION_PATH, body).status == 200
    # Another test's miss may be there already.
    assert eventually(lambda: "prompt changed" in str(server.app.observability.dashboard()["misses"]))
    done = run_script("top.py", "--server-url", f"http://127.0.0.1:{server.port}", "--once")
    shown = " ".join(done.stdout.split())
    assert "prompt changed (char 4)" in shown and "ducks" not in shown, done.stdout


def test_what_waits_for_another_model_is_shown(tmp_path: Path) -> None:
    """And which model that is."""
    folders = tmp_path / "models"
    folders.mkdir()
    (folders / "small").symlink_to(tiny_model("llama"))
    with serving_app(tmp_path, "qwen3", model_folders=(str(folders),)) as app:
        with app.connect() as running, app.connect() as waiting:
            running.send(encode_request("POST", CHAT_PATH, chat_body(stream=True, max_tokens=100_000)))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            waiting.send(encode_request("POST", CHAT_PATH, chat_body(model="small", max_tokens=1)))
            assert eventually(lambda: app.app.health()[1]["num_waiting_for_model"] == 1)
            done = run_script("top.py", "--server-url", f"http://127.0.0.1:{app.port}", "--once")
        assert done.returncode == 0, done.stderr
        assert "waiting for small" in " ".join(done.stdout.split()), done.stdout


def test_nobody_there_is_exit_code_2() -> None:
    """One line and no traceback."""
    done = start_script("top.py", "--server-url", "http://127.0.0.1:9", "--once")
    assert done.returncode == 2 and done.stderr.startswith("error: GET http://127.0.0.1:9/dashboard/events: ")


def app_chat(server: AppUnderTest, messages: list[dict[str, str]]) -> str:
    return server.chat(messages, session_id="birds", enable_thinking=False, max_tokens=4).content


@pytest.mark.parametrize(
    ("part", "whole", "shown"), [(1_999, 2_000, "99.9 %"), (2, 3, "66.6 %"), (2_000, 2_000, "100.0 %"), (0, 0, "-")]
)
def test_shares_are_rounded_down_as_on_the_dashboard(part: int, whole: int, shown: str) -> None:
    """The same number in both, and 100 % only where nothing was computed."""
    assert script("top.py").share(part, whole) == shown
    draw = (ROOT / "kvserve" / "web" / "dashboard" / "draw.js").read_text("utf-8")
    assert "Math.floor((1000 * part) / whole) / 10" in draw, "the dashboard's own formula"
