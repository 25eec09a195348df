"""What the tests of the Anthropic protocol share: a short way to parse, framing, and the real SDK as reader."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import httpx2

from kvserve.core import JsonObject, RequestId
from kvserve.protocols.anthropic_messages import MessagesRequest, parse_messages
from tests.protocols.conftest import DEFAULTS

if TYPE_CHECKING:  # the SDKs take a second each to import: only tests that read with them do
    from anthropic import Anthropic


def parse(headers: dict[str, str] | None = None, **body: object) -> MessagesRequest:
    """Parses a body given as keywords; one greeting and 99 tokens unless given."""
    body.setdefault("messages", [{"role": "user", "content": "hi"}])
    body.setdefault("max_tokens", 99)
    return parse_messages(body, headers or {}, DEFAULTS, RequestId("r1"))


def as_named_sse(events: Iterable[JsonObject]) -> str:
    """Frames events as a stream is framed on the wire."""
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)


def sdk_reading(body: str, status: int = 200) -> Anthropic:
    """The real anthropic SDK, whose every request is answered with this body; no socket is opened."""
    from anthropic import Anthropic

    kind = "text/event-stream" if body.startswith("event:") else "application/json"
    answer = httpx2.Response(status, content=body.encode("utf-8", "surrogatepass"), headers={"content-type": kind})
    transport = httpx2.MockTransport(lambda _: answer)
    http_client = httpx2.Client(transport=transport)
    return Anthropic(api_key="any", base_url="http://test", max_retries=0, http_client=http_client)
