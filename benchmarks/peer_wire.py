"""One request to any server and its streamed answer as it arrived, over each of the three protocols.

It knows the field names of streams and of usage, where they say anything; no server, no scenario and no oracle.
`client.py` measures kvserve alone at less cost: it speaks HTTP/1.0, to which other servers answer in chunks too.
"""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.client import GREEDY, BenchmarkError
from benchmarks.decode_rate import Arrived
from benchmarks.recordings import CHAT, MESSAGES, RESPONSES, Wire

ANSWER_SECONDS = 300.0
"""So long a server may be silent before its answer counts as none."""

LIMIT_FIELDS: Mapping[str, str] = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
ALL_LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server says of an answer, in tokens; None is what it does not say."""

    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_completion_tokens: int | None = None

    def and_then(self, later: "Usage") -> "Usage":
        """What a later event says counts, where it says anything."""
        return Usage(
            self.num_prompt_tokens if later.num_prompt_tokens is None else later.num_prompt_tokens,
            self.num_cached_tokens if later.num_cached_tokens is None else later.num_cached_tokens,
            self.num_completion_tokens if later.num_completion_tokens is None else later.num_completion_tokens,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a stream brings: words of the answer, of its thinking, of the arguments of a call."""

    content: str = ""
    reasoning: str = ""
    call: str = ""
    usage: Usage = Usage()

    @property
    def num_characters(self) -> int:
        return len(self.content) + len(self.reasoning) + len(self.call)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, or what had come of one when the client left. `parts` are the pieces with words and when each
    arrived, in `time.perf_counter()` seconds."""

    sent_at: float
    parts: tuple[tuple[float, Piece], ...]
    usage: Usage

    @property
    def content(self) -> str:
        return "".join(piece.content for _, piece in self.parts)

    @property
    def reasoning(self) -> str:
        return "".join(piece.reasoning for _, piece in self.parts)

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self.parts]

    @property
    def first_token_seconds(self) -> float:
        """From sending to the first words. Raises BenchmarkError where there are none."""
        if not self.parts:
            raise BenchmarkError("an answer without a word")
        return self.parts[0][0] - self.sent_at

    @property
    def arrived(self) -> Arrived:
        """As a rate is computed of it. Raises BenchmarkError where the server does not say how many tokens it wrote."""
        if self.usage.num_completion_tokens is None:
            raise BenchmarkError("an answer that does not say how long it is")
        return Arrived(tuple((at, piece.num_characters) for at, piece in self.parts), self.usage.num_completion_tokens)

    def longest_gap_seconds(self, start: float, end: float) -> float:
        """The longest silence that overlaps [start, end). Raises BenchmarkError for one that does not enclose it."""
        times = self.times
        if not times or times[0] >= start or times[-1] <= end:
            raise BenchmarkError("the running stream was over before the prompt beside it was read")
        return max(after - before for before, after in pairwise(times) if after > start and before < end)


# --- what the three protocols say ------------------------------------------------------------------------------------


def chat_piece(event: Wire) -> Piece:
    """Of `/v1/chat/completions`."""
    delta = (event.get("choices") or [{}])[0].get("delta") or {}
    calls = (call.get("function") or {} for call in delta.get("tool_calls") or ())
    return Piece(
        delta.get("content") or "",
        delta.get("reasoning_content") or delta.get("reasoning") or "",
        "".join((call.get("name") or "") + (call.get("arguments") or "") for call in calls),
        _usage(event.get("usage"), "prompt", "completion"),
    )


def messages_piece(event: Wire) -> Piece:
    """Of `/v1/messages`: input tokens are those that no cache had."""
    delta = event.get("delta") or {}
    given = (event.get("message") or {}).get("usage") or event.get("usage") or {}
    cached, new = given.get("cache_read_input_tokens"), given.get("input_tokens")
    written = given.get("cache_creation_input_tokens") or 0
    prompt = None if new is None else new + (cached or 0) + written
    usage = Usage(prompt, cached, given.get("output_tokens"))
    return Piece(delta.get("text") or "", delta.get("thinking") or "", delta.get("partial_json") or "", usage)


def responses_piece(event: Wire) -> Piece:
    """Of `/v1/responses`."""
    kind, said = event.get("type", ""), event.get("delta")
    usage = _usage((event.get("response") or {}).get("usage"), "input", "output")
    if not isinstance(said, str):
        return Piece(usage=usage)
    if "function_call" in kind:
        return Piece(call=said, usage=usage)
    return Piece(reasoning=said, usage=usage) if "reasoning" in kind else Piece(said, usage=usage)


def _usage(given: Wire | None, prompt: str, completion: str) -> Usage:
    """Under a protocol's names for the two kinds of tokens."""
    if not given:
        return Usage()
    details = given.get(f"{prompt}_tokens_details") or {}
    return Usage(given.get(f"{prompt}_tokens"), details.get("cached_tokens"), given.get(f"{completion}_tokens"))


