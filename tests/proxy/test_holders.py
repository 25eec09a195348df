"""The guard where several people have keys: who is let in, what it tells the backend of them, and their limits."""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvserve.core import HELD, KEY_HEADER, key_digest
from kvserve.errors import BadRequest
from kvserve.proxy.asgi import App, Message, Receive, Scope, Send
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.guard import Guard, GuardRules
from kvserve.proxy.keys_file import KeyHolder
from kvserve.proxy.paths import ROUTES
from tests.laws import num_examples
from tests.proxy.held import ANNA, ANNAS_SECOND, API_KEY, BOSS, OTTO, TABLES, limited, write_keys
from tests.proxy.test_guard import CHAT, Behind, Inner, header, piece, scope_of, unasked

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SPOKEN = (CHAT, RESPONSES, MESSAGES)


def guard_of(file: Path, app: App, backend: App = unasked) -> Guard:
    here = BackendAddress("kvserve", "http://127.0.0.1:9", API_KEY)
    rules = GuardRules(
        "127.0.0.1", "openai/m", backends=(here,), api_key=API_KEY, secret="shared", api_keys_file=str(file)
    )
    return Guard(app, Behind(backend), rules)


async def asked(guard: Guard, scope: Scope, *messages: Message, stays: bool = True) -> list[Message]:
    """Everything that is sent to a client, which leaves behind its messages unless it stays."""
    sent: list[Message] = []
    pending = list(messages or (piece(b"{}"),))

    async def receive() -> Message:
        if not pending and stays:
            return await asyncio.Future()
        return pending.pop(0) if pending else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await guard(scope, receive, send)
    return sent


def ask(guard: Guard, scope: Scope) -> list[Message]:
    return asyncio.run(asked(guard, scope))


