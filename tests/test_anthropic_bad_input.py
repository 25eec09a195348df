"""Bad input to the Anthropic endpoints: each has its status and Anthropic's own error form, and costs no step."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvserve.errors import EngineFailure
from tests.anthropic_serving import COUNT_PATH, MESSAGES_PATH, ask, events_of, is_error_form, messages_body
from tests.protocols.test_anthropic_messages import MISTYPED
from tests.serving import AppUnderTest, eventually, serving_app, unstarted_app
from tests.test_http_bad_input import BODY_LIMIT, BROKEN_BODIES, BROKEN_REQUESTS, CONTEXT, HEAD, WORDS, patience_for
from tests.web.fakes import CHAT, FINISHED, FakeService, Response, serving

PATHS = [MESSAGES_PATH, COUNT_PATH]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A strict server with a small context and small bodies."""
    folder = tmp_path_factory.mktemp("small")
    with serving_app(folder, model_strict=True, max_kv_size=CONTEXT, max_request_body_bytes=BODY_LIMIT) as app:
        yield app


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_of_the_wrong_type_costs_no_step(small: AppUnderTest, path: str, stream: bool) -> None:
    """Each wrong value is a 400 whose message names the field."""
    before, wrong = small.num_forward_calls, []
    with small.connect() as client:
        for field, values in MISTYPED.items():
            if field.startswith("stream" if stream or path == COUNT_PATH else "-"):
                continue
            if path == COUNT_PATH and field in ("max_tokens", "thinking.display"):
                continue
            for value in values:
                body = {**messages_body(stream=stream), field.partition(".")[0]: value}
                response = client.request("POST", path, body)
                if response.status != 400 or not is_error_form(response) or field not in str(response.error["message"]):
                    wrong.append((field, value, response.status, response.body))
    assert not wrong
    assert small.num_forward_calls == before


UNENFORCEABLE = {"type": "object", "properties": {"at": {"enum": []}}, "required": ["at"]}
"""A schema of the right shape that no answer can obey."""
LOOK = {"name": "look", "input_schema": {"type": "object"}}
FORM = {"type": "json_schema", "schema": UNENFORCEABLE}
PROMISES: dict[str, dict[str, Any]] = {
    "output_config.format.schema": {"output_config": {"format": FORM}},
    "output_format.schema": {"output_format": FORM},
    "tools[1].input_schema": {
        "tools": [LOOK, {"name": "stop", "input_schema": UNENFORCEABLE, "strict": True}],
        "tool_choice": {"type": "any"},
    },
}


