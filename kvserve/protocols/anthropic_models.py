"""Encodes `/v1/models` and `/v1/models/{name}` in Anthropic's form. This file knows the wire form and the header of
Anthropic's clients, not which model is loaded.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from kvserve.errors import BadRequest
from kvserve.protocols.openai_models import ModelCard

VERSION_HEADER = "anthropic-version"
"""Every Anthropic client sends it; no OpenAI client does."""

MAX_LIMIT = 1000
_DEFAULT_LIMIT = 20


def encode_model(card: ModelCard) -> dict[str, object]:
    """The body of `/v1/models/{name}`: prompt and answer share one limit; an alias shows its model's name."""
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.alias_of or card.name,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.context_limit,
        "max_tokens": card.context_limit,
    }


def encode_model_list(cards: Sequence[ModelCard], query: Mapping[str, str]) -> dict[str, object]:
    """The page of `/v1/models` that `limit`, `after_id` and `before_id` ask for, in the order given.

    Raises BadRequest.
    """
    names = [card.name for card in cards]
    begin = _position(names, query, "after_id")
    end = _position(names, query, "before_id")
    limit = _limit(query)
    inner = cards[0 if begin is None else begin + 1 : end]
    page = inner[-limit:] if end is not None and begin is None else inner[:limit]
    return {
        "data": [encode_model(card) for card in page],
        "has_more": len(page) < len(inner),
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def _position(names: Sequence[str], query: Mapping[str, str], key: str) -> int | None:
    name = query.get(key)
    if name is None:
        return None
    if name not in names:
        raise BadRequest(f"{key}: there is no model {name!r}.", param=key)
    return names.index(name)


def _limit(query: Mapping[str, str]) -> int:
    said = query.get("limit", str(_DEFAULT_LIMIT))
    if not (said.isascii() and said.isdigit() and len(said) < 9 and 1 <= int(said) <= MAX_LIMIT):
        raise BadRequest(f"limit: expected an integer from 1 to {MAX_LIMIT}.", param="limit")
    return int(said)
