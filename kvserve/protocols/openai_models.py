"""Encodes `/v1/models` and `/v1/models/{name}`. This file knows the wire form, not which model is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model as clients see it: name, Unix seconds, and the limit of prompt and answer together. `alias_of` is the
    model's own name if `name` is an alias."""

    name: str
    created: int
    context_limit: int | None = None
    alias_of: str | None = None


def encode_model(card: ModelCard) -> dict[str, object]:
    """The body of `/v1/models/{name}`. Clients of local servers read the context limit from `max_model_len` and an
    alias's model from `root`."""
    entry: dict[str, object] = {"id": card.name, "object": "model", "created": card.created, "owned_by": "kvserve"}
    if card.context_limit is not None:
        entry["max_model_len"] = card.context_limit
    if card.alias_of is not None:
        entry["root"] = card.alias_of
    return entry


def encode_model_list(cards: Sequence[ModelCard]) -> dict[str, object]:
    """The body of `/v1/models`, in the given order: the loaded model is first."""
    return {"object": "list", "data": [encode_model(card) for card in cards]}
