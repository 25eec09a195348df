"""Model names -> the bodies of `/v1/models` and `/v1/models/{name}`. Knows the wire form, not what is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the endpoints tell of one model: its name, Unix seconds, and the tokens of prompt and answer together.

    `alias_of` is the model's own name where this one is an alias.
    """

    name: str
    created: int
    context_limit: int | None = None
    alias_of: str | None = None


def encode_model(card: ModelCard) -> dict[str, object]:
    """The body of `/v1/models/{name}`; clients of local servers look for the context limit in `max_model_len` and for
    what an alias stands for in `root`."""
    entry: dict[str, object] = {"id": card.name, "object": "model", "created": card.created, "owned_by": "kvserve"}
    if card.context_limit is not None:
        entry["max_model_len"] = card.context_limit
    if card.alias_of is not None:
        entry["root"] = card.alias_of
    return entry


def encode_model_list(cards: Sequence[ModelCard]) -> dict[str, object]:
    """The body of `/v1/models`, in the order given: the loaded model comes first."""
    return {"object": "list", "data": [encode_model(card) for card in cards]}
