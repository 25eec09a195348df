"""`kvserve top` and `kvserve explain` before a real server: a look at it, an explanation, and what they say where
nobody is there."""

import http.client
import io
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console

from kvserve.cache.remote_fetch import FetchCounts
from kvserve.cache.remote_sending import SendCounts
from kvserve.cache.remote_tier import RemoteStats
from kvserve.cli import top
from kvserve.cli.asking import KEY_VARIABLE, Address, NoAnswer, address_of
from kvserve.cli.doctor import OWN_FIELDS
from kvserve.cli.explaining import text_of
from kvserve.cli.output import printable_in
from kvserve.observe.reports import remote_body
from tests.cli.running import run, told, words_of
from tests.models import tiny_model
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
NOWHERE = "http://127.0.0.1:9"
PROMPT_FIELDS = ("num_prompt_tokens", "num_cached_tokens")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A small dense model on a free port, without LiteLLM."""
    with serving_app(tmp_path_factory.mktemp("server"), "qwen3") as app:
        yield app


def asked(server: AppUnderTest, *words: str) -> Result:
    return run(*words, "--server-url", f"http://127.0.0.1:{server.port}")


def chat(server: AppUnderTest, messages: list[dict[str, str]]) -> str:
    return server.chat(messages, session_id="birds", enable_thinking=False, max_tokens=4).content


def test_one_look_shows_requests_sessions_and_the_miss(server: AppUnderTest) -> None:
    """Totals of the hour, a session with the branch that left another one, and why the last request computed again; and
    the last request is explained in words and as the server tells it."""
    first = [SYSTEM, {"role": "user", "content": "How many swans are there?"}]
    answer = chat(server, first)
    history = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And how many geese?"}]
    chat(server, history)
    edited = [SYSTEM, {"role": "user", "content": "How many swans were there?"}, *history[2:]]
    chat(server, edited)
    assert eventually(lambda: "message changed" in str(server.app.observability.dashboard()["misses"]))
    done = asked(server, "top", "--once")
    assert done.exit_code == 0, done.stderr
    shown = words_of(done.stdout)
    assert "3 requests" in shown and "message changed (message 1, char 15)" in shown, done.stdout
    assert "branch 1:" in shown and "branch 2:" in shown
    assert "message changed 1" in shown, "causes are counted"
    assert "swans" not in shown, "no text of a prompt"
    state = told("top", "--once", "--server-url", f"http://127.0.0.1:{server.port}")
    assert state["health"]["status"] == "ok" and len(state["misses"]) == 1
    assert state["health"].keys() >= OWN_FIELDS, "by these the doctor knows a kvserve"
    num_prompt, num_cached = (sum(each[name] for each in state["last"]) for name in PROMPT_FIELDS)
    assert 0 < num_cached < num_prompt
    assert f"{num_cached:,} reused, {num_prompt - num_cached:,} computed" in shown, shown

    body = told("explain", "--server-url", f"http://127.0.0.1:{server.port}/v1")
    assert body["cause"] == "message changed" and body["first_difference"]["message_index"] == 1
    explained = asked(server, "explain", body["request_id"][:12]).stdout
    assert explained.startswith(body["request_id"]) and body["remedy"] in words_of(explained)
    assert f"{body['cached_tokens']:,} of {body['num_prompt_tokens']:,} prompt tokens" in explained
    launched = told("launch", "codex", "--server-url", f"http://127.0.0.1:{server.port}")
    assert f"model_context_window = {server.served.context_limit}" in launched["command"]
    assert "tool None" not in explained and "message 1, character 15" in explained
    assert "shared" not in explained
    beside = text_of({**body, "unshared": {"reason": "slower", "num_there_tokens": 1200}})
    assert "no more from the shared cache: slower (1,200 tokens are there)" in beside
    unknown = asked(server, "explain", "../health")
    assert unknown.exit_code == 2 and ": 404 " in unknown.stderr, "an id is no way out of its path"


def test_the_place_in_a_raw_prompt_is_a_character(server: AppUnderTest) -> None:
    """It has no message to be named."""
    text = "Count the ducks by the river, then those by the lake, then those by the sea, and say how many they are. "
    for number in range(2):
        body = {"prompt": f"Day {number}. {text * 3}", "max_tokens": 1, "session_id": "raw"}
        assert server.post(COMPLETION_PATH, body).status == 200
    # Another test's miss may be there already.
    assert eventually(lambda: "prompt changed" in str(server.app.observability.dashboard()["misses"]))
    done = asked(server, "top", "--once")
    shown = words_of(done.stdout)
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
            done = asked(app, "top", "--once")
        assert done.exit_code == 0, done.stderr
        assert "waiting for small" in words_of(done.stdout), done.stdout


def test_a_shared_cache_has_a_line_where_there_is_one(server: AppUnderTest) -> None:
    """With how it is, what came and went, and what went wrong."""
    state = told("top", "--once", "--server-url", f"http://127.0.0.1:{server.port}")
    assert state["cache"]["remote"] is None and "shared cache" not in drawn(state)
    fetched = FetchCounts(num_looks=5, num_hits=3, num_read_bytes=2 * 2**20)
    sent = SendCounts(num_written_bytes=3 * 2**20)
    stats = RemoteStats("redis://host", "down", fetched, sent, 0, 0, None, None, None, None, {"unreachable": 4})
    state["cache"]["remote"] = remote_body(stats, None)
    told_of_it = "shared cache down, left alone, 2 MiB read, 3 MiB sent, 3 of 5 prompts found something, 4 errors"
    assert told_of_it in drawn(state)


def drawn(state: dict[str, Any]) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(top.screen(state))
    assert isinstance(console.file, io.StringIO)
    return words_of(console.file.getvalue())


@pytest.mark.parametrize("words", [("top", "--once"), ("top",), ("explain", "--json")])
def test_nobody_there_is_exit_code_2(words: tuple[str, ...]) -> None:
    """One line and no traceback."""
    done = run(*words, "--server-url", NOWHERE)
    assert done.exit_code == 2 and done.stderr.startswith(f"Error: GET {NOWHERE}/") and done.stdout == ""
    assert run(*words, "--server-url", "127.0.0.1:8080").exit_code == 2


def test_a_stream_that_ends_is_asked_again_once_it_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that restarts is waited for; one that was never there is not."""
    answers: list[Any] = [[{"n": 1}], http.client.HTTPException("gone"), [{"n": 2}], KeyboardInterrupt()]

    def events(_: Address, path: str) -> Iterator[Any]:
        answer = answers.pop(0)
        if not isinstance(answer, list):
            raise answer if isinstance(answer, KeyboardInterrupt) else top.NoAnswer(str(answer))
        yield from answer

    monkeypatch.setattr(Address, "events", events)
    monkeypatch.setattr(top, "AGAIN_SECONDS", 0.0)
    seen = []
    with pytest.raises(KeyboardInterrupt):
        for state in top.states(Address("http://a", "")):
            seen.append(state)
    assert seen == [{"n": 1}, {"n": 2}]


