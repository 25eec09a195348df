"""Asks one backend for an answer and, if it gives none, one more. It knows statuses and ASGI, no path and no protocol.

What has reached the client is never taken back: another backend is asked only before the answer's head is sent.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from kvserve.errors import NotReady
from kvserve.proxy.asgi import Message, Send
from kvserve.proxy.backend_health import Fleet
from kvserve.proxy.backends import BackendAddress
from kvserve.proxy.envelope import ProxyExchange

MAX_ATTEMPTS = 2

# Too busy, not ready, and Anthropic's word for both. Any other answer would be the same elsewhere, or worse: a request
# that breaks one model must not be carried on to the next.
_ELSEWHERE = frozenset({429, 503, 529})


@dataclass(slots=True)
class Attempt:
    """A request on its way to one backend. LiteLLM's hook sets `is_unreached` when no answer came from there;
    `exchange` is what travels beside a chat. `is_last`: its answer counts, whatever it is."""

    backend: BackendAddress
    is_last: bool = True
    is_unreached: bool = False
    exchange: ProxyExchange | None = None

    def is_no_answer(self, status: int) -> bool:
        """Whether an answer of this status, by LiteLLM, means that the backend gave none."""
        return self.is_unreached and status >= 500 and (self.exchange is None or self.exchange.upstream_error is None)

    def goes_elsewhere(self, status: int) -> bool:
        """Whether another backend is to be asked instead of passing on an answer of this status."""
        upstream = self.exchange.upstream_error if self.exchange is not None else None
        return not self.is_last and (upstream.status if upstream is not None else status) in _ELSEWHERE


CURRENT_ATTEMPT: ContextVar[Attempt | None] = ContextVar("current_attempt", default=None)
"""For LiteLLM's hook, which gets no request: each request runs in its own context."""

type Serve = Callable[[Attempt, Send], Awaitable[None]]


async def try_in_turn(order: Sequence[BackendAddress], serve: Serve, send: Send, fleet: Fleet) -> None:
    """Have `serve` answer with the first backend of the order or, before the answer's head, with the second one; the
    fleet is told of those that gave no answer. Raises NotReady if nobody answers."""
    tried = order[:MAX_ATTEMPTS]
    for number, backend in enumerate(tried, 1):
        attempt = Attempt(backend, is_last=number == len(tried))
        CURRENT_ATTEMPT.set(attempt)
        answer = _AttemptAnswer(send, attempt)
        try:
            await serve(attempt, answer)
        except NotReady:  # past LiteLLM: no answer came
            attempt.is_unreached = answer.is_unwanted = True
        if attempt.is_unreached:
            fleet.note_unreached(backend)
        if not answer.is_unwanted:
            return
        if not attempt.is_last:
            fleet.note_elsewhere(backend)
    raise NotReady(_nobody(tried))


def _nobody(tried: Sequence[BackendAddress]) -> str:
    if len(tried) == 1:
        return "kvserve itself gives no answer."
    return (
        "None of the servers behind this proxy gives an answer." if tried else "No server behind this proxy is usable."
    )


class _AttemptAnswer:
    """The `send` of one attempt: it keeps an answer back that is not to reach the client."""

    def __init__(self, send: Send, attempt: Attempt) -> None:
        self._send = send
        self._attempt = attempt
        self.is_unwanted = False

    async def __call__(self, message: Message) -> None:
        """Passes one ASGI message on, or drops it."""
        if message["type"] == "http.response.start":
            status = int(message["status"])
            self.is_unwanted = self._attempt.is_no_answer(status) or self._attempt.goes_elsewhere(status)
        if not self.is_unwanted:
            await self._send(message)
