"""`/v1/responses` over HTTP on a scripted service: what each row answers, streamed and not, and what is kept."""

import json
import threading
from typing import Any

import pytest

from kvserve.core import (
    ContentDelta,
    Finished,
    ReasoningDelta,
    ToolCallBlock,
    Usage,
    key_digest,
)
from kvserve.errors import BadRequest, ContextOverflow, EngineFailure, MemoryExhausted, QueueFull, RequestError
from tests.calls import spoken
from tests.protocols.responses_wire import put_together
from tests.web.fakes import (
    FINISHED,
    PATIENCE_SECONDS,
    FakeService,
    RawClient,
    Served,
    encode_request,
    eventually,
    serving,
)

PATH = "/v1/responses"
CALL = spoken(ToolCallBlock("call1", "look", '{"at": "é\\u2028"}'))
ANSWER = (ReasoningDelta("hm"), ContentDelta("He"), ContentDelta("llo\u2028"), *CALL, FINISHED)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each under the name that it carries itself, and nothing behind the last one."""
    events = []
    for block in raw.decode("ascii").split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert raw.endswith(b"\n\n")
    return events


def ask(client: RawClient, **fields: Any) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    response = client.request("POST", PATH, {"input": "hi", **fields})
    assert response.status == 200, response.body
    return dict(response.json)


def test_an_answer_and_its_stream_say_the_same() -> None:
    """Items, usage and everything else but ids and times."""
    with serving(FakeService(script=ANSWER)) as served, served.connect() as client:
        whole = ask(client)
        raw = client.request("POST", PATH, {"input": "hi", "stream": True})
        events = events_of(raw.body)
    assert raw.headers["content-type"].startswith("text/event-stream")
    last = events[-1]
    assert last["type"] == "response.completed"
    streamed = last["response"]
    assert put_together(events) == streamed["output"]
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]

    def without_ids(response: dict[str, Any]) -> str:
        text = json.dumps({**response, "created_at": 0})
        return text.replace(response["id"].removeprefix("resp_"), "")

    assert without_ids(whole) == without_ids(streamed)
    assert whole["id"] != streamed["id"]


def test_the_id_of_a_response_holds_that_of_its_request() -> None:
    """So that it can be explained."""
    with serving() as served, served.connect() as client:
        response = client.request("POST", PATH, {"input": "hi"})
    assert response.json["id"] == f"resp_{response.headers['x-request-id']}"


def test_responses_are_kept_unless_the_client_says_no() -> None:
    """Named again, listed with their items, deleted; with `store: false` they are unheard of."""
    with serving() as served, served.connect() as client:
        first = ask(client, input=[{"role": "user", "content": "one", "id": "u1"}])
        second = ask(client, input="two", previous_response_id=first["id"], stream=False)
        turn = served.service.received[-1]
        assert [message.role for message in turn.messages] == ["user", "assistant", "user"]
        assert client.request("GET", f"{PATH}/{second['id']}").json == second
        listed = client.request("GET", f"{PATH}/{second['id']}/input_items?order=asc&limit=2").json
        assert [item["id"] for item in listed["data"]] == ["u1", first["output"][0]["id"]]  # type: ignore[attr-defined]
        assert listed["has_more"] is True
        gone = client.request("DELETE", f"{PATH}/{first['id']}")
        assert gone.json == {"id": first["id"], "object": "response", "deleted": True}
        kept_not = ask(client, store=False)
        for name in (first["id"], kept_not["id"], "resp_unheard"):
            assert client.request("GET", f"{PATH}/{name}").status == 404
            assert client.request("DELETE", f"{PATH}/{name}").status == 404
            assert client.request("POST", PATH, {"input": "x", "previous_response_id": name}).status == 404
        assert client.request("GET", f"{PATH}/{second['id']}/unheard").status == 404
        assert client.request("GET", f"{PATH}/{second['id']}?stream=true").error["param"] == "stream"


ANN = {"authorization": "Bearer key1"}
OTHER_KEY = {"x-api-key": "key2"}


def test_another_keys_response_is_unheard_of() -> None:
    """By its path, as the one before, as an item: in status and body like one that never was. Its own key has it by its
    path; to go on from it is its user's only, also where a request names none."""
    with serving() as served, served.connect() as client:
        made = client.request("POST", PATH, {"input": "hi", "user": "ann", "session_id": "s1"}, ANN).json
        name, item = str(made["id"]), str(made["output"][0]["id"])  # type: ignore[index]

        def asked(name: str, item: str, headers: dict[str, str], **fields: str) -> list[tuple[int, str]]:
            bodies = (
                {"input": "x", "previous_response_id": name, **fields},
                {"input": [{"type": "item_reference", "id": item}], **fields},
            )
            answers = [client.request("POST", PATH, body, headers) for body in bodies]
            if "user" not in fields:
                paths = (f"{PATH}/{name}", f"{PATH}/{name}/input_items")
                answers += [client.request("GET", path, None, headers) for path in paths]
            return [(each.status, str(each.body).replace(item, "ITEM").replace(name, "NAME")) for each in answers]

        never = name[:-24] + "0" * 24, item.replace(name[-24:], "0" * 24)
        for headers, fields in ((OTHER_KEY, {}), ({}, {}), (ANN, {"user": "ben"}), (OTHER_KEY, {"user": "ann"})):
            told = asked(name, item, headers, **fields)
            assert told == asked(*never, headers, **fields) and {status for status, _ in told} == {404}
        told, unheard = asked(name, item, ANN), asked(*never, ANN)
        assert [status for status, _ in told] == [404, 404, 200, 200] and told[:2] == unheard[:2]
        assert client.request("DELETE", f"{PATH}/{name}", None, OTHER_KEY).status == 404
        assert {status for status, _ in asked(name, item, ANN, user="ann")} == {200}
        of_nobody = client.request("POST", PATH, {"input": "hi"}, ANN).json
        going_on = {"input": "x", "previous_response_id": str(of_nobody["id"])}
        assert client.request("POST", PATH, {**going_on, "user": "ann"}, ANN).status == 404
        assert client.request("POST", PATH, going_on, ANN).status == 200
        kept = served.service.responses.of_key(key_digest(ANN)).get(name)
        assert kept.session == "s1" and kept.principal.user
        assert client.request("DELETE", f"{PATH}/{name}", None, ANN).status == 200


