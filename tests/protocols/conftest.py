"""What the protocol tests share: the operator's defaults, a short way to parse, golden files and the real SDK."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from kvserve.core import JsonObject, RequestDefaults, RequestId, SamplingParams
from kvserve.protocols.openai_chat import ChatRequest, parse_chat

if TYPE_CHECKING:  # the SDKs take a second each to import: only tests that read with them do
    from openai import OpenAI

GOLDEN = Path(__file__).parent / "golden"
DEFAULTS = RequestDefaults(
    SamplingParams(0.1, 0.9, 40, 0.05, 1.08, 256), max_tokens=2048, thinking=True, preserve_thinking=True
)


@pytest.fixture(scope="session")
def defaults() -> RequestDefaults:
    """Settings unlike a request's own values."""
    return DEFAULTS


@pytest.fixture(scope="session")
def parse() -> Callable[..., ChatRequest]:
    """Parses a chat body given as keywords; `messages` is one greeting unless given."""

    def parse_keywords(**body: object) -> ChatRequest:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        return parse_chat(body, {}, DEFAULTS, RequestId("r1"))

    return parse_keywords


@pytest.fixture(scope="session")
def golden() -> Callable[[str, str], None]:
    """Asserts that a wire text is byte for byte the golden file of that name."""

    def compare(name: str, actual: str) -> None:
        assert actual == (GOLDEN / name).read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="session")
def as_sse() -> Callable[[Iterable[JsonObject]], str]:
    """Frames chunks as a stream is framed on the wire, with the end mark."""

    def frame(chunks: Iterable[JsonObject]) -> str:
        lines = [json.dumps(chunk, ensure_ascii=False) for chunk in chunks]
        return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])

    return frame


@pytest.fixture(scope="session")
def sdk_reading() -> Callable[[str], OpenAI]:
    """The real openai SDK, whose every request is answered with this body; no socket is opened."""
    from openai import OpenAI

    def client(body: str, status: int = 200) -> OpenAI:
        kind = "text/event-stream" if body.startswith("data:") else "application/json"
        answer = httpx.Response(status, content=body.encode(), headers={"content-type": kind})
        transport = httpx.MockTransport(lambda _: answer)
        return OpenAI(
            api_key="any", base_url="http://test", max_retries=0, http_client=httpx.Client(transport=transport)
        )

    return client
