"""The process: loading, stopping, what it answers for itself, and what a person reads of each request."""

import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import kvserve.app.model_factory
import kvserve.app.server
from kvserve.app.banner import device_line
from kvserve.app.proxy_wiring import access_warnings
from kvserve.app.server import Server
from kvserve.engine.device import device_facts
from kvserve.errors import ModelLoadError, PortTaken
from tests.engine.odd_caches import Unmergeable, use_cache
from tests.laws import sampled_cells
from tests.serving import (
    CHAT_PATH,
    COMPLETION_PATH,
    AppUnderTest,
    chat_body,
    chunks_of,
    encode_request,
    eventually,
    joined,
    serving_app,
    unstarted_app,
    writing,
)
from tests.trace_lines import parse_line
from tests.web.fakes import RawClient


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("app"), max_kv_size=4096) as app:
        yield app


# --- starting and stopping --------------------------------------------------------------------------------------------


def test_while_the_model_loads_the_server_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests and /health are a 503 that says when to come back, the list is empty; then all is served."""
    go_on = threading.Event()
    real = kvserve.app.model_factory.load_tokenizer
    monkeypatch.setattr(kvserve.app.model_factory, "load_tokenizer", lambda *given: (go_on.wait(60), real(*given))[1])
    with unstarted_app(tmp_path) as app, ThreadPoolExecutor(1) as pool:
        starting = pool.submit(app.app.start, threading.Event())
        try:
            assert eventually(lambda: _is_bound(app))
            health = app.get("/health")
            assert health.status == 503 and health.json["status"] == "loading"
            for path in (CHAT_PATH, COMPLETION_PATH):
                for stream in (False, True):
                    response = app.post(path, {**chat_body(stream=stream), "prompt": "x"})
                    assert response.status == 503 and response.error["code"] == "not_ready"
                    assert int(response.headers["retry-after"]) > 0
            assert app.get("/v1/models").json["data"] == []
        finally:
            go_on.set()
        starting.result(60)
        assert app.get("/health").status == 200
        assert app.chat(max_tokens=2).finish_reason == "length"


def _is_bound(app: AppUnderTest) -> bool:
    try:
        return bool(app.port)
    except RuntimeError:
        return False


def test_a_stop_while_the_model_loads_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`start` returns soon, nothing is served, nothing stays."""
    threads = set(threading.enumerate())
    stopping = threading.Event()
    real = kvserve.app.model_factory.load_tokenizer
    monkeypatch.setattr(kvserve.app.model_factory, "load_tokenizer", lambda *given: (stopping.set(), real(*given))[1])
    with unstarted_app(tmp_path) as app:
        app.app.start(stopping)
        port = app.port
    assert not any("serves" in line for line in app.lines())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)
    assert eventually(lambda: set(threading.enumerate()) <= threads)


@pytest.mark.parametrize("fault", ["missing", "empty", "broken", "unknown"])
def test_a_model_that_cannot_be_loaded_is_an_error_of_the_start(tmp_path: Path, fault: str) -> None:
    """One paragraph with the reason; the port is free again and no thread is left."""
    threads = set(threading.enumerate())
    folder = tmp_path / "model"
    if fault != "missing":
        folder.mkdir()
    if fault == "broken":
        (folder / "config.json").write_text("{")
    if fault == "unknown":
        (folder / "config.json").write_text('{"model_type": "nonesuch"}')
    with unstarted_app(tmp_path, model_path=str(folder)) as app:
        with pytest.raises(ModelLoadError) as failed:
            app.app.start(threading.Event())
        port = app.port
    assert str(folder) in str(failed.value) and "\n" not in str(failed.value)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)
    assert eventually(lambda: set(threading.enumerate()) <= threads)


