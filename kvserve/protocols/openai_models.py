"""Model names -> the bodies of `/v1/models` and `/v1/models/{name}`. Knows the wire form, not what is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the endpoints tell of one model: its name, Unix seconds, and the tokens of prompt and answer together."""

    name: str
    created: int
    context_limit: int | None = None


def encode_model(card: ModelCard) -> dict[str, object]:
    """The body of `/v1/models/{name}`; `max_model_len` is where clients of local servers look for the context limit."""
    entry: dict[str, object] = {"id": card.name, "object": "model", "created": card.created, "owned_by": "kvserve"}
    return entry if card.context_limit is None else {**entry, "max_model_len": card.context_limit}


def encode_model_list(cards: Sequence[ModelCard]) -> dict[str, object]:
    """The body of `/v1/models`, in the order given: the loaded model comes first."""
    return {"object": "list", "data": [encode_model(card) for card in cards]}
