"""Encodes `/v1/models` and `/v1/models/{name}` in OpenAI's and in Anthropic's form. This file knows the wire forms and
the header of Anthropic's clients, not which model is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from kvserve.errors import BadRequest
from kvserve.protocols.fields import page_limit


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model as clients see it: name, Unix seconds, and the limit of prompt and answer together. `alias_of` is the
    model's own name if `name` is an alias."""

    name: str
    created: int
    context_limit: int | None = None
    alias_of: str | None = None


def encode_openai_model(card: ModelCard) -> dict[str, object]:
    """The body of `/v1/models/{name}`. Clients of local servers read the context limit from `max_model_len` and an
    alias's model from `root`."""
    entry: dict[str, object] = {"id": card.name, "object": "model", "created": card.created, "owned_by": "kvserve"}
    if card.context_limit is not None:
        entry["max_model_len"] = card.context_limit
    if card.alias_of is not None:
        entry["root"] = card.alias_of
    return entry


def encode_openai_model_list(cards: Sequence[ModelCard]) -> dict[str, object]:
    """The body of `/v1/models`, in the given order: the loaded model is first."""
    return {"object": "list", "data": [encode_openai_model(card) for card in cards]}


# --- Anthropic's form ------------------------------------------------------------------------------------------------


VERSION_HEADER = "anthropic-version"
"""Every Anthropic client sends it; no OpenAI client does."""

MAX_LIMIT = 1000
_DEFAULT_LIMIT = 20


def encode_anthropic_model(card: ModelCard) -> dict[str, object]:
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


def encode_anthropic_model_list(cards: Sequence[ModelCard], query: Mapping[str, str]) -> dict[str, object]:
    """The page of `/v1/models` that `limit`, `after_id` and `before_id` ask for, in the order given.

    Raises BadRequest.
    """
    names = [card.name for card in cards]
    begin = _position(names, query, "after_id")
    end = _position(names, query, "before_id")
    limit = page_limit(query, _DEFAULT_LIMIT, MAX_LIMIT)
    inner = cards[0 if begin is None else begin + 1 : end]
    page = inner[-limit:] if end is not None and begin is None else inner[:limit]
    return {
        "data": [encode_anthropic_model(card) for card in page],
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