def error_of(sent: list[Message]) -> dict[str, object]:
    return dict(json.loads(sent[1]["body"])["error"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys.toml")


@pytest.mark.parametrize("path", SPOKEN)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer stranger"}, {"x_api_key": ANNA + "x"}])
def test_who_has_no_key_is_refused_in_the_protocols_form(file: Path, path: str, headers: Mapping[str, str]) -> None:
    """401, and nobody behind the guard is asked."""
    sent = ask(guard_of(file, unasked), scope_of(path=path, **headers))
    error = error_of(sent)
    assert sent[0]["status"] == 401
    if path == MESSAGES:
        assert json.loads(sent[1]["body"])["type"] == "error" and error["type"] == "authentication_error"
    else:
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "API_KEY, the only key" not in str(error["message"])


@pytest.mark.parametrize("path", SPOKEN)
@pytest.mark.parametrize("limits", [{"requests_per_minute": 1}, {"rows_at_once": 1}])
def test_who_asks_too_much_is_told_when_to_come_back(tmp_path: Path, path: str, limits: Mapping[str, object]) -> None:
    """429 in the protocol's form; whoever else has a key is served meanwhile."""
    file = write_keys(tmp_path / "keys.toml", limited(**limits))

    async def run() -> list[list[Message]]:
        go_on = asyncio.Event()

        async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
            await go_on.wait()
            await Inner()(scope, receive, send)

        guard = guard_of(file, waiting)
        first = asyncio.create_task(asked(guard, scope_of(path=path, x_api_key=ANNA)))
        await asyncio.sleep(0)
        refused = await asked(guard, scope_of(path=path, x_api_key=ANNAS_SECOND))
        go_on.set()
        return [await first, refused, await asked(guard, scope_of(path=path, x_api_key=OTTO))]

    first, refused, other = asyncio.run(run())
    assert [sent[0]["status"] for sent in (first, refused, other)] == [200, 429, 200]
    error = error_of(refused)
    assert error["type"] == "rate_limit_error" and "anna may" in str(error["message"])
    assert path == MESSAGES or error["code"] == "rate_limit_exceeded"
    assert 1 <= int(header(refused, b"retry-after") or 0) <= 60


def test_paths_of_operators_are_for_operators(file: Path) -> None:
    """Every other path is for whoever has a key; those without one are for everybody still."""
    for pattern, route in ROUTES.items():
        for method in route.methods:
            statuses = []
            for key in ("", ANNA, BOSS, API_KEY):
                inner = Inner()
                scope = scope_of(method, pattern.replace("*", "x"), **({"x_api_key": key} if key else {}))
                statuses.append(ask(guard_of(file, inner, inner), scope)[0]["status"])
            everybody = 401 if route.needs_key else 200
            assert statuses == [everybody, 403 if route.for_operator else 200, 200, 200], (method, pattern)
    assert [path for path, route in ROUTES.items() if route.for_operator] == [
        *("/v1/models/load", "/v1/cache", "/v1/drain", "/metrics", "/dashboard/events", "/dashboard/sessions/*"),
    ]


def test_what_lies_below_one_backend_is_for_operators(file: Path) -> None:
    """Whatever the path is at the server itself; what needs no key there needs none here."""
    for path, statuses in (
        ("/backends/kvserve/v1/models/x", [401, 403, 200, 200]),
        ("/backends/kvserve/v1/cache/explain", [401, 403, 200, 200]),
        ("/backends/kvserve/metrics", [401, 403, 200, 200]),
        ("/backends/kvserve/health", [200, 200, 200, 200]),
    ):
        inner = Inner()
        scopes = [scope_of("GET", path, **({"x_api_key": key} if key else {})) for key in ("", ANNA, BOSS, API_KEY)]
        assert [ask(guard_of(file, inner, inner), scope)[0]["status"] for scope in scopes] == statuses, path


def test_what_only_reads_or_deletes_is_not_counted(tmp_path: Path) -> None:
    """Nor is counting tokens; every other POST is."""
    file = write_keys(tmp_path / "keys.toml", limited(requests_per_minute=1))
    for pattern, route in ROUTES.items():
        for method in route.methods:
            if route.for_operator or not route.needs_key:
                continue
            inner = Inner()
            guard = guard_of(file, inner, inner)
            scope = scope_of(method, pattern.replace("*", "x"), x_api_key=ANNA)
            statuses = [ask(guard, {**scope})[0]["status"] for _ in range(2)]
            is_counted = method == "POST" and pattern != "/v1/messages/count_tokens"
            assert statuses == [200, 429 if is_counted else 200], (method, pattern)


def test_a_limit_that_is_changed_counts_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read again, and what was begun before is counted."""
    monkeypatch.setattr("kvserve.proxy.keys_file.LOOK_SECONDS", 0.0)
    file = write_keys(tmp_path / "keys.toml", limited(requests_per_minute=1))
    guard = guard_of(file, Inner())
    scope = scope_of(x_api_key=ANNA)
    assert [ask(guard, {**scope})[0]["status"] for _ in range(2)] == [200, 429]
    write_keys(file, limited(requests_per_minute=2))
    assert [ask(guard, {**scope})[0]["status"] for _ in range(2)] == [200, 429]
    write_keys(file, {name: table for name, table in TABLES.items() if name != "anna"})
    assert ask(guard, {**scope})[0]["status"] == 401


DIGESTS = {name: KeyHolder(name, name).digest for name in TABLES}


@pytest.mark.parametrize(("path", "method"), [(CHAT, "POST"), (RESPONSES, "POST"), ("/v1/cache/prewarm", "POST")])
@pytest.mark.parametrize("spelled", ["authorization", "x_api_key"])
def test_the_backend_gets_the_servers_key_and_whose_it_is(file: Path, path: str, method: str, spelled: str) -> None:
    """LiteLLM's master key is API_KEY whatever key came; the client's own goes no further, in no header."""
    for key, whose in (
        (ANNA, f"{HELD} {DIGESTS['anna']}"),
        (ANNAS_SECOND, f"{HELD} {DIGESTS['anna']}"),
        (OTTO, f"{HELD} {DIGESTS['otto']}"),
        (API_KEY, key_digest({"x-api-key": API_KEY})),
    ):
        inner = Inner()
        sent = {spelled: f"Bearer {key}" if spelled == "authorization" else key, "x_kvserve_key": "0123456789abcdef"}
        ask(guard_of(file, inner, inner), scope_of(method, path, **sent))
        [(scope, _, _)] = inner.seen
        names = [name for name, _ in scope["headers"]]
        assert dict(scope["headers"])[b"authorization"] == f"Bearer {API_KEY}".encode()
        assert b"x-api-key" not in names and names.count(KEY_HEADER.encode()) == 1
        assert dict(scope["headers"])[KEY_HEADER.encode()] == f"shared {whose}".encode()
        assert key == API_KEY or key.encode() not in b" ".join(value for _, value in scope["headers"])


def test_litellms_list_of_models_is_asked_for_with_its_own_key(file: Path) -> None:
    """It has no body, and LiteLLM checks the key itself."""
    inner = Inner()
    ask(guard_of(file, inner), scope_of("GET", "/v1/models", x_api_key=OTTO))
    assert dict(inner.seen[0][0]["headers"])[b"authorization"] == f"Bearer {API_KEY}".encode()


def test_a_broken_file_is_told_once_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard error is the child's log; a request finds 503, with no word of what stands in the file."""
    path = tmp_path / "keys.toml"
    path.write_text("[anna]\nkey_sha256 = 'sk-secret'", "utf-8")
    guard = guard_of(path, Inner())
    sent = [ask(guard, scope_of(x_api_key=key)) for key in (ANNA, ANNA, API_KEY)]
    assert [each[0]["status"] for each in sent] == [503, 503, 200]
    assert dict(sent[0][0]["headers"])[b"retry-after"] == b"2"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "API_KEYS_FILE cannot be used: [anna] key_sha256" in said
    assert "sk-secret" not in said and "key_sha256" not in str(sent[0][1]["body"])


# --- limits are freed however a request ends --------------------------------------------------------------------------


async def _ends(scope: Scope, receive: Receive, send: Send) -> None:
    await Inner()(scope, receive, send)


async def _fails(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("a defect")


async def _refuses(scope: Scope, receive: Receive, send: Send) -> None:
    raise BadRequest("not so")


async def _breaks_off(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
    raise ConnectionError("the backend is gone")


async def _waits_for_its_client(scope: Scope, receive: Receive, send: Send) -> None:
    """What LiteLLM does with a stream: it ends when its client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _waits_for_ever(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.Future()


ENDS: Mapping[str, Callable[[Scope, Receive, Send], object]] = {
    "ends": _ends,
    "fails": _fails,
    "refuses": _refuses,
    "breaks off": _breaks_off,
    "its client leaves": _waits_for_its_client,
    "its client leaves while it computes": _waits_for_ever,
    "its client leaves while it sends": _ends,
    "its body is none": _ends,
    "its task is cancelled": _waits_for_ever,
}


async def _run_to_its_end(file_guard: Callable[[App], Guard], path: str, how: str) -> None:
    """One request of anna's that ends so."""
    guard = file_guard(ENDS[how])  # type: ignore[arg-type]
    messages = {"its client leaves while it sends": [piece(b'{"mes', True)], "its body is none": [piece(b"[")]}
    leaves = how.startswith("its client leaves")
    request = asyncio.create_task(
        asked(guard, scope_of(path=path, x_api_key=ANNA), *messages.get(how, []), stays=not leaves)
    )
    if how == "its task is cancelled" or (how == "its client leaves while it computes" and path == CHAT):
        await asyncio.sleep(0.001)
        request.cancel()  # for a chat LiteLLM itself sees that its client has left
    await asyncio.wait([request])
    if not request.cancelled():
        request.exception()


@settings(max_examples=num_examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ways=st.lists(st.tuples(st.sampled_from([*SPOKEN, "/v1/cache/prewarm"]), st.sampled_from(sorted(ENDS)))))
def test_a_row_is_free_again_however_requests_end(tmp_path: Path, ways: list[tuple[str, str]]) -> None:
    """Two at a time may run; after any number of any ends both places are there, and a third one is still refused."""
    file = write_keys(tmp_path / "keys.toml", limited(rows_at_once=2))

    async def run() -> list[int]:
        inner: list[App] = [_ends]

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await inner[0](scope, receive, send)

        guard = guard_of(file, app, app)

        def with_app(other: App) -> Guard:
            inner[0] = other
            return guard

        for path, how in ways:
            await _run_to_its_end(with_app, path, how)
        with_app(_waits_for_ever)
        open_ones = [asyncio.create_task(asked(guard, scope_of(x_api_key=ANNA))) for _ in range(2)]
        await asyncio.sleep(0.001)
        third = await asked(guard, scope_of(x_api_key=ANNA))
        statuses = [int(third[0]["status"]), sum(not each.done() for each in open_ones)]
        for each in open_ones:
            each.cancel()
        await asyncio.wait(open_ones)
        return statuses

    assert asyncio.run(run()) == [429, 2]