def test_a_port_that_is_taken_is_an_error_of_the_start(tmp_path: Path) -> None:
    """The holder is left alone."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with unstarted_app(tmp_path, mlx_port=port) as app, pytest.raises(PortTaken, match=str(port)):
            app.app.start(threading.Event())
        socket.create_connection(("127.0.0.1", port), timeout=60).close()


def test_stopping_ends_streams_well_formed(tmp_path: Path) -> None:
    """A stream in prefill or decode ends with an error and [DONE]; an answer that is not streamed is a 503."""
    with serving_app(tmp_path, prefill_step_size=16) as app:
        endless = {"max_tokens": 50_000}
        long = [{"role": "user", "content": "word " * 8_000}]
        clients = [app.connect() for _ in range(3)]
        clients[0].send(encode_request("POST", CHAT_PATH, chat_body(stream=True, **endless)))
        clients[1].send(encode_request("POST", CHAT_PATH, chat_body(**endless)))
        assert eventually(lambda: app.app.health()[1]["num_decoding"] == 2)
        assert eventually(lambda: _has_said_something(clients[0]))
        clients[2].send(encode_request("POST", CHAT_PATH, chat_body(long, stream=True)))
        assert eventually(lambda: app.app.health()[1]["num_prefilling"] == 1)
        app.app.stop()
        streams = [clients[0].read_response(), clients[2].read_response()]
        refused = clients[1].read_response()
        for client in clients:
            client.close()
    chunks = [chunks_of(stream) for stream in streams]
    assert [each[-1]["error"]["code"] for each in chunks] == ["not_ready", "not_ready"]
    answers = [joined(each[:-1]) for each in chunks]
    assert [answer.finish_reason for answer in answers] == [None, None]
    assert answers[0].content and not answers[1].content
    assert refused.status == 503 and refused.error["code"] == "not_ready"
    ends = [line for line in app.lines() if "openai_chat" in line]
    assert len(ends) == 3 and not any("max_tokens" in line for line in ends), "it was nobody's limit"


def _has_said_something(client: RawClient) -> bool:
    """Whether a stream of which nothing was read yet has brought a word."""
    return re.search(rb'"content": ?"[^"]', client.socket.recv(65_536, socket.MSG_PEEK)) is not None


def test_the_banner_waits_for_the_proxy_as_long_as_it_may(tmp_path: Path) -> None:
    """PROXY_STARTUP_WAIT_SECONDS while LiteLLM starts, and not at all once it answers, however long that may be."""
    proxy = SimpleNamespace(state=SimpleNamespace(status="starting"), stop=lambda: None)
    with unstarted_app(tmp_path, proxy_startup_wait_seconds=0.3) as app:
        app.app._proxy = cast(Any, proxy)
        begun = time.monotonic()
        app.app._wait_for_proxy(threading.Event())
        assert time.monotonic() - begun >= 0.3
    proxy.state.status = "ready"
    with unstarted_app(tmp_path, proxy_startup_wait_seconds=10_000) as app:
        app.app._proxy = cast(Any, proxy)
        app.app._wait_for_proxy(threading.Event())


def test_the_terminal_says_when_the_proxy_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the address that clients are given: the banner may have come long before."""
    told: list[Callable[[], None]] = []

    class Proxy:
        def __init__(self, *_: object, **hooks: Callable[[], None]) -> None:
            told.append(hooks["on_ready"])

        def start(self) -> None:
            """Nothing: readiness is told below."""

        def stop(self) -> None:
            """Nothing runs."""

    monkeypatch.setattr("kvserve.app.proxy_wiring.LitellmProxy", Proxy)
    with unstarted_app(tmp_path, proxy_port=4567) as app:
        monkeypatch.setattr(app.app, "_launch", replace(app.app._launch, with_proxy=True))
        monkeypatch.setattr(app.app, "_server", SimpleNamespace(port=1, stop=lambda *_: None))
        app.app._start_proxy()
        assert "LiteLLM" not in app.screen.getvalue()
        told[0]()
        assert re.search(r"LiteLLM is ready: http://127\.0\.0\.1:4567, \d+\.\d s after", app.screen.getvalue())
        monkeypatch.undo()


def test_the_terminal_says_when_the_server_is_ready(app: AppUnderTest) -> None:
    """Before the banner, which may wait for LiteLLM."""
    text = app.screen.getvalue()
    told = re.search(rf"kvserve is ready: http://127\.0\.0\.1:{app.port}, \d+\.\d s after the start", text)
    assert told is not None and told.start() < text.index("\nkvserve ")


def test_the_code_that_runs_is_noted_before_a_model_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch may take hours, and code be replaced meanwhile."""

    def fetching(_server: Server) -> Path:
        assert noted == ["now"]
        raise ModelLoadError("it is not there")

    noted: list[str] = []
    monkeypatch.setattr(kvserve.app.server, "note_code", lambda: noted.append("now"))
    monkeypatch.setattr(Server, "_model_folder", fetching)
    with unstarted_app(tmp_path) as app, pytest.raises(ModelLoadError, match="it is not there"):
        app.app.start(threading.Event())


def test_a_start_that_failed_before_the_shared_cache_was_asked_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once a model is loaded: what others forgot can be forgotten then."""

    def fetching(_server: Server) -> Path:
        raise ModelLoadError("it is not there")

    monkeypatch.setattr(Server, "_model_folder", fetching)
    with unstarted_app(tmp_path, remote_cache_url="redis://127.0.0.1:1/0") as app:
        with pytest.raises(ModelLoadError, match="it is not there"):
            app.app.start(threading.Event())
        assert app.app._shared is not None and app.app._shared.server.state == "connecting"
        assert not [each for each in threading.enumerate() if each.name.startswith("kvserve-remote")]
        app.app.stop()


