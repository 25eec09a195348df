"""A turn that cannot begin yet: it waits for its place and is then served like any other. It knows neither models nor
what is waited for.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from kvserve.core import AnswerEvent, Message, RequestId, TokenSequence, Waiting


class ClientTurn(Protocol):
    """A turn that was taken on, as its client's side needs it: one consumer iterates `events`."""

    @property
    def request_id(self) -> RequestId:
        """The id of its request."""

    @property
    def num_prompt_tokens(self) -> int:
        """Model tokens of the prompt."""

    @property
    def num_marked_tokens(self) -> int:
        """Those of them that the client wants to be kept, from the beginning; 0 where it marked nothing."""

    def events(self, poll_seconds: float) -> Iterator[AnswerEvent]:
        """The answer as it comes; `Waiting` at least every `poll_seconds` while nothing does; ends after `Finished`.

        Raises RequestError if generation failed.
        """

    def wait(self, seconds: float, read: Callable[[], bool]) -> None:
        """After a `Waiting` that is idle: wait for the next event, at most so long, or longer once the answer comes.

        Meanwhile `read` may be called on another thread, where tokens have arrived: it iterates `events` in the
        consumer's place, without waiting, and returns False to have the consumer go on itself.
        """

    def cancel(self) -> None:
        """Nobody wants the rest: the row is freed and the events end soon. Idempotent, from any thread."""


class TurnInProgress(ClientTurn, Protocol):
    """And as those need it who keep its answer."""

    @property
    def is_lost(self) -> bool:
        """Whether the watchdog or the server's end cut the answer, so that nothing of it is to be kept."""

    @property
    def said(self) -> Message:
        """The answer so far, as a message."""

    @property
    def context(self) -> TokenSequence:
        """The model's tokens of the conversation so far: the prompt and what was written. Empty before it begins."""


type Begin = Callable[[], TurnInProgress | None]
"""Begins the turn, or returns None while it has to wait. Raises RequestError where waiting is in vain."""


class DeferredTurn:
    """Asks `begin` again and again, on the thread of whoever waits; `leave` is called once it no longer does or, where
    it `holds_place`, once its answer is over.

    The numbers of tokens are what is known before it begins.
    """

    def __init__(
        self,
        request_id: RequestId,
        begin: Begin,
        leave: Callable[[], None],
        *,
        num_prompt_tokens: int = 0,
        num_marked_tokens: int = 0,
        holds_place: bool = False,
    ) -> None:
        self.request_id = request_id
        self._begin = begin
        self._leave = leave
        self._num_prompt_tokens = num_prompt_tokens
        self._num_marked_tokens = num_marked_tokens
        self._holds_place = holds_place
        self._running: TurnInProgress | None = None
        self._is_iterated = False
        self._cancelled = threading.Event()

    @property
    def num_prompt_tokens(self) -> int:
        return self._running.num_prompt_tokens if self._running is not None else self._num_prompt_tokens

    @property
    def num_marked_tokens(self) -> int:
        return self._running.num_marked_tokens if self._running is not None else self._num_marked_tokens

    @property
    def is_lost(self) -> bool:
        return self._running is not None and self._running.is_lost

    @property
    def said(self) -> Message:
        return self._running.said if self._running is not None else Message("assistant", ())

    @property
    def context(self) -> TokenSequence:
        return self._running.context if self._running is not None else TokenSequence(())

    def cancel(self) -> None:
        """Nobody waits any more, or wants the rest. Idempotent, from any thread."""
        self._cancelled.set()
        if not self._is_iterated:
            self._leave()
        if self._running is not None:
            self._running.cancel()

    def wait(self, seconds: float, read: Callable[[], bool]) -> None:
        """Wait for the next event, or for its turn."""
        if self._running is not None:
            self._running.wait(seconds, read)
        else:
            self._cancelled.wait(seconds)

    def begin(self) -> TurnInProgress | None:
        """Begin if it is its turn. Raises RequestError."""
        if self._running is None:
            self._running = self._begin()
        return self._running

    def events(self, poll_seconds: float) -> Generator[AnswerEvent]:
        """`Waiting` until it is its turn, then its answer. Raises RequestError. Cancelled while it waits, it says
        nothing at all."""
        self._is_iterated = has_place = True
        try:
            while (running := self.begin()) is None:
                if self._cancelled.is_set():
                    return
                yield Waiting(0, self._num_prompt_tokens)
                self._cancelled.wait(poll_seconds)
            if not self._holds_place:
                has_place = False
                self._leave()
            if self._cancelled.is_set():
                running.cancel()
            yield from running.events(poll_seconds)
        finally:
            if has_place:
                self._leave()
