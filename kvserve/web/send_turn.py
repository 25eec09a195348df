"""Sends a running turn to its client, as a stream or collected, and cancels it when the client leaves.

It knows events and time; the route's encoder knows the protocol's fields.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Protocol

from kvserve.core import BEGIN_HEADER, AnswerEvent, Finished, JsonObject, RequestId, Turn, Waiting
from kvserve.errors import EngineFailure, NotReady, RequestError
from kvserve.protocols.placeholders import answer_in_words
from kvserve.requests.deferred import ClientTurn
from kvserve.requests.served_model import ServedModel
from kvserve.web.exchange import UNNAMED, EventStream, Framing, HttpExchange
from kvserve.web.service import WebService

MAX_HELD_SECONDS = 60.0
_STOPPED = "The server is shutting down; the answer was not finished."


class StreamEncoder(Protocol):
    """A protocol's encoding of one answer's events."""

    def encode(self, event: AnswerEvent) -> Sequence[JsonObject]:
        """The chunks for the event; none while waiting."""

    def keep_alive(self) -> JsonObject:
        """An empty chunk."""

    def error_chunk(self, error: RequestError) -> JsonObject:
        """The last chunk of an answer that failed after it began."""


def stream_turn(
    exchange: HttpExchange,
    running: ClientTurn,
    encoder: StreamEncoder,
    first: Sequence[JsonObject],
    framing: Framing = UNNAMED,
) -> None:
    """Send headers and `first` at once, then every event as it arrives, and the end. Raises ClientGone, RequestError.

    Headers are sent before prefill: only then does a proxy in front report that its client left. A proxy that may ask
    another server says itself how long they may wait for the answer's first word.
    """
    stream = _Opening(lambda: exchange.open_stream(encoder.error_chunk, framing), first, held_seconds(exchange))
    try:
        stream.pass_time()
    except BaseException:
        running.cancel()
        raise
    _Streaming(exchange, running, encoder, stream).run()
    stream.end()


def held_seconds(exchange: HttpExchange) -> float:
    """For how long the head of a stream may be held back; 0 where nobody asks for it."""
    asked = exchange.head.get(BEGIN_HEADER) or ""
    return min(float(asked), MAX_HELD_SECONDS) if asked.isascii() and asked.isdigit() else 0.0


class _Opening:
    """A stream of events whose head is sent with the first event that says something, or once it is time."""

    def __init__(self, open_stream: Callable[[], EventStream], first: Sequence[JsonObject], seconds: float) -> None:
        self._open_stream = open_stream
        self._kept = [*first]
        self._opens_at = time.monotonic() + seconds
        self._stream: EventStream | None = None

    @property
    def is_open(self) -> bool:
        """Whether the head has been sent: from then on a failure is an event."""
        return self._stream is not None

    def send(self, chunks: Sequence[JsonObject]) -> None:
        """Send these chunks, after all that was kept."""
        if self._stream is None:
            self._stream = self._open_stream()
        kept, self._kept = self._kept, []
        self._stream.send([*kept, *chunks])

    def keep(self, chunks: Sequence[JsonObject]) -> None:
        """Keep what says nothing yet; everything is sent once it is time."""
        self._kept += chunks
        self.pass_time()

    def pass_time(self) -> None:
        """Send the head and what was kept if it is time."""
        if time.monotonic() >= self._opens_at:
            self.send([])

    def comment(self, text: str) -> None:
        """As `EventStream.comment`; nothing before the head."""
        if self._stream is not None:
            self._stream.comment(text)

    def end(self) -> None:
        """As `EventStream.end`."""
        self.send([])
        assert self._stream is not None
        self._stream.end()


class WordsTurn:
    """A turn that is answered without a model, in `words`."""

    num_prompt_tokens = num_marked_tokens = 0

    def __init__(self, request_id: RequestId, words: str) -> None:
        self.request_id = request_id
        self._words = words

    def events(self, poll_seconds: float) -> Iterator[AnswerEvent]:
        """All of it, at once."""
        return answer_in_words(self._words)

    def wait(self, seconds: float, read: Callable[[], bool]) -> None:
        """There is nothing to wait for."""

    def cancel(self) -> None:
        """There is nothing to end."""


def begin_turn(service: WebService, turn: Turn, served: ServedModel, words: str | None) -> ClientTurn:
    """Submit a turn; where no model can answer it, `words` do. Raises RequestError before anything is computed."""
    if words is None:
        return service.serve(turn, served)
    service.observability.answered_in_words(turn, served.name)
    return WordsTurn(turn.request_id, words)


class _Streaming:
    """Sends one answer. It runs on the connection's thread; while that thread waits, the thread that delivers tokens
    sends them, never both at once."""

    def __init__(self, exchange: HttpExchange, running: ClientTurn, encoder: StreamEncoder, stream: _Opening) -> None:
        self._exchange = exchange
        self._running = running
        self._encoder = encoder
        self._stream = stream
        self._events = complete_events(exchange, running, poll_seconds=0)
        self._is_over = False
        self._failure: BaseException | None = None
        self._last_output = time.monotonic()

    def run(self) -> None:
        """Send everything. Raises ClientGone, RequestError."""
        with closing(self._events):
            self._send_arrived()
            while not self._is_over:
                self._running.wait(self._exchange.settings.poll_seconds, self._send_elsewhere)
                if self._failure is not None:
                    raise self._failure
                self._exchange.send_rest()
                self._exchange.check_client()
                self._send_arrived()

    def _send_elsewhere(self) -> bool:
        """Send what has arrived, on another thread. False if the connection's own thread is needed: the client has left
        or does not read, or something failed."""
        if self._exchange.client_is_gone:
            return False
        try:
            with self._exchange.without_waiting():
                self._send_arrived()
        except BaseException as error:  # noqa: BLE001 - raised again where it belongs
            self._failure = error
        return not (self._failure or self._is_over or self._exchange.has_rest)

    def _send_arrived(self) -> None:
        for event in self._events:
            self._send(event)
            if isinstance(event, Waiting) and event.is_idle:
                return
        self._is_over = True

    def _send(self, event: AnswerEvent) -> None:
        chunks = self._encoder.encode(event)
        if isinstance(event, Waiting) and not self._stream.is_open:
            self._stream.keep(chunks)
            return
        now = time.monotonic()
        if not chunks and now - self._last_output >= self._exchange.settings.keep_alive_seconds:
            chunks = [self._encoder.keep_alive()]
            if isinstance(event, Waiting) and event.num_done_tokens < event.num_prompt_tokens:
                self._stream.comment(f"{event.num_done_tokens} of {event.num_prompt_tokens} prompt tokens are read")
        if chunks:
            self._stream.send(chunks)
            self._last_output = now


def complete_events(exchange: HttpExchange, running: ClientTurn, poll_seconds: float) -> Generator[AnswerEvent]:
    """The events up to `Finished`.

    Raises NotReady if the server stops before that, so that no client takes a part for the whole, and EngineFailure if
    they end without it. Stopping the iteration early cancels the turn.
    """
    is_complete = False
    try:
        for event in running.events(poll_seconds):
            is_complete = isinstance(event, Finished)
            yield event
            if is_complete:
                return
            if exchange.must_stop:
                break
        raise NotReady(_STOPPED) if exchange.must_stop else EngineFailure("The answer broke off.")
    finally:
        if not is_complete:
            running.cancel()


def whole_answer_events(exchange: HttpExchange, running: ClientTurn) -> Generator[AnswerEvent]:
    """The same for an answer that is sent whole. Raises ClientGone if the client has left before an event."""
    with closing(complete_events(exchange, running, exchange.settings.poll_seconds)) as events:
        for event in events:
            exchange.check_client()
            yield event
