"""The routes of `/v1/responses`, and the storing of responses. It joins `protocols/` with the service."""

import time
from functools import partial
from urllib.parse import parse_qsl

from kvserve.core import JsonObject, key_digest
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
    encoder = ResponseStreamEncoder(
        exchange.request_id,
        served.name,
        int(time.time()),
        request.described,
        partial(_keep, service.responses, request),
    )
    with request.names.speaking():
        running = begin_turn(service, request.turn, served, request.words)
        if request.stream:
            stream_turn(exchange, running, encoder, encoder.first_events(), NAMED)
            return
        for event in whole_answer_events(exchange, running):
            encoder.encode(event)
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


def _keep(store: ResponseStore, request: ResponsesRequest, response: JsonObject) -> None:
    """Store a response that is complete, unless its client wants none stored or its owner was forgotten since it
    came."""
    session = request.turn.session
    with request.turn.keeping as may_keep:
        if may_keep and request.store:
            store.put(
                StoredResponse(
                    response, request.items, request.previous_response_id, session.principal, session.session_id
                )
            )
