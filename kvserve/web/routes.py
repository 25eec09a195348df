"""The endpoint table, with one function per route. It joins `protocols/` with the service."""

import contextlib
import time
from urllib.parse import parse_qs, parse_qsl

from kvserve.core import KEY_HEADER, JsonObject, Turn, holder_digest, key_digest
from kvserve.engine.warming import Warming, WarmResult
from kvserve.errors import BadRequest, NotFound, NotReady
from kvserve.observe.metrics import CONTENT_TYPE as METRICS_TYPE
from kvserve.protocols import agents, anthropic_messages, openai_chat, openai_completions
from kvserve.protocols.anthropic_answers import MessageStreamEncoder, PromptCounts, whole_message
from kvserve.protocols.error_bodies import ANTHROPIC_STATUSES, encode_anthropic_error, encode_openai_error
from kvserve.protocols.fields import Fields, decode_body, flag, text
from kvserve.protocols.model_cards import (
    encode_anthropic_model,
    encode_anthropic_model_list,
    encode_openai_model,
    encode_openai_model_list,
)
from kvserve.protocols.prewarm import encode_prewarmed, parse_prewarm, speaks_anthropic
from kvserve.requests.deferred import ClientTurn
from kvserve.requests.serve import collect
from kvserve.warming.prewarming import WAIT_SECONDS, raise_for
from kvserve.web.dashboard_pages import get_asset, get_clients, get_conversation, get_events, get_page, get_root
from kvserve.web.exchange import NAMED, HttpExchange
from kvserve.web.responses import delete_response, get_response, post_response
from kvserve.web.router import Route, Router
from kvserve.web.send_turn import begin_turn, stream_turn, whole_answer_events
from kvserve.web.service import WebService


def post_agents(exchange: HttpExchange, service: WebService) -> None:
    """POST /v1/agents."""
    card = service.agents.create(agents.parse_create(decode_body(exchange.body)), _holder(exchange))
    exchange.send_json(201, agents.encode_agent(card))


def get_agents(exchange: HttpExchange, service: WebService) -> None:
    """GET /v1/agents."""
    exchange.send_json(200, agents.encode_list(service.agents.cards(_holder(exchange))))


def get_agent(exchange: HttpExchange, service: WebService) -> None:
    """GET /v1/agents/{agent_id}."""
    asked_for = exchange.path_rest, _holder(exchange)
    exchange.send_json(200, agents.encode_agent(service.agents.card(*asked_for), service.agents.history(*asked_for)))


def delete_agent(exchange: HttpExchange, service: WebService) -> None:
    """DELETE /v1/agents/{agent_id}."""
    service.agents.delete(exchange.path_rest, _holder(exchange))
    exchange.send_json(200, agents.encode_deleted(exchange.path_rest))


def post_generate(exchange: HttpExchange, service: WebService) -> None:
    """POST /v1/agents/{agent_id}/generate."""
    body, headers = decode_body(exchange.body), exchange.head.as_mapping()
    request = agents.parse_generate(body, headers, service.defaults, exchange.request_id)
    running = service.agents.generate(exchange.path_rest, request.turn, _holder(exchange))
    chat = openai_chat.ChatEncoder(
        exchange.request_id,
        running.model_name,
        int(time.time()),
        request.include_usage,
        uses_functions=request.uses_functions,
    )
    _send_chat(exchange, running, agents.AgentEncoder(chat, lambda: running.note), stream=request.stream)


def _holder(exchange: HttpExchange) -> str:
    """Whose agents are there for a request: the holder's of its key, "" for all."""
    return holder_digest(exchange.head.as_mapping())


AGENT_ROUTES = (
    Route("POST", "/v1/agents", post_agents, needs_body=True),
    Route("GET", "/v1/agents", get_agents),
    Route("POST", "/v1/agents/*/generate", post_generate, needs_body=True),
    Route("GET", "/v1/agents/*", get_agent),
    Route("DELETE", "/v1/agents/*", delete_agent),
)


def post_chat(exchange: HttpExchange, service: WebService) -> None:
    """POST /v1/chat/completions."""
    body, headers = decode_body(exchange.body), exchange.head.as_mapping()
    request = openai_chat.parse_chat(body, headers, service.defaults, exchange.request_id)
    served = service.begin(request.turn)
    encoder = openai_chat.ChatEncoder(
        exchange.request_id,
        served.name,
        int(time.time()),
        request.include_usage,
        with_logprobs=request.turn.num_top_logprobs is not None,
        uses_functions=request.uses_functions,
    )
    with request.names.speaking():
        _send_chat(exchange, service.serve(request.turn, served), encoder, stream=request.stream)


def _send_chat(
    exchange: HttpExchange, running: ClientTurn, encoder: openai_chat.ChatEncoder | agents.AgentEncoder, *, stream: bool
) -> None:
    if stream:
        stream_turn(exchange, running, encoder, [encoder.role_chunk()])
    else:
        exchange.send_json(200, encoder.encode_whole(collect(whole_answer_events(exchange, running))))