def test_the_family_that_is_set_comes_first(app: AppUnderTest, tmp_path: Path) -> None:
    """MODEL_FAMILY decides which form of calls is tried first; without it the template does."""
    assert app.served.output_format.tool_forms[0].name == "hermes"
    with serving_app(tmp_path, model_family="glm4") as other:
        assert other.served.output_format.tool_forms[0].name == "glm"


# --- what it answers for itself ---------------------------------------------------------------------------------------


def test_the_models_list_names_what_is_served(app: AppUnderTest) -> None:
    """The loaded model by its path, slashes included, alone and in the list; another name is a 404."""
    listed: Any = app.get("/v1/models").json
    [card] = listed["data"]
    assert card["id"] == app.served.name and card["object"] == "model"
    assert app.get(f"/v1/models/{app.served.name}").json == card
    assert app.get("/v1/models/other").status == 404


def test_health_counts_rows(app: AppUnderTest) -> None:
    """The running count follows what computes; asking costs no step."""
    health = app.health()
    assert health["status"] == "ok" and health["num_running"] == 0 and health["proxy"] == "off"
    assert health["is_batched"] and health["is_prefix_cached"] and health["chat_template"] is None
    with app.connect() as client:
        client.send(encode_request("POST", CHAT_PATH, chat_body(stream=True, max_tokens=3_000)))
        assert eventually(lambda: app.health()["num_decoding"] == 1)
        assert app.health()["num_running"] == 1
    assert eventually(lambda: app.health()["num_running"] == 0)


def test_the_banner_says_what_is_served_and_where(app: AppUnderTest) -> None:
    """The model, its context and the URL; no proxy is promised."""
    text = app.screen.getvalue()
    assert f"serves {app.served.name} (context 4,096 tokens)" in text
    assert f"http://127.0.0.1:{app.port}/v1" in text and "LiteLLM" not in text
    assert f"http://127.0.0.1:{app.port}/dashboard" in text
    assert f"  device  {device_line(device_facts())}" in text.splitlines() and "  models  " not in text


