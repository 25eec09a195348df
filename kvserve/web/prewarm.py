"""The row of `/v1/cache/prewarm`: wire body -> turn -> what was warmed. It waits as long as its client does."""

import time

from kvserve.core import JsonObject
from kvserve.errors import NotReady
from kvserve.protocols import anthropic_errors
from kvserve.protocols.fields import decode_body
from kvserve.protocols.prewarm import encode_prewarmed, parse_prewarm, speaks_anthropic
from kvserve.warming.prewarming import WAIT_SECONDS, Prewarming, raise_for
from kvserve.web.exchange import Exchange
from kvserve.web.service import WebService


def post_prewarm(exchange: Exchange, service: WebService) -> None:
    """POST /v1/cache/prewarm, in the form of the API that the client speaks."""
    headers = exchange.head.as_mapping()
    _answer_in_form(exchange, {})
    body = decode_body(exchange.body)
    _answer_in_form(exchange, body)
    turn = parse_prewarm(body, headers, service.defaults, exchange.request_id)
    wanted = service.prewarm(turn, service.begin(turn))
    exchange.send_json(200, _outcome(exchange, wanted))


def _answer_in_form(exchange: Exchange, body: JsonObject) -> None:
    if speaks_anthropic(body, exchange.head.as_mapping()):
        exchange.encode_error, exchange.own_statuses = anthropic_errors.encode_error, anthropic_errors.STATUSES


def _outcome(exchange: Exchange, wanted: Prewarming) -> JsonObject:
    """Wait for the end. Raises ClientGone when nobody listens, NotReady, EngineFailure."""
    give_up_at = time.monotonic() + WAIT_SECONDS
    try:
        while not wanted.wait(exchange.settings.poll_seconds):
            exchange.check_client()
            if exchange.must_stop or time.monotonic() > give_up_at:
                raise NotReady("The model found no time for it.", retry_after_seconds=10)
    finally:
        wanted.cancel()
    raise_for(wanted.warming)
    result = wanted.warming.result
    if result is None:
        raise NotReady("The model found no time for it.", retry_after_seconds=10)
    return encode_prewarmed(
        wanted.model,
        num_tokens=result.num_tokens,
        num_cached_tokens=result.num_cached_tokens,
        num_computed_tokens=result.num_computed_tokens,
        seconds=result.seconds,
        reason=result.reason,
    )
