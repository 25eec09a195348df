"""Model lists: golden file, order, and the context limit where there is one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvserve.protocols.model_cards import ModelCard, encode_openai_model, encode_openai_model_list

if TYPE_CHECKING:  # the SDKs take a second each to import: only tests that read with them do
    from openai import OpenAI

CARDS = [ModelCard("org/first", 1_700_000_000, 131_072), ModelCard("second", 1_700_000_001)]


def test_the_list_has_its_wire_form(golden: Callable[[str, str], None], sdk_reading: Callable[..., OpenAI]) -> None:
    """The order is kept, and the SDK reads the list."""
    wire = json.dumps(encode_openai_model_list(CARDS), indent=1) + "\n"
    golden("models.json", wire)
    assert [model.id for model in sdk_reading(wire).models.list()] == ["org/first", "second"]


def test_one_model_is_an_entry_of_the_list(sdk_reading: Callable[..., OpenAI]) -> None:
    """`/v1/models/{name}` says what the list says."""
    assert encode_openai_model(CARDS[0]) == encode_openai_model_list(CARDS)["data"][0]  # type: ignore[index]
    model = sdk_reading(json.dumps(encode_openai_model(CARDS[0]))).models.retrieve("org/first")
    assert (model.id, model.object, model.owned_by) == ("org/first", "model", "kvserve")
