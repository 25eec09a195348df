"""Servers with KV on disk, in this process or in one of their own, as their tests ask them over HTTP."""

import http.client
import json
from dataclasses import dataclass
from typing import Any

from tests.e2e.servers import ServerProcess
from tests.serving import AppUnderTest

type Server = ServerProcess | AppUnderTest
"""A process of its own, or a server in this one."""

type Messages = tuple[tuple[str, str], ...]
"""Role and text, one after the other."""

PATIENCE_SECONDS = 600.0
"""So long an answer is waited for: thousands of tokens on a busy machine take minutes."""

WORDS = "The quick brown fox reads file {0} again and counts line {1} of {2} before it runs. "


def said(num_sentences: int, seed: int) -> str:
    """A text of so many sentences (about 30 tokens each), another one for another seed."""
    return "".join(WORDS.format(seed, number, seed * number) for number in range(num_sentences))


def request(server: Server, method: str, path: str, body: Any = None) -> Any:
    """The body of a successful answer, at least."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)
    try:
        sent = json.dumps(body) if body is not None else None
        connection.request(method, path, sent, {"content-type": "application/json"})
        response = connection.getresponse()
        found = json.loads(response.read() or b"null")
    finally:
        connection.close()
    assert response.status in (200, 204), found
    return found


def post(server: Server, path: str, body: Any) -> Any:
    return request(server, "POST", path, body)


def cache_report(server: Server) -> Any:
    return request(server, "GET", "/v1/cache")


def clear(server: Server) -> None:
    request(server, "DELETE", "/v1/cache")


@dataclass(frozen=True, slots=True)
class Answered:
    """The text of an answer, reasoning before it, and how many tokens of its prompt were found."""

    text: str
    num_cached_tokens: int
    num_prompt_tokens: int

    @property
    def share(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens


def ask(server: Server, messages: Messages, max_tokens: int = 16, **fields: object) -> Answered:
    """A greedy answer."""
    sent = [{"role": role, "content": text} for role, text in messages]
    sampling = {"max_tokens": max_tokens, "temperature": 0, "repetition_penalty": 1}
    body = post(server, "/v1/chat/completions", {"model": "m", "messages": sent, **sampling, **fields})
    message, usage = body["choices"][0]["message"], body["usage"]
    text = f"{message.get('reasoning_content')}|{message['content']}"
    return Answered(text, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])