READERS: Mapping[str, Callable[[Wire], Piece]] = {
    CHAT: chat_piece,
    MESSAGES: messages_piece,
    RESPONSES: responses_piece,
}


# --- over HTTP --------------------------------------------------------------------------------------------------------


def streamed(path: str, body: Mapping[str, Any], model: str, num_answer_tokens: int) -> Wire:
    """The body asked greedily and as a stream, of this model, for so many tokens."""
    kept = {name: value for name, value in body.items() if name not in (*ALL_LIMIT_FIELDS, "stream_options")}
    kept |= {"model": model, "stream": True, "temperature": GREEDY["temperature"]}
    kept[LIMIT_FIELDS[path]] = num_answer_tokens
    if path == CHAT:
        kept |= {"stream_options": {"include_usage": True}, **GREEDY}
    return kept


class Asking:
    """A request that runs on a thread of its own, so that several can; `answer` waits for the rest of it."""

    def __init__(self, port: int, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
        self._read = READERS[path]
        self._parts: list[tuple[float, Piece]] = []
        self._usage = Usage()
        self._fault: BenchmarkError | None = None
        self._has_left = False
        self._has_begun = threading.Event()
        self.sent_at = time.perf_counter()
        sent = json.dumps(body).encode()
        given = {"Content-Type": "application/json", **(headers or {})}
        self._thread = threading.Thread(target=self._run, args=(path, sent, given), daemon=True)
        self._thread.start()

    def wait_for_words(self) -> float:
        """When the first words arrived. Raises BenchmarkError for an answer that is none."""
        self._has_begun.wait()
        if self._fault is not None:
            raise self._fault
        return self._parts[0][0]

    def leave(self) -> Answer:
        """Hang up as a client does that leaves; what has come."""
        self._has_left = True
        if (sock := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(2)
        return self.answer()

    def answer(self) -> Answer:
        """The answer, once it has ended. Raises BenchmarkError for one that is none."""
        self._thread.join()
        if self._fault is not None:
            raise self._fault
        return Answer(self.sent_at, tuple(self._parts), self._usage)

    def _run(self, path: str, sent: bytes, headers: Mapping[str, str]) -> None:
        try:
            self._connection.request("POST", path, sent, dict(headers))
            response = self._connection.getresponse()
            if response.status != 200:
                raise BenchmarkError(f"{response.status} {response.reason}: {_first_line(response.read())}")
            self._take(response)
            if not self._parts and not self._has_left:
                raise BenchmarkError("an answer without a word")
        except BenchmarkError as fault:
            self._fault = fault
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # AttributeError: http.client's answer to a connection that was shut down while it read a chunk
            if not self._has_left:
                self._fault = BenchmarkError(f"the connection broke: {error!r}")
        finally:
            self._has_begun.set()
            self._connection.close()

    def _take(self, response: http.client.HTTPResponse) -> None:
        for event in events(response):
            if (error := event.get("error")) or event.get("type") == "error":
                raise BenchmarkError(f"the stream failed: {str(error)[:300]}")
            piece = self._read(event)
            self._usage = self._usage.and_then(piece.usage)
            if piece.num_characters:
                self._parts.append((time.perf_counter(), piece))
                self._has_begun.set()


def events(lines: Iterator[bytes] | Sequence[bytes] | http.client.HTTPResponse) -> Iterator[Wire]:
    """The events of a stream, however its `data:` lines are spaced. Raises ValueError for one that is no JSON."""
    for line in lines:
        said = line.strip()
        if said.startswith(b"data:") and (data := said.removeprefix(b"data:").strip()) != b"[DONE]":
            event = json.loads(data)
            if isinstance(event, dict):
                yield event


def _first_line(body: bytes) -> str:
    return " ".join(body.decode("utf-8", "replace").split())[:300]