def test_the_banner_warns_of_an_open_server(app: AppUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound to the network without a key."""
    assert not app.app._banner(app.served).warnings
    open_to_all = app.app._settings.model_copy(update={"mlx_host": "0.0.0.0"})
    monkeypatch.setattr(app.app, "_settings", open_to_all)
    assert app.app._banner(app.served).warnings == tuple(access_warnings(open_to_all))


def test_the_banner_tells_of_keys_that_no_port_asks_for(app: AppUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 4000 asks for them, and this server has none: only API_KEY counts."""
    held = app.app._settings.model_copy(update={"api_keys_file": Path("keys.toml")})
    monkeypatch.setattr(app.app, "_settings", held)
    [warning] = app.app._banner(app.served).warnings
    assert "API_KEYS_FILE" in warning and "only API_KEY opens MLX_PORT" in warning


# --- what a person reads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_each_request_has_one_line(app: AppUnderTest, stream: bool) -> None:
    """Protocol, session, tokens in and out, first token, speed and end, whatever way the answer travels."""
    with writing(app, "All is well with the server.") as fields:
        body = chat_body(stream=stream, session_id="my-session", **fields)
        response = app.post(CHAT_PATH, body)
    answer_id = chunks_of(response)[0]["id"] if stream else str(response.json["id"])
    line = app.line_of(answer_id)
    for part in ("openai_chat", "[my-session]", " in", " out, ", "first token ", " tok/s", ", stop"):
        assert part in line, line


def test_the_first_warm_turn_of_a_conversation_says_once_what_was_saved(app: AppUnderTest) -> None:
    """In a line of its own behind the request's, which says it too; the third turn has its own line alone."""
    said: list[dict[str, object]] = [{"role": "user", "content": "Listen: " + "the quick brown fox jumps. " * 60}]
    lines = []
    for _ in range(3):
        response = app.post(CHAT_PATH, chat_body(said, session_id="warm-session"))
        lines.append(app.line_of(str(response.json["id"])))
        said += [response.json["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    assert all(" reused, " in line for line in lines[1:])
    told = [line.partition(" ")[2] for line in app.lines() if re.search(r" turn \d+: ", line)]
    assert len(told) == 1 and re.fullmatch(r"turn 2: [\d,]+ of [\d,]+ tokens reused, about [\d.]+ s saved", told[0])


def test_a_refused_request_has_a_line_with_its_reason(app: AppUnderTest) -> None:
    """Status and cause; text from the network cannot forge a line of its own."""
    message = {"role": "user", "content": "word " * 5_000}
    response = app.post(CHAT_PATH, chat_body([message], session_id="a\n12:00:00 forged\x1b[2J"))
    assert response.status == 400
    line = app.line_of(response.headers["x-request-id"])
    assert "error 400" in line and "4096" in line
    assert "\x1b" not in app.screen.getvalue() and not any(each.startswith("12:00:00 forged") for each in app.lines())


def test_a_client_that_leaves_has_a_line(app: AppUnderTest) -> None:
    """It says cancelled, with what was written until then."""
    with app.connect() as client:
        client.send(encode_request("POST", CHAT_PATH, chat_body(stream=True, max_tokens=3_000)))
        _, headers = client.read_head()
        client.read_chunk()
    assert "cancelled" in app.line_of(headers["x-request-id"])


@sampled_cells(lambda stream: stream)
@pytest.mark.parametrize("stream", [False, True])
def test_the_watchdog_ends_an_answer_with_length(tmp_path: Path, stream: bool) -> None:
    """The client gets what there is, the line says who cut it, and the engine is free."""
    with serving_app(tmp_path, generation_watchdog_seconds=0.4) as app:
        response = app.post(CHAT_PATH, chat_body(stream=stream, max_tokens=50_000))
        body: Any = chunks_of(response)[-1] if stream else response.json
        assert body["choices"][0]["finish_reason"] == "length"
        assert "length (watchdog)" in app.line_of(body["id"])
        assert eventually(app.is_idle)
        assert _num_remembered(app) == (0, 0, 0), "no turn record, no healing entry"
        app.served.engine._ask(lambda scheduler: setattr(scheduler, "_watchdog_seconds", 0))  # the next one may be slow
        assert app.chat(max_tokens=2).finish_reason == "length"
        assert min(_num_remembered(app)[:2]) > 0


def _num_remembered(app: AppUnderTest) -> tuple[int, int, int]:
    told: Any = app.get("/v1/cache").json
    return told["num_messages"], told["num_branches"], told["num_healing_entries"]


def test_a_turn_is_written_to_the_file_of_its_session(app: AppUnderTest) -> None:
    """One line that parses, for the owner's eyes only; the id may come in the body or in a header."""
    answers = [
        app.chat("First question.", session_id="tale-1", max_tokens=5),
        app.chat("Second question.", headers={"x-session-id": "tale-1"}, max_tokens=5),
        app.chat("Another.", metadata={"session_id": "tale-2"}, max_tokens=5),
    ]
    assert eventually(lambda: len(_events(app, "tale-1")) == 2 and len(_events(app, "tale-2")) == 1)
    events = [*_events(app, "tale-1"), *_events(app, "tale-2")]
    for event, answer, said in zip(events, answers, ("First question.", "Second question.", "Another."), strict=True):
        assert event.name == "turn" and said in str(event.fields["prompt"])
        assert event.fields["num_completion_tokens"] == answer.num_completion_tokens == 5
        assert answer.usage is not None and event.fields["num_prompt_tokens"] == answer.usage["prompt_tokens"]
        assert event.fields["finish_reason"] == "length" and event.fields["num_messages"] == 1
    for path in app.log_root.rglob("*.log"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def _events(app: AppUnderTest, session: str) -> list[Any]:
    files = list(app.log_root.rglob(f"cache-session-{session}-*.log"))
    return [parse_line(line) for file in files for line in file.read_text().splitlines()]


def test_nothing_is_written_where_logging_is_off(tmp_path: Path) -> None:
    """ENABLE_REQUEST_LOGGING=false leaves no trace file, and the request line stays."""
    with serving_app(tmp_path, enable_request_logging=False) as app:
        body = app.post(CHAT_PATH, chat_body(session_id="tale", max_tokens=2)).json
        assert app.line_of(str(body["id"]))
        assert not app.log_root.exists() or not list(app.log_root.rglob("*.log"))


def test_what_the_models_caches_do_not_allow_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that cannot be batched is served; the banner names its caches and the price, /health says it shortly."""
    use_cache(monkeypatch, Unmergeable)
    with serving_app(tmp_path) as app:
        assert app.post(CHAT_PATH, chat_body(max_tokens=2)).status == 200
        assert any("take turns" in line and "Unmergeable" in line for line in app.lines())
        health = app.health()
    assert (health["is_batched"], health["is_prefix_cached"]) == (False, True)