def post_completion(exchange: HttpExchange, service: WebService) -> None:
    """POST /v1/completions."""
    body, headers = decode_body(exchange.body), exchange.head.as_mapping()
    request = openai_completions.parse_completion(body, headers, service.defaults, exchange.request_id)
    served = service.begin(request.turn)
    with_logprobs = request.turn.num_top_logprobs is not None
    encoder = openai_completions.CompletionEncoder(
        exchange.request_id, served.name, int(time.time()), request.include_usage, with_logprobs=with_logprobs
    )
    with request.names.speaking():
        running = service.serve(request.turn, served)
        if request.stream:
            stream_turn(exchange, running, encoder, [])
        else:
            exchange.send_json(200, encoder.encode_whole(collect(whole_answer_events(exchange, running))))


def post_messages(exchange: HttpExchange, service: WebService) -> None:
    """POST /v1/messages."""
    body, headers = decode_body(exchange.body), exchange.head.as_mapping()
    request = anthropic_messages.parse_messages(body, headers, service.defaults, exchange.request_id)
    served = service.begin(request.turn)
    with request.names.speaking():
        running = begin_turn(service, request.turn, served, request.words)
        encoder = MessageStreamEncoder(
            exchange.request_id,
            served.name,
            lambda: PromptCounts(running.num_prompt_tokens, running.num_marked_tokens),
            shows_thinking=request.shows_thinking,
        )
        if request.stream:
            stream_turn(exchange, running, encoder, [], NAMED)
            return
        events = [made for event in whole_answer_events(exchange, running) for made in encoder.encode(event)]
    exchange.send_json(200, whole_message(events))


def post_count_tokens(exchange: HttpExchange, service: WebService) -> None:
    """POST /v1/messages/count_tokens."""
    body, headers = decode_body(exchange.body), exchange.head.as_mapping()
    turn = anthropic_messages.parse_counted(body, headers, service.defaults, exchange.request_id)
    exchange.send_json(200, {"input_tokens": service.count_tokens(turn, service.begin(turn))})


def get_models(exchange: HttpExchange, service: WebService) -> None:
    """GET /v1/models, in the form of the API that the client speaks."""
    if _speaks_anthropic(exchange):
        query = dict(parse_qsl(exchange.head.query))
        exchange.send_json(200, encode_anthropic_model_list(service.list_models(), query))
        return
    exchange.send_json(200, encode_openai_model_list(service.list_models()))


def get_model(exchange: HttpExchange, service: WebService) -> None:
    """GET /v1/models/{name}; names contain slashes."""
    is_anthropic = _speaks_anthropic(exchange)
    cards = {card.name: card for card in service.list_models()}
    card = cards.get(exchange.path_rest)
    if card is None:
        raise NotFound(f"The model {exchange.path_rest!r} is not served here.", param="model")
    exchange.send_json(200, (encode_anthropic_model if is_anthropic else encode_openai_model)(card))


def post_load(exchange: HttpExchange, service: WebService) -> None:
    """POST /v1/models/load: answers once the model of this name is loaded, which waits until nothing runs on the one
    before. It waits as long as its client does."""
    name = Fields(decode_body(exchange.body)).required("model", text)
    turn = Turn(exchange.request_id, "load", name, service.defaults.sampling)
    with contextlib.closing(service.load(turn, service.begin(turn))) as loading:
        for _ in loading:
            exchange.check_client()
            if exchange.must_stop:
                raise NotReady("The server is shutting down.", retry_after_seconds=10)
            time.sleep(exchange.settings.poll_seconds)
    exchange.send_json(200, {"model": name, "status": "loaded"})


def _speaks_anthropic(exchange: HttpExchange, body: JsonObject | None = None) -> bool:
    """Whether the client speaks Anthropic's API on a path of both APIs; its errors then take that form."""
    if not speaks_anthropic(body or {}, exchange.head.as_mapping()):
        return False
    exchange.encode_error, exchange.own_statuses = encode_anthropic_error, ANTHROPIC_STATUSES
    return True


def get_health(exchange: HttpExchange, service: WebService) -> None:
    """GET /health."""
    status, body = service.health()
    # A header without the secret has been taken away: a proxy must know whether it was believed.
    exchange.send_json(status, {**body, "knows_proxy": exchange.head.get(KEY_HEADER) is not None})


def post_drain(exchange: HttpExchange, service: WebService) -> None:
    """POST /v1/drain, with `{"draining": false}` to take it back: proxies send new requests elsewhere."""
    is_draining = Fields(decode_body(exchange.body)).required("draining", flag)
    exchange.send_json(200, service.drain(is_draining=is_draining))


def get_cache(exchange: HttpExchange, service: WebService) -> None:
    """GET /v1/cache."""
    exchange.send_json(200, service.cache_report())