def test_a_streamed_response_is_kept_before_its_end_is_told() -> None:
    """A client that names it at once finds it."""
    with serving() as served, served.connect() as client:
        events = events_of(client.request("POST", PATH, {"input": "hi", "stream": True}).body)
        last = events[-1]["response"]
        assert client.request("GET", f"{PATH}/{last['id']}").json == last


def test_an_answer_that_was_cut_is_incomplete() -> None:
    """The limit is named, and the response is kept."""
    script = (ContentDelta("Once"), Finished("length", Usage(3, 0, 1)))
    with serving(FakeService(script=script)) as served, served.connect() as client:
        cut = ask(client, max_output_tokens=1)
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert cut["output"][0]["status"] == "incomplete"
        assert client.request("GET", f"{PATH}/{cut['id']}").json == cut


def test_an_error_in_a_stream_is_its_last_event() -> None:
    """The response has failed and is not kept; without a stream it is an error answer."""
    script = (ContentDelta("He"), EngineFailure("It broke."))
    with serving(FakeService(script=script)) as served, served.connect() as client:
        events = events_of(client.request("POST", PATH, {"input": "hi", "stream": True}).body)
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"] == {"code": "server_error", "message": "It broke."}
        assert client.request("GET", f"{PATH}/{events[-1]['response']['id']}").status == 404
        whole = client.request("POST", PATH, {"input": "hi"})
        assert (whole.status, whole.error["type"]) == (500, "server_error")


def test_a_silent_stream_is_kept_alive_by_events() -> None:
    """They are counted with the others and carry the response as it stands."""
    is_enough = threading.Event()
    script = (is_enough, *ANSWER)
    with serving(FakeService(script=script), keep_alive_seconds=0.05) as served, served.connect() as client:
        client.send(encode_request("POST", PATH, {"input": "hi", "stream": True}))
        assert client.read_head()[0] == 200
        raw = b""
        while chunk := client.read_chunk():
            raw += chunk
            if raw.count(b"event: response.in_progress") == 3:
                is_enough.set()
    events = events_of(raw)
    assert [event["type"] for event in events[:4]] == ["response.created", *["response.in_progress"] * 3]
    assert put_together(events) == events[-1]["response"]["output"]


REFUSALS: list[tuple[RequestError, int, str | None, str]] = [
    (ContextOverflow(500, 100), 400, "input", "invalid_request_error"),
    (
        BadRequest("response_format.json_schema.schema is bad.", param="response_format.json_schema.schema"),
        400,
        "text.format.schema",
        "invalid_request_error",
    ),
    (QueueFull("full"), 429, None, "rate_limit_error"),
    (MemoryExhausted("full"), 503, None, "server_error"),
]


@pytest.mark.parametrize(("refusal", "status", "param", "kind"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_speak_of_this_protocols_fields(
    refusal: RequestError, status: int, param: str | None, kind: str, stream: bool
) -> None:
    """A plain error in OpenAI's form, before any stream."""
    with serving(FakeService(refusal=refusal)) as served, served.connect() as client:
        response = client.request("POST", PATH, {"input": "hi", "stream": stream})
    assert (response.status, response.error["param"], response.error["type"]) == (status, param, kind)
    assert "response_format" not in str(response.error["message"])


def test_an_error_that_comes_with_the_answer_speaks_of_this_protocols_fields() -> None:
    """A turn that had to wait for its model is refused late."""
    script = (BadRequest("messages is too long.", param="messages"),)
    with serving(FakeService(script=script)) as served, served.connect() as client:
        response = client.request("POST", PATH, {"input": "hi"})
    assert (response.status, response.error["param"]) == (400, "input")
    assert response.error["message"] == "input is too long."


def test_other_methods_are_refused() -> None:
    """With the methods that there are."""
    with serving() as served, served.connect() as client:
        response = client.request("GET", PATH)
        assert (response.status, response.headers["allow"]) == (405, "OPTIONS, POST")
        response = client.request("POST", f"{PATH}/resp_1/cancel", {})
        assert (response.status, response.headers["allow"]) == (405, "DELETE, GET, HEAD, OPTIONS")


def _left(served: Served) -> bool:
    turn = served.service.turns.get(timeout=PATIENCE_SECONDS)
    return turn.cancelled.wait(PATIENCE_SECONDS) and turn.ended.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_turn(stream: bool) -> None:
    """Its row is freed, streamed or not."""
    with serving(FakeService(script=(ContentDelta("He"), None))) as served:
        with served.connect() as client:
            client.send(encode_request("POST", PATH, {"input": "hi", "stream": stream}))
            assert eventually(lambda: not served.service.turns.empty())
            if stream:  # before that nobody has asked for the turn's events, and they have no end
                client.read_head()
                client.read_chunk()
        assert _left(served)
