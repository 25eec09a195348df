"""What the tests of `/v1/responses` share: a short way to parse, an independent reader of event streams, and chat
messages said as items.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvserve.core import NOBODY, AnswerEvent, JsonObject, RequestId
from kvserve.protocols.responses_request import Described, ResponsesRequest, parse_responses
from kvserve.protocols.responses_store import ResponseStore
from kvserve.protocols.responses_stream import ResponseStreamEncoder
from tests.protocols.conftest import DEFAULTS

ID, MODEL, CREATED = RequestId("req0123456789abcdef01234567"), "org/model", 1_700_000_000


def parse(kept: ResponseStore | None = None, /, **body: object) -> ResponsesRequest:
    """The request of a body given as keywords; the input is one greeting unless given."""
    body.setdefault("input", "hi")
    return parse_responses(body, {}, DEFAULTS, ID, (kept or ResponseStore(None, print)).of(NOBODY))


def described(**body: object) -> Described:
    """What a response repeats of such a request."""
    return parse(**body).described


def stream(events: Iterable[AnswerEvent], about: Described) -> list[dict[str, Any]]:
    """All events of a response, as a client reads them."""
    encoder = ResponseStreamEncoder(ID, MODEL, CREATED, about)
    made = [*encoder.first_events(), *(event for each in events for event in encoder.encode(each))]
    return [json.loads(json.dumps(event)) for event in made]


def as_named_sse(events: Iterable[JsonObject]) -> str:
    """Events framed as the wire frames them: each with its name, and no end mark."""
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)


def put_together(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The output items that the pieces of a stream make, built from pieces alone; checks the order of events."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    open_pieces: list[str] | None = None
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "in_progress":
            continue
        assert event["output_index"] == len(items) - (kind != "output_item.added")
        if kind == "output_item.added":
            assert open_pieces is None
            items.append(dict(event["item"]))
            open_pieces = []
        assert open_pieces is not None
        if kind.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"]
            open_pieces.append(event["delta"])
        elif kind.endswith("part.done"):
            assert event["part"]["text"] == "".join(open_pieces)
            where = "summary" if "summary" in kind else "content"
            items[-1] = {**items[-1], where: [event["part"]]}
        elif kind.endswith(".done") and kind != "output_item.done":
            said = next(event[name] for name in ("text", "arguments", "input") if name in event)
            assert said == "".join(open_pieces)
            items[-1] |= {name: said for name in ("arguments", "input") if name in event}
        elif kind == "output_item.done":
            items[-1] |= {
                name: event["item"][name] for name in ("status", "encrypted_content") if name in event["item"]
            }
            assert items[-1] == event["item"]
            open_pieces = None
    assert open_pieces is None
    return items


# --- chat bodies said in this protocol -------------------------------------------------------------------------------


def as_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    """A chat body as a body of `/v1/responses` that says the same."""
    limits = ("max_tokens", "max_completion_tokens")
    kept = {name: value for name, value in body.items() if name not in ("messages", "tools", *limits)}
    tools = [{"type": "function", **tool["function"]} for tool in body.get("tools") or ()]
    limit = next(({"max_output_tokens": body[name]} for name in limits if name in body), {})
    items = [item for message in body["messages"] for item in as_items(message)]
    return {**kept, **limit, **({"tools": tools} if tools else {}), "input": items, "store": False}


def as_items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A chat message as items."""
    content = message.get("content")
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": content or ""}]
    if message["role"] != "assistant":
        return [{"type": "message", "role": message["role"], "content": content or []}]
    thoughts = next(
        (message[name] for name in ("reasoning_content", "reasoning", "reasoning_text") if message.get(name)), ""
    )
    calls = message.get("tool_calls") or []
    items: list[dict[str, Any]] = []
    if thoughts:
        items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thoughts}]})
    if content or not (thoughts or calls):
        items.append({"type": "message", "role": "assistant", "content": content or []})
    for call in calls:
        items.append({"type": "function_call", "call_id": call.get("id", ""), **call["function"]})
    return items
