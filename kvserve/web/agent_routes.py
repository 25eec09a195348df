"""The routes of `/v1/agents`."""

import time

from kvserve.protocols import agents, openai_chat
from kvserve.protocols.fields import decode_body
from kvserve.requests.serve import collect
from kvserve.web.exchange import HttpExchange
from kvserve.web.router import Route
from kvserve.web.send_turn import stream_turn, whole_answer_events
from kvserve.web.service import WebService


def post_agents(exchange: HttpExchange, service: WebService) -> None:
    """POST /v1/agents."""
    card = service.agents.create(agents.parse_create(decode_body(exchange.body)))
    exchange.send_json(201, agents.encode_agent(card))


def get_agents(exchange: HttpExchange, service: WebService) -> None:
    """GET /v1/agents."""
    exchange.send_json(200, agents.encode_list(service.agents.cards()))


def get_agent(exchange: HttpExchange, service: WebService) -> None:
    """GET /v1/agents/{agent_id}."""
    agent_id = exchange.path_rest
    exchange.send_json(200, agents.encode_agent(service.agents.card(agent_id), service.agents.history(agent_id)))


def delete_agent(exchange: HttpExchange, service: WebService) -> None:
    """DELETE /v1/agents/{agent_id}."""
    service.agents.delete(exchange.path_rest)
    exchange.send_json(200, agents.encode_deleted(exchange.path_rest))


def post_generate(exchange: HttpExchange, service: WebService) -> None:
    """POST /v1/agents/{agent_id}/generate."""
    body, headers = decode_body(exchange.body), exchange.head.as_mapping()
    request = agents.parse_generate(body, headers, service.defaults, exchange.request_id)
    running = service.agents.generate(exchange.path_rest, request.turn)
    created = int(time.time())
    if request.stream:
        chat = openai_chat.ChatStreamEncoder(
            exchange.request_id,
            running.model_name,
            created,
            request.include_usage,
            uses_functions=request.uses_functions,
        )
        encoder = agents.AgentStreamEncoder(chat, lambda: running.note)
        stream_turn(exchange, running, encoder, [encoder.role_chunk()])
    else:
        answer = collect(whole_answer_events(exchange, running))
        whole = openai_chat.encode_answer(
            answer, exchange.request_id, running.model_name, created, uses_functions=request.uses_functions
        )
        exchange.send_json(200, {**whole, "agent": agents.encode_note(running.note)})


AGENT_ROUTES = (
    Route("POST", "/v1/agents", post_agents, needs_body=True),
    Route("GET", "/v1/agents", get_agents),
    Route("POST", "/v1/agents/*/generate", post_generate, needs_body=True),
    Route("GET", "/v1/agents/*", get_agent),
    Route("DELETE", "/v1/agents/*", delete_agent),
)
