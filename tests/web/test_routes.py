"""The endpoints over HTTP: what each answers, streamed and not."""

import json

import pytest

from kvserve.core import KEY_HEADER, NO_KEY, ContentDelta, ReasoningDelta, ToolCallBlock, key_digest
from kvserve.errors import ContextOverflow
from tests.calls import spoken
from tests.web.fakes import CHAT, FINISHED, HELLO, FakeService, serving

CALL = spoken(ToolCallBlock("call1", "look", '{"at": "é\\u2028"}'))


def test_a_chat_answer_and_its_stream_say_the_same() -> None:
    """Content, reasoning, calls, finish reason and usage are equal either way."""
    script = (ReasoningDelta("hm"), ContentDelta("He"), ContentDelta("llo\u2028"), *CALL, FINISHED)
    with serving(FakeService(script=script)) as served, served.connect() as client:
        whole = client.request("POST", "/v1/chat/completions", CHAT).json
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, done = client.request("POST", "/v1/chat/completions", {**CHAT, **options}).events
    assert done == "[DONE]"
    choice = whole["choices"][0]  # type: ignore[index]
    streamed = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert choice["message"]["content"] == "".join(delta.get("content", "") for delta in streamed) == "Hello\u2028"
    assert choice["message"]["reasoning_content"] == "hm"
    functions = [delta["tool_calls"][0]["function"] for delta in streamed if "tool_calls" in delta]
    told = {"name": functions[0]["name"], "arguments": "".join(function["arguments"] for function in functions)}
    assert choice["message"]["tool_calls"][0]["function"] == told
    assert json.loads(last)["usage"] == whole["usage"]


