"""What the HTTP tests of the Anthropic endpoints share: asking, and reading a stream strictly."""

import json
from collections.abc import Mapping
from typing import Any

from kvserve.protocols.anthropic_answers import whole_message
from tests.serving import AppUnderTest
from tests.web.fakes import Response

MESSAGES_PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"


def messages_body(said: object = "Hello there.", **fields: Any) -> dict[str, Any]:
    """A greedy request of 16 tokens; `said` is the user's text or whole messages."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    return {"messages": messages, "max_tokens": 16, "temperature": 0, "repetition_penalty": 1, **fields}


def events_of(response: Response) -> list[dict[str, Any]]:
    """The events of a stream; each has its `type` as its name, and nothing else is on the wire."""
    assert response.status == 200, response.body
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for raw in response.body.decode().split("\n\n")[:-1]:
        name, data = raw.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def ask(app: AppUnderTest, said: object = "Hello there.", **fields: Any) -> dict[str, Any]:
    """A whole message. Temperature 0 unless the fields say otherwise."""
    response = app.post(MESSAGES_PATH, messages_body(said, **fields), {"anthropic-version": "2023-06-01"})
    assert response.status == 200, response.body
    return dict(response.json)


def ask_both(app: AppUnderTest, said: object = "Hello there.", **fields: Any) -> dict[str, Any]:
    """The message, after showing that it says the same streamed and not."""
    plain = ask(app, said, **fields)
    streamed = whole_message(events_of(app.post(MESSAGES_PATH, messages_body(said, stream=True, **fields))))
    for message in (plain, streamed):
        assert message["id"].startswith("msg_req")
    assert _lasting(streamed) == _lasting(plain)
    return plain


def _lasting(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what differs between two answers to one question: ids, and what was cached."""
    usage = {"prompt": num_prompt_tokens(message), "output": message["usage"]["output_tokens"]}
    content = [{**block, "id": ""} if "id" in block else block for block in message["content"]]
    return {**message, "id": "", "usage": usage, "content": content}


def num_prompt_tokens(message: Mapping[str, Any]) -> int:
    """All input tokens: computed, created and read."""
    usage = message["usage"]
    return int(usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"])


def count(app: AppUnderTest, said: object = "Hello there.", **fields: Any) -> int:
    """What count_tokens says of the same request."""
    body = messages_body(said, **fields)
    body.pop("max_tokens")
    response = app.post(COUNT_PATH, body)
    assert response.status == 200, response.body
    assert set(response.json) == {"input_tokens"}
    return int(str(response.json["input_tokens"]))


def text_of(message: Mapping[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def is_error_form(response: Response) -> bool:
    """Whether an answer is an error as Anthropic writes it, of the type that goes with its status (400s and 500s)."""
    assert set(response.json) == {"type", "error"} and response.json["type"] == "error", response.body
    assert set(response.error) == {"type", "message"} and response.error["message"]
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error"}
    kinds |= {413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 529: "overloaded_error"}
    assert response.error["type"] == kinds.get(response.status, "invalid_request_error")
    return True
