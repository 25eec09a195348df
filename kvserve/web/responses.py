"""The routes of `/v1/responses`, and the storing of responses. It joins `protocols/` with the service."""

import time
from collections.abc import Sequence
from urllib.parse import parse_qsl

from kvserve.core import AnswerEvent, Finished, JsonObject, key_digest
from kvserve.errors import BadRequest, NotFound
from kvserve.protocols.fields import decode_body
from kvserve.protocols.responses_items import list_items
from kvserve.protocols.responses_request import ResponsesRequest, parse_responses
from kvserve.protocols.responses_store import OwnResponses, ResponseStore, StoredResponse
from kvserve.protocols.responses_stream import ResponseStreamEncoder
from kvserve.protocols.session import read_principal
from kvserve.web.exchange import NAMED, HttpExchange
from kvserve.web.send_turn import begin_turn, stream_turn, whole_answer_events
from kvserve.web.service import WebService


def post_response(exchange: HttpExchange, service: WebService) -> None:
    """POST /v1/responses."""
    body, headers = decode_body(exchange.body), exchange.head.as_mapping()
    own = service.responses.of(read_principal(body, headers))
    request = parse_responses(body, headers, service.defaults, exchange.request_id, own)
    served = service.begin(request.turn)
    encoder = ResponseStreamEncoder(exchange.request_id, served.name, int(time.time()), request.described)
    keeping = _KeepingEncoder(encoder, request, service.responses)
    with request.names.speaking():
        running = begin_turn(service, request.turn, served, request.words)
        if request.stream:
            stream_turn(exchange, running, keeping, encoder.first_events(), NAMED)
            return
        for event in whole_answer_events(exchange, running):
            keeping.encode(event)
    exchange.send_json(200, encoder.response)


def get_response(exchange: HttpExchange, service: WebService) -> None:
    """GET /v1/responses/{id} and /v1/responses/{id}/input_items."""
    wanted, _, what = exchange.path_rest.partition("/")
    query = dict(parse_qsl(exchange.head.query))
    own = _own_responses(exchange, service)
    stored = own.get(wanted)
    if not what and query.get("stream", "false") != "false":
        raise BadRequest("stream: a response that is kept is not streamed again.", param="stream")
    if not what:
        exchange.send_json(200, stored.body)
    elif what == "input_items":
        before = own.items_until(stored.previous) if stored.previous is not None else ()
        exchange.send_json(200, list_items((*before, *stored.items), query))
    else:
        raise NotFound(f"Unknown path {exchange.head.path!r}.")


def delete_response(exchange: HttpExchange, service: WebService) -> None:
    """DELETE /v1/responses/{id}."""
    _own_responses(exchange, service).delete(exchange.path_rest)
    exchange.send_json(200, {"id": exchange.path_rest, "object": "response", "deleted": True})


def _own_responses(exchange: HttpExchange, service: WebService) -> OwnResponses:
    """The responses of the request's key: a path names no user."""
    return service.responses.of_key(key_digest(exchange.head.as_mapping()))


class _KeepingEncoder:
    """An encoder that stores the response before the client receives its end: the next request may name it at once."""

    def __init__(self, encoder: ResponseStreamEncoder, request: ResponsesRequest, store: ResponseStore) -> None:
        self._encoder = encoder
        self._request = request
        self._store = store
        self.keep_alive = encoder.keep_alive
        self.error_chunk = encoder.error_chunk

    def encode(self, event: AnswerEvent) -> Sequence[JsonObject]:
        """The wire's events."""
        events = self._encoder.encode(event)
        if isinstance(event, Finished) and self._request.store:
            with self._request.turn.keeping as may_keep:
                if may_keep:
                    self._keep()
        return events

    def _keep(self) -> None:
        request, session = self._request, self._request.turn.session
        self._store.put(
            StoredResponse(
                self._encoder.response,
                request.items,
                request.previous_response_id,
                session.principal,
                session.session_id,
            )
        )