def test_the_turn_carries_what_was_sent() -> None:
    """Request id, model, messages and session headers reach the service."""
    with serving() as served, served.connect() as client:
        headers = {"X-Session-Id": "session-1234"}
        response = client.request("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 7}, headers)
        (turn,) = served.service.received
    assert turn.request_id == response.headers["x-request-id"]
    assert (turn.model, turn.max_tokens, turn.session.session_id) == ("tiny/model", 7, "session-1234")


def test_completions_streamed_and_not() -> None:
    """Text goes to the model as it is, and text comes back."""
    with serving() as served, served.connect() as client:
        whole = client.request("POST", "/v1/completions", {"prompt": "Once"}).json
        events = client.request("POST", "/v1/completions", {"prompt": "Once", "stream": True}).events
        assert [turn.raw_prompt for turn in served.service.received] == ["Once", "Once"]
    assert whole["choices"][0]["text"] == "Hello"  # type: ignore[index]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "Hello"


def test_models_with_slashes_in_their_names() -> None:
    """The list and the single entry agree, written plainly or encoded; another name is 404."""
    with serving() as served, served.connect() as client:
        (entry,) = client.request("GET", "/v1/models").json["data"]  # type: ignore[misc]
        for path in ("/v1/models/tiny/model", "/v1/models/tiny%2Fmodel"):
            assert client.request("GET", path).json == entry
        response = client.request("GET", "/v1/models/tiny")
        assert (response.status, response.error["param"]) == (404, "model")


def test_a_base_url_may_lack_the_version() -> None:
    """Every endpoint is there without `/v1` too, for both SDKs, and an error has its protocol's form."""
    with serving() as served, served.connect() as client:
        assert client.request("POST", "/chat/completions", CHAT).status == 200
        assert client.request("POST", "/completions", {"prompt": "Once"}).status == 200
        assert client.request("POST", "/responses", {"input": "Hi"}).status == 200
        assert client.request("POST", "/messages", {**CHAT, "max_tokens": 5}).json["type"] == "message"
        assert client.request("POST", "/messages/count_tokens", CHAT).status == 200
        assert client.request("GET", "/models").json == client.request("GET", "/v1/models").json
        assert client.request("GET", "/models/tiny%2Fmodel").json["id"] == "tiny/model"
        for path in ("/messages", "/v1/messages"):
            assert client.request("POST", path, {"max_tokens": 5}).json["type"] == "error"
        assert client.request("GET", "/messages").status == 405
        assert client.request("GET", "/embeddings").status == client.request("GET", "/v1/v1/models").status == 404


def test_models_for_clients_of_anthropics_api() -> None:
    """Their header chooses the form, of errors too; HEAD and pages work."""
    version = {"anthropic-version": "2023-06-01"}
    with serving() as served, served.connect() as client:
        page = client.request("GET", "/v1/models?limit=1", headers=version).json
        [entry] = page["data"]  # type: ignore[misc]
        assert (entry["type"], entry["id"], page["has_more"], page["last_id"]) == (
            "model",
            "tiny/model",
            False,
            "tiny/model",
        )
        assert client.request("GET", "/v1/models/tiny/model", headers=version).json == entry
        for path, status, kind in (
            ("/v1/models/tiny", 404, "not_found_error"),
            ("/v1/models?limit=x", 400, "invalid_request_error"),
        ):
            response = client.request("GET", path, headers=version)
            assert (response.status, response.json["type"]) == (status, "error")
            assert response.error["type"] == kind


def test_health_says_ready_or_loading() -> None:
    """The service's status is the answer's."""
    with serving(FakeService(is_ready=False)) as served, served.connect() as client:
        assert client.request("GET", "/health").status == 503
        served.service.is_ready = True
        assert client.request("GET", "/health").json["status"] == "ok"


def test_health_says_whether_the_proxy_is_believed() -> None:
    """Without its secret a proxy's users would all be one here, and it must know."""
    with serving(proxy_secret="shared") as served, served.connect() as client:
        told = [client.request("GET", "/health", None, sent).json["knows_proxy"] for sent in (
            {}, {KEY_HEADER: f"shared {NO_KEY}"}, {KEY_HEADER: f"other {NO_KEY}"}, {KEY_HEADER: NO_KEY},
        )]  # fmt: skip
    assert told == [False, True, False, False]


def test_a_server_is_drained_and_taken_back() -> None:
    """Those who ask for /health see it; anything but a boolean is refused."""
    with serving() as served, served.connect() as client:
        for is_draining in (True, False):
            response = client.request("POST", "/v1/drain", {"draining": is_draining})
            assert (response.status, response.json["draining"]) == (200, is_draining)
            assert client.request("GET", "/health").json["draining"] is is_draining
        assert client.request("POST", "/v1/drain", {"draining": "yes"}).status == 400


def test_refusals_come_before_the_stream() -> None:
    """An unknown model and a prompt over the context are plain errors, streamed or not."""
    with serving(FakeService(refusal=ContextOverflow(500, 100))) as served, served.connect() as client:
        for extra in ({}, {"stream": True}):
            unknown = client.request("POST", "/v1/chat/completions", {**CHAT, **extra, "model": "refused"})
            assert (unknown.status, unknown.error["param"]) == (404, "model")
            overflow = client.request("POST", "/v1/chat/completions", {**CHAT, **extra})
            assert (overflow.status, overflow.error["code"]) == (400, "context_length_exceeded")
            assert "500" in str(overflow.error["message"]) and "100" in str(overflow.error["message"])
        served.service.refusal = None
        served.service.script = HELLO
        assert client.request("POST", "/v1/chat/completions", CHAT).status == 200


FORGET: list[tuple[str, list[tuple[str | None, str | None]]]] = [
    ("", [(None, None)]),
    ("?session=s1", [("s1", None)]),
    ("?session=a%2Fb%20c", [("a/b c", None)]),
    ("?principal=abc.-", [(None, "abc.-")]),
    ("?principal=-.-", [(None, "-.-")]),
    ("?session=s1&principal=abc.def", [("s1", "abc.def")]),
    ("?session=", []),
    ("?session", []),
    ("?principal=%20", []),
    ("?session=s1&session=s2", []),
    ("?sesion=s1", []),
    ("?session=s1&all=1", []),
]


@pytest.mark.parametrize(("query", "forgotten"), FORGET)
def test_whose_words_are_forgotten(query: str, forgotten: list[tuple[str | None, str | None]]) -> None:
    """Everybody's only where nobody is named: a name that is misspelt, empty or said twice is a 400, and costs none."""
    with serving() as served, served.connect() as client:
        response = client.request("DELETE", f"/v1/cache{query}")
    assert served.service.forgotten == forgotten
    assert response.status == (200 if forgotten else 400)
    if forgotten:
        assert response.json == {"status": "ok", **({"num_responses": 1} if query else {"is_done": True})}
    else:
        assert response.error["param"] in query


@pytest.mark.parametrize("path", ["/v1/cache/explain", "/v1/cache/explain?last", "/v1/cache/explain/x"])
def test_who_asks_for_an_explanation_is_told_on(path: str) -> None:
    """By the digest of the key, however it is sent."""
    with serving() as served, served.connect() as client:
        told = {
            client.request("GET", path, None, headers).json["key"]
            for headers in (
                {"Authorization": "Bearer k"},
                {"X-Api-Key": "k"},
                {"Authorization": "Bearer k", KEY_HEADER: key_digest({"x-api-key": "other"})},
            )
        }
        assert told == {key_digest({"x-api-key": "k"})}
        assert client.request("GET", path).json["key"] == ""


def test_whose_key_it_is_says_the_proxy_only() -> None:
    """A digest is a name and no key: told by anybody else, or twice, it counts for nothing."""
    digest, proof = key_digest({"x-api-key": "k"}), "s" * 32
    own = {"Authorization": "Bearer own"}
    sent: list[tuple[str, str, str]] = [
        # (what the server and its proxy share, what is told, whose request it is)
        (proof, f"{proof} {digest}", digest),
        (proof, f"{proof} -", ""),
        (proof, digest, key_digest({"x-api-key": "own"})),
        (proof, "-", key_digest({"x-api-key": "own"})),
        (proof, f"{proof[1:]} {digest}", key_digest({"x-api-key": "own"})),
        (proof, f"\xe9 {digest}", key_digest({"x-api-key": "own"})),
        ("", f" {digest}", key_digest({"x-api-key": "own"})),
        ("", digest, key_digest({"x-api-key": "own"})),
    ]
    for secret, told, whose in sent:
        with serving(proxy_secret=secret) as served, served.connect() as client:
            got = client.request("GET", "/v1/cache/explain", None, {**own, KEY_HEADER: told}).json["key"]
        assert got == whose, (secret, told)