@pytest.mark.parametrize("field", PROMISES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_named_as_it_was_sent(
    small: AppUnderTest, field: str, stream: bool
) -> None:
    """It is found behind the protocols, where fields have other names: those are nothing to this client."""
    before = small.num_forward_calls
    response = small.post(MESSAGES_PATH, messages_body(stream=stream, **PROMISES[field]))
    assert response.status == 400 and is_error_form(response)
    assert str(response.error["message"]).startswith(f"{field} cannot be enforced: ")
    assert small.num_forward_calls == before


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_no_json_object_is_a_400(small: AppUnderTest, path: str) -> None:
    """And the connection's next request is served."""
    before = small.num_forward_calls
    with small.connect() as client:
        for name, body in BROKEN_BODIES.items():
            response = client.request("POST", path, body)
            assert response.status == 400 and is_error_form(response), name
        assert small.num_forward_calls == before
        assert client.request("POST", path, messages_body()).status == 200


@pytest.mark.parametrize("case", BROKEN_REQUESTS)
def test_a_request_that_is_broken_on_the_wire_has_its_status(small: AppUnderTest, case: str) -> None:
    """Once the path is known the error has the form of its protocol."""
    data, status = BROKEN_REQUESTS[case]
    with patience_for(small, status), small.connect() as client:
        client.send(data.replace(b"/v1/chat/completions", b"/v1/messages"))
        response = client.read_response()
    is_known = data.startswith(HEAD) and case != "half a head" and "length" not in case.replace("no length", "")
    assert response.status == status
    assert not is_known or is_error_form(response)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_a_400_with_both_numbers(small: AppUnderTest, stream: bool) -> None:
    """In the words that agents know; it can still be counted."""
    response = small.post(MESSAGES_PATH, messages_body(WORDS * 200, stream=stream))
    assert response.status == 400 and is_error_form(response)
    counted = small.post(COUNT_PATH, messages_body(WORDS * 200)).json["input_tokens"]
    assert response.error["message"] == f"prompt is too long: {counted} tokens > {CONTEXT} maximum"


@pytest.mark.parametrize("path", PATHS)
def test_other_errors_have_their_own_form_too(small: AppUnderTest, path: str) -> None:
    """An unknown model, a wrong method, a body that is too large, a foreign page."""
    with small.connect() as client:
        response = client.request("POST", path, messages_body(model="claude-x"))
        assert response.status == 404 and is_error_form(response)
        response = client.request("GET", path)
        assert response.status == 405 and is_error_form(response)
        response = client.request("POST", path, messages_body(), {"Origin": "https://foreign.example"})
        assert response.status == 403 and is_error_form(response)
    response = small.post(path, messages_body("x" * BODY_LIMIT))
    assert response.status == 413 and is_error_form(response)


@pytest.mark.parametrize("body", [None, {}])
def test_what_is_not_here_is_refused_in_the_same_form(small: AppUnderTest, body: dict[str, Any] | None) -> None:
    """Other paths below the endpoint's belong to its protocol, as on the proxy's port; its neighbours do not."""
    method = "GET" if body is None else "POST"
    with small.connect() as client:
        response = client.request(method, f"{MESSAGES_PATH}/batches", body)
    assert response.status == 404 and is_error_form(response)
    with small.connect() as client:
        response = client.request(method, f"{MESSAGES_PATH}es", body)
    assert response.status == 404 and "param" in response.error


def test_a_key_is_asked_for_in_both_spellings(tmp_path: Any) -> None:
    """401 with Anthropic's type; `x-api-key` and Bearer open the door."""
    with serving_app(tmp_path, api_key="secret") as app:
        for path in PATHS:
            response = app.post(path, messages_body(), {"x-api-key": "wrong"})
            assert response.status == 401 and is_error_form(response)
            for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
                assert app.post(path, messages_body(), headers).status == 200


def test_a_server_that_loads_is_overloaded(tmp_path: Any) -> None:
    """529 and when to come back, which clients retry by themselves."""
    with unstarted_app(tmp_path) as app:
        app.app._server.bind()
        app.app._server.start()
        for path in PATHS:
            response = app.post(path, messages_body())
            assert response.status == 529 and is_error_form(response)
            assert int(response.headers["retry-after"]) > 0


def test_a_full_queue_is_a_429(tmp_path: Any) -> None:
    """With Anthropic's type and when to come back; afterwards requests are served."""
    with serving_app(tmp_path, max_concurrent_requests=1, max_queued_requests=0) as app:
        endless = messages_body(stream=True, max_tokens=50_000)
        with app.connect() as client:
            client.send(_encoded(endless))
            assert eventually(lambda: app.app.health()[1]["num_decoding"] == 1)
            response = app.post(MESSAGES_PATH, messages_body())
            assert response.status == 429 and is_error_form(response)
            assert int(response.headers["retry-after"]) > 0
        assert eventually(app.is_idle)
        assert ask(app)["usage"]


def _encoded(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return f"POST {MESSAGES_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


def test_an_error_in_the_middle_is_the_last_event() -> None:
    """A row that fails after the first word: an `error` event ends the stream; a whole answer is a 500."""
    failure = EngineFailure("row failed")
    with serving(FakeService(script=(failure,))) as served, served.connect() as client:
        body = {**CHAT, "max_tokens": 5}
        events = events_of(client.request("POST", MESSAGES_PATH, {**body, "stream": True}))
        assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": failure.message}}
        response = client.request("POST", MESSAGES_PATH, body)
        assert response.status == 500 and is_error_form(response)


def test_silence_is_broken_by_pings() -> None:
    """The message begins when silence gets long, and pings follow, one in each interval, until there is something to
    say."""
    is_enough = threading.Event()
    interval = {"keep_alive_seconds": 0.15}
    with serving(FakeService(script=(is_enough, FINISHED)), **interval) as served, served.connect() as client:
        started = time.monotonic()
        client.send(_encoded({**CHAT, "max_tokens": 5, "stream": True}))
        status, headers = client.read_head()
        raw = b""
        while raw.count(b"event: ping\n") < 3:
            raw += client.read_chunk()
        num_pings, seconds = raw.count(b"event: ping\n"), time.monotonic() - started
        is_enough.set()
        raw += b"".join(iter(client.read_chunk, b""))
    assert num_pings * 0.15 <= seconds
    types = [event["type"] for event in events_of(Response(status, headers, raw))]
    assert types[0] == "message_start" and types[-2:] == ["message_delta", "message_stop"]
    assert set(types[1:-2]) == {"ping"}


def test_headers_go_out_before_anything_is_computed() -> None:
    """A proxy in front passes on that its client left only once it has them."""
    with serving(FakeService(script=(None,))) as served, served.connect() as client:
        client.send(_encoded({**CHAT, "max_tokens": 5, "stream": True}))
        status, headers = client.read_head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
