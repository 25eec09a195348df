"""The terminal's view of a real server: one look at it, and what it says where nobody is there."""

from tests.scripts.conftest import run_script
from tests.serving import AppUnderTest, eventually

SYSTEM = {"role": "system", "content": "You count birds. " * 20}


def test_one_look_shows_requests_sessions_and_the_miss(server: AppUnderTest) -> None:
    """Totals of the hour, a session with the branch that left another one, and why the last request computed again."""
    first = [SYSTEM, {"role": "user", "content": "How many swans are there?"}]
    answer = app_chat(server, first)
    history = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And how many geese?"}]
    app_chat(server, history)
    edited = [SYSTEM, {"role": "user", "content": "How many swans were there?"}, *history[2:]]
    app_chat(server, edited)
    assert eventually(lambda: server.app.dashboard()["misses"] != [])
    done = run_script("top.py", "--server-url", f"http://127.0.0.1:{server.port}", "--once")
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "3 requests" in shown and "message changed (message 1, char 15)" in shown, done.stdout
    assert "branch 1:" in shown and "branch 2:" in shown
    assert "swans" not in shown, "no text of a prompt"


def test_nobody_there_is_exit_code_2() -> None:
    """One line and no traceback."""
    done = run_script("top.py", "--server-url", "http://127.0.0.1:9", "--once")
    assert done.returncode == 2 and done.stderr.startswith("error: GET http://127.0.0.1:9/dashboard/events: ")


def app_chat(server: AppUnderTest, messages: list[dict[str, str]]) -> str:
    return server.chat(messages, session_id="birds", enable_thinking=False, max_tokens=4).content
