"""Servers with KV on disk, in this process or in one of their own, as their tests ask them over HTTP; and whether what
they answer is what a server that remembers nothing does, with no token computed that was said to be written."""

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvserve.engine.disk_cache import MIN_GAIN_TOKENS
from tests.agents import seen_prompts
from tests.disk_said import SaidOnDisk
from tests.e2e.servers import START_SECONDS, ServerProcess, wait_until
from tests.serving import AppUnderTest

type Server = ServerProcess | AppUnderTest
"""A process of its own, or a server in this one."""

type Messages = tuple[tuple[str, str], ...]
"""Role and text, one after the other."""

PATIENCE_SECONDS = 600.0
"""So long an answer is waited for: thousands of tokens on a busy machine take minutes."""

MAX_TOKENS = 8
"""Of an answer that is compared."""

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


def wait_until_ready(server: ServerProcess) -> None:
    """Until it answers and knows what is on disk."""
    server.wait_until_healthy()
    wait_until(lambda: cache_report(server)["disk"], START_SECONDS, lambda: server.screen)


class Reference:
    """A server in this process that remembers nothing: what is answered to a prompt, and which tokens that is."""

    def __init__(self, app: AppUnderTest) -> None:
        self._app = app
        self.needs_states: bool = app.served.engine._ask(lambda scheduler: scheduler.cache.needs_checkpoints)
        self.texts: dict[Messages, str] = {}
        self.ids: dict[Messages, tuple[int, ...]] = {}

    def learn(self, prompts: Sequence[Messages]) -> None:
        """Have these answered."""
        for messages in prompts:
            with seen_prompts() as seen:
                answered = ask(self._app, messages, MAX_TOKENS, ttl=0)
            [self.ids[messages]] = seen
            self.texts[messages] = answered.text
            assert (answered.num_cached_tokens, answered.num_prompt_tokens) == (0, len(self.ids[messages]))


def assert_found(server: Server, prompts: Sequence[Messages], reference: Reference, on_disk: SaidOnDisk) -> int:
    """What was said to be written of a prompt is not computed, but for a rest that is no longer than pays a file, and
    the text is the same. How many tokens were to be found."""
    num_tokens = 0
    for messages in prompts:
        written = on_disk.num_tokens(reference.ids[messages], needs_states=reference.needs_states)
        answered = ask(server, messages, MAX_TOKENS)
        assert answered.text == reference.texts[messages]
        assert answered.num_cached_tokens > written - MIN_GAIN_TOKENS, f"{answered}, but {written} tokens were written"
        num_tokens += written
    return num_tokens