def post_prewarm(exchange: HttpExchange, service: WebService) -> None:
    """POST /v1/cache/prewarm, in the form of the API that the client speaks. It waits as long as its client does."""
    _speaks_anthropic(exchange)  # before the body is parsed, so that its errors take the form
    body = decode_body(exchange.body)
    _speaks_anthropic(exchange, body)
    turn = parse_prewarm(body, exchange.head.as_mapping(), service.defaults, exchange.request_id)
    served = service.begin(turn)
    result = _warmed(exchange, service.prewarm(turn, served))
    raise_for(result)
    answer = encode_prewarmed(
        served.name,
        num_tokens=result.num_tokens,
        num_cached_tokens=result.num_cached_tokens,
        num_computed_tokens=result.num_computed_tokens,
        seconds=result.seconds,
        reason=result.reason,
    )
    exchange.send_json(200, answer)


def _warmed(exchange: HttpExchange, warming: Warming) -> WarmResult:
    """The result, once the prompt is computed. Raises ClientGone, NotReady."""
    give_up_at = time.monotonic() + WAIT_SECONDS
    try:
        while (result := warming.wait(exchange.settings.poll_seconds)) is None:
            exchange.check_client()
            if exchange.must_stop or time.monotonic() > give_up_at:
                raise NotReady("The model found no time for it.", retry_after_seconds=10)
        return result
    finally:
        warming.cancel()


def get_explanation(exchange: HttpExchange, service: WebService) -> None:
    """GET /v1/cache/explain/{request_id}: takes a request's id, an answer's `id`, which contains it, or the beginning
    of either, as the terminal shows it."""
    exchange.send_json(200, service.observability.explain(exchange.path_rest, key_digest(exchange.head.as_mapping())))


def get_last_explanation(exchange: HttpExchange, service: WebService) -> None:
    """GET /v1/cache/explain, also with `?last`: the newest finished request."""
    exchange.send_json(200, service.observability.explain(None, key_digest(exchange.head.as_mapping())))


def get_metrics(exchange: HttpExchange, service: WebService) -> None:
    """GET /metrics."""
    exchange.send_body(200, METRICS_TYPE, service.observability.metrics())


def delete_cache(exchange: HttpExchange, service: WebService) -> None:
    """DELETE /v1/cache; with `?session=ID`, `?principal=NAME` or both, only their data."""
    wanted = _read_forgotten(exchange.head.query)
    if not wanted:
        exchange.send_json(200, {"status": "ok", "is_done": service.clear_cache()})
        return
    forgotten = service.forget(wanted.get("session"), wanted.get("principal"))
    exchange.send_json(200, {"status": "ok", **forgotten})


def _read_forgotten(query: str) -> dict[str, str]:
    """The session and principal to forget; empty means all of them. Raises BadRequest for a misspelt name or an empty
    value (an unset variable, say), which must not delete everyone's data."""
    wanted: dict[str, str] = {}
    for name, values in parse_qs(query, keep_blank_values=True).items():
        if name not in ("session", "principal"):
            raise BadRequest(f"{name}: what is forgotten is named by session or principal.", param=name)
        if len(values) != 1 or not values[0].strip():
            raise BadRequest(f"{name}: expected one name.", param=name)
        wanted[name] = values[0].strip()
    return wanted


ROUTES = (
    Route("POST", "/v1/chat/completions", post_chat, needs_body=True),
    Route("POST", "/v1/completions", post_completion, needs_body=True),
    Route(
        "POST",
        "/v1/messages",
        post_messages,
        needs_body=True,
        encode_error=encode_anthropic_error,
        statuses=ANTHROPIC_STATUSES,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        post_count_tokens,
        needs_body=True,
        encode_error=encode_anthropic_error,
        statuses=ANTHROPIC_STATUSES,
    ),
    Route("POST", "/v1/responses", post_response, needs_body=True),
    Route("GET", "/v1/responses/*", get_response),
    Route("DELETE", "/v1/responses/*", delete_response),
    Route("GET", "/v1/models", get_models),
    Route("GET", "/v1/models/*", get_model),
    Route("POST", "/v1/models/load", post_load, needs_body=True),
    Route("GET", "/v1/cache", get_cache),
    Route("POST", "/v1/cache/prewarm", post_prewarm, needs_body=True),
    Route("GET", "/v1/cache/explain", get_last_explanation),
    Route("GET", "/v1/cache/explain/*", get_explanation),
    Route("DELETE", "/v1/cache", delete_cache),
    Route("POST", "/v1/drain", post_drain, needs_body=True),
    Route("GET", "/health", get_health, needs_key=False),
    Route("GET", "/metrics", get_metrics),
    Route("GET", "/", get_root, needs_key=False),
    Route("GET", "/dashboard", get_page, needs_key=False),
    Route("GET", "/dashboard/events", get_events),
    Route("GET", "/dashboard/clients", get_clients),
    Route("GET", "/dashboard/sessions/*", get_conversation),
    Route("GET", "/dashboard/*", get_asset, needs_key=False),
    *AGENT_ROUTES,
)


def make_router(service: WebService) -> Router:
    """The table bound to a service. Errors outside every route take OpenAI's form. Clients may leave `/v1` out of their
    base URL, as many do with local servers."""
    return Router(ROUTES, service, encode_openai_error, prefix="/v1")
