"""A client of the chat endpoint and of /v1/cache that sends exactly what it is told. It knows the wire form, not what
an agent says or what a figure should be."""

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

type Json = dict[str, Any]

REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_text")
COUNTERS = ("vlm_retreat", "hybrid_trim_miss", "exact_key_rejected_by_model_lcp")


class ProbeError(Exception):
    """What ends a script with exit code 2: nobody answers, or the answer is no answer."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of an answer; `arguments` is the JSON text as it came."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. `reasoning_field` is the name under which the reasoning came, None without reasoning."""

    request_id: str
    reasoning: str
    reasoning_field: str | None
    content: str
    calls: tuple[Call, ...]
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    ttft_seconds: float | None

    @property
    def reuse(self) -> float:
        """The share of the prompt that was not computed, between 0 and 1."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def said(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """What two answers must share to be the same; ids of calls are drawn anew each time."""
        return self.reasoning, self.content, tuple((call.name, call.arguments) for call in self.calls)


@dataclass(slots=True)
class _Pieces:
    """An answer while its chunks arrive."""

    response_id: str = ""
    reasoning: str = ""
    reasoning_field: str | None = None
    content: str = ""
    calls: dict[int, Call] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: Json = field(default_factory=dict)
    first_at: float | None = None

    def take(self, chunk: Json) -> None:
        if "error" in chunk:
            raise ProbeError(f"the stream failed: {chunk['error']}")
        self.response_id = chunk.get("id") or self.response_id
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self._take_delta(choice.get("delta") or {})

    def _take_delta(self, delta: Json) -> None:
        content = delta.get("content") or ""
        reasoning_field = next((name for name in REASONING_FIELDS if delta.get(name)), None)
        if self.first_at is None and (content or reasoning_field or delta.get("tool_calls")):
            self.first_at = time.monotonic()
        self.content += content
        if reasoning_field is not None:
            self.reasoning_field = reasoning_field
            self.reasoning += delta[reasoning_field]
        for part in delta.get("tool_calls") or ():
            function, index = part.get("function") or {}, part.get("index", 0)
            known = self.calls.get(index, Call("", "", ""))
            self.calls[index] = replace(
                known,
                call_id=part.get("id") or known.call_id,
                name=function.get("name") or known.name,
                arguments=known.arguments + (function.get("arguments") or ""),
            )

    def reply(self, sent_at: float) -> Reply:
        if not self.usage:
            raise ProbeError("the answer ended without usage")
        details = self.usage.get("prompt_tokens_details") or {}
        return Reply(
            request_id=self.response_id.removeprefix("chatcmpl-"),
            reasoning=self.reasoning,
            reasoning_field=self.reasoning_field,
            content=self.content,
            calls=tuple(self.calls[index] for index in sorted(self.calls)),
            finish_reason=self.finish_reason,
            num_prompt_tokens=int(self.usage["prompt_tokens"]),
            num_cached_tokens=int(details.get("cached_tokens") or 0),
            num_completion_tokens=int(self.usage["completion_tokens"]),
            ttft_seconds=None if self.first_at is None else self.first_at - sent_at,
        )


@dataclass(frozen=True, slots=True)
class Server:
    """One address that speaks the API; a path of `url` such as /v1 is not needed and ignored."""

    url: str
    api_key: str
    timeout_seconds: float

    def chat(self, body: Mapping[str, Any]) -> Reply:
        """Ask and read the streamed answer to its end. Raises ProbeError for anything but a whole answer."""
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        pieces = _Pieces()
        sent_at = time.monotonic()
        for chunk in self._events(streamed):
            pieces.take(chunk)
        return pieces.reply(sent_at)

    def get(self, path: str) -> Json | None:
        """The JSON of an answer, None where the server does not offer the path (404)."""
        status, raw = self._whole("GET", path)
        if status == 404:
            return None
        if status != 200:
            raise ProbeError(f"GET {self.url}{path}: {status} {raw[:300]!r}")
        return _parsed(raw)

    def counters(self) -> dict[str, int | None]:
        """The correctness counters of /v1/cache; None for one that the server does not offer."""
        report = self.get("/v1/cache") or {}
        counters = report.get("counters") or {}
        return {name: counters.get(name) for name in COUNTERS}

    def explain(self, request_id: str) -> Json | None:
        """Why a request reused what it did, None where that is not offered."""
        return self.get(f"/v1/cache/explain/{request_id}")

    def watch(self) -> Iterator[Json]:
        """What the dashboard shows, about once per second, until the server ends it. Raises ProbeError."""
        return self._stream("GET", "/dashboard/events", None)

    def clear_cache(self) -> None:
        """DELETE /v1/cache: the server forgets every conversation."""
        status, raw = self._whole("DELETE", "/v1/cache")
        if status != 200:
            raise ProbeError(f"DELETE {self.url}/v1/cache: {status} {raw[:300]!r}")

    def _whole(self, method: str, path: str) -> tuple[int, bytes]:
        connection = self._connect()
        try:
            connection.request(method, path, headers=self._headers())
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ProbeError(f"{method} {self.url}{path}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _events(self, body: Mapping[str, Any]) -> Iterator[Json]:
        return self._stream("POST", "/v1/chat/completions", json.dumps(body))

    def _stream(self, method: str, path: str, body: str | None) -> Iterator[Json]:
        connection = self._connect()
        where = f"{method} {self.url}{path}"
        try:
            connection.request(method, path, body, self._headers())
            response = connection.getresponse()
            if response.status != 200:
                raise ProbeError(f"{where}: {response.status} {response.read()[:600]!r}")
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    yield _parsed(data)
            raise ProbeError(f"{where}: the stream broke off")
        except (OSError, http.client.HTTPException) as error:
            raise ProbeError(f"{where}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ProbeError(f"{self.url!r} is no address such as http://127.0.0.1:4000")
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        return kind(address.hostname, address.port, timeout=self.timeout_seconds)

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"}


def _parsed(raw: bytes) -> Json:
    """A JSON object. Raises ProbeError for anything else."""
    try:
        value = json.loads(raw)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ProbeError(f"expected a JSON object, got {raw[:300]!r}")
    return value
