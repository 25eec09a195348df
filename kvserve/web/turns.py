"""Sends a running turn to its client, as a stream or to be collected, and ends it when the client is gone.

It knows events and time, no protocol's fields: those come from the encoder that a route passes in.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Protocol

from kvserve.core import AnswerEvent, Finished, JsonObject, Waiting
from kvserve.deferred import RunningTurn
from kvserve.errors import EngineFailure, NotReady, RequestError
from kvserve.web.exchange import Exchange
from kvserve.web.sse import UNNAMED, Framing


class StreamEncoder(Protocol):
    """How a protocol writes the events of one answer."""

    def encode(self, event: AnswerEvent) -> Sequence[JsonObject]:
        """The chunks that the event makes; none while waiting."""

    def keep_alive(self) -> JsonObject:
        """A chunk that says nothing."""

    def error_chunk(self, error: RequestError) -> JsonObject:
        """The last chunk of an answer that fails after it began."""


def stream_turn(
    exchange: Exchange,
    running: RunningTurn,
    encoder: StreamEncoder,
    first: Sequence[JsonObject],
    framing: Framing = UNNAMED,
) -> None:
    """Send headers and `first` at once, then every event as it comes, and the end. Raises ClientGone, RequestError.

    Headers go out before prefill: a proxy in front passes on that its client left only once it has them.
    """
    keep_alive_seconds = exchange.settings.keep_alive_seconds
    try:
        stream = exchange.open_stream(encoder.error_chunk, framing)
        stream.send(first)
    except BaseException:
        running.cancel()
        raise
    last_output = time.monotonic()
    with closing(watched_events(exchange, running)) as events:
        for event in events:
            chunks = encoder.encode(event)
            now = time.monotonic()
            if not chunks and now - last_output >= keep_alive_seconds:
                chunks = [encoder.keep_alive()]
                if isinstance(event, Waiting) and event.num_done_tokens < event.num_prompt_tokens:
                    stream.comment(f"{event.num_done_tokens} of {event.num_prompt_tokens} prompt tokens are read")
            if chunks:
                stream.send(chunks)
                last_output = now
    stream.end()


def watched_events(exchange: Exchange, running: RunningTurn) -> Generator[AnswerEvent]:
    """The events up to `Finished`, with a look at the client before each one.

    Raises ClientGone when nobody listens, NotReady where the server's end left no `Finished`, EngineFailure where
    something else did. Whatever stops the iteration early cancels the turn.
    """
    is_complete = False
    try:
        for event in running.events(exchange.settings.poll_seconds):
            exchange.check_client()
            if exchange.must_stop:
                running.cancel()
            is_complete = isinstance(event, Finished)
            yield event
            if is_complete:
                return
        raise NotReady("The server is shutting down.") if exchange.must_stop else EngineFailure("The answer broke off.")
    finally:
        if not is_complete:
            running.cancel()


def whole_answer_events(exchange: Exchange, running: RunningTurn) -> Generator[AnswerEvent]:
    """The same for an answer that is sent whole: one that the server's end cut short raises NotReady instead of
    passing for complete."""
    with closing(watched_events(exchange, running)) as events:
        for event in events:
            if exchange.must_stop:
                raise NotReady("The server is shutting down; the answer was not finished.")
            yield event