def test_the_key_of_the_settings_goes_to_their_own_server_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a server is named its key has to be given too; a wildcard address is asked on loopback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("API_KEY=secret\nMLX_HOST=::\nMLX_PORT=8123\n", "utf-8")
    assert address_of(None, None) == Address("http://[::1]:8123", "secret")
    assert address_of("http://elsewhere:1/v1", None) == Address("http://elsewhere:1", "")
    assert address_of("http://elsewhere:1/", "theirs") == Address("http://elsewhere:1", "theirs")


def test_a_key_need_not_stand_on_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable stands for the option, whose own value counts more; the help names it."""
    asked: list[str] = []
    monkeypatch.setattr(Address, "get", lambda address, _: asked.append(address.api_key) or {})
    monkeypatch.setattr("kvserve.cli.explaining.text_of", lambda _: "")
    monkeypatch.setenv(KEY_VARIABLE, "sk-of-the-variable")
    for words in ((), ("--api-key", "sk-typed")):
        assert run("explain", "--server-url", NOWHERE, *words).exit_code == 0
    assert asked == ["sk-of-the-variable", "sk-typed"]
    assert "KVSERVE_API_KEY" in run("explain", "--help").stdout


def test_what_is_no_http_moves_no_cursor() -> None:
    """A listener's first line stands in the error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_once, args=(listener, b"\x1b[2J\r\n"))
        thread.start()
        with pytest.raises(NoAnswer, match=r"\\x1b\[2J") as silence:
            Address(f"http://127.0.0.1:{listener.getsockname()[1]}", "").get("/")
        thread.join()
    assert "\x1b" not in str(silence.value)


def answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65_536)
        connection.sendall(answer)


def test_what_a_client_sent_moves_no_cursor() -> None:
    """Control characters in a name or a text are shown as their escapes; JSON has them as JSON does."""
    found = {"name": "a\x1b[2J\nb", "list": [{"x\x9b": 1}]}
    assert printable_in(found) == {"name": "a\\x1b[2J\\nb", "list": [{"x\\x9b": 1}]}


def test_an_explanation_without_a_request_before_it_is_short() -> None:
    """What is not there has no line."""
    found = {
        **{"request_id": "req1", "cached_tokens": 0, "num_prompt_tokens": 0, "source": "", "tier": "nothing"},
        **{"cause": "first", "summary": "Nothing was known.", "remedy": None, "first_difference": None, "rules": []},
        **{"before": None, "speculation": None},
    }
    assert len(text_of(found).splitlines()) == 4


@pytest.mark.parametrize(
    ("part", "whole", "shown"), [(1_999, 2_000, "99.9 %"), (2, 3, "66.6 %"), (2_000, 2_000, "100.0 %"), (0, 0, "-")]
)
def test_shares_are_rounded_down_as_on_the_dashboard(part: int, whole: int, shown: str) -> None:
    """The same number in both, and 100 % only where nothing was computed."""
    assert top.share(part, whole) == shown
    draw = (ROOT / "kvserve" / "web" / "dashboard" / "draw.js").read_text("utf-8")
    assert "Math.floor((1000 * part) / whole) / 10" in draw, "the dashboard's own formula"
