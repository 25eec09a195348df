"""Every golden body and stream event, and bodies without a file, against the types of the openai and anthropic SDKs.
`sdk_types.EXTENSIONS` names all that an answer may hold beyond them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvserve.protocols.model_cards import ModelCard, encode_anthropic_model
from kvserve.protocols.responses_items import input_items, list_items
from tests.protocols.conftest import GOLDEN
from tests.protocols.responses_wire import ID
from tests.protocols.sdk_types import faults

FILES = sorted(GOLDEN.iterdir())


def kinds_of(name: str) -> list[Any]:
    """The types of which the bodies of a golden file should be."""
    from anthropic import types as anthropic
    from anthropic.types import beta
    from openai import types as openai
    from openai.types import chat, responses

    table: dict[tuple[str, str], list[Any]] = {
        ("chat", "json"): [chat.ChatCompletion],
        ("chat", "sse"): [chat.ChatCompletionChunk],
        ("completion", "json"): [openai.Completion],
        ("completion", "sse"): [openai.Completion],
        ("responses", "sse"): [responses.ResponseStreamEvent],
        ("anthropic", "json"): [anthropic.Message, beta.BetaMessage],
        ("anthropic", "sse"): [anthropic.RawMessageStreamEvent, beta.BetaRawMessageStreamEvent],
        ("models", "json"): [openai.Model],
    }
    stem, _, ending = name.partition(".")
    return table[stem.partition("_")[0], ending]


def bodies_of(file: Path) -> Iterator[dict[str, Any]]:
    """What a golden file holds: one body, the entries of a list, or the events of a stream that say something."""
    said = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        body = json.loads(said)
        yield from body["data"] if body.get("object") == "list" else [body]
        return
    for line in said.splitlines():
        if line.startswith("data: ") and line not in ("data: [DONE]", 'data: {"type": "ping"}'):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("file", [file for file in FILES if "error" not in file.name], ids=lambda file: file.name)
def test_bodies_and_events_are_of_the_sdks_types(file: Path) -> None:
    """All that the types require is there, and nothing more but what the table names."""
    bodies = list(bodies_of(file))
    assert bodies
    assert [fault for body in bodies for kind in kinds_of(file.name) for fault in faults(kind, body)] == []


def test_errors_are_of_openais_type() -> None:
    """In every file of errors, and in a response that failed."""
    from openai.types.responses import ResponseStreamEvent
    from openai.types.shared import ErrorObject

    errors = json.loads((GOLDEN / "errors.json").read_text(encoding="utf-8"))
    assert [fault for body in errors.values() for fault in faults(ErrorObject, body["error"])] == []
    events = bodies_of(GOLDEN / "responses_error.sse")
    assert [fault for event in events for fault in faults(ResponseStreamEvent, event)] == []


def test_errors_are_of_anthropics_type() -> None:
    """Of the words for a kind of error that the API documents, the SDK's type lacks that of a body too large."""
    from anthropic.types.shared import ErrorResponse

    errors = json.loads((GOLDEN / "anthropic_errors.json").read_text(encoding="utf-8"))
    known = [body for body in errors.values() if body["error"]["type"] != "request_too_large"]
    assert len(known) > 5
    assert [fault for body in known for fault in faults(ErrorResponse, body)] == []
    *_, last = bodies_of(GOLDEN / "anthropic_error.sse")
    assert faults(ErrorResponse, last) == []


def test_models_counts_and_listed_items_are_of_the_sdks_types() -> None:
    """The bodies that have no golden file."""
    from anthropic.types import MessageTokensCount, ModelInfo
    from anthropic.types.beta import BetaModelInfo
    from openai.types.responses.response_item_list import ResponseItemList

    from kvserve.protocols.fields import Fields

    card = encode_anthropic_model(ModelCard("org/first", 1_700_000_000, 131_072))
    assert faults(ModelInfo, card) == faults(BetaModelInfo, card) == []
    assert faults(MessageTokensCount, {"input_tokens": 3}) == []
    assert faults(ResponseItemList, list_items(input_items(Fields({"input": "Hello"}), ID), {})) == []


def test_a_missing_an_unknown_and_a_mistyped_field_are_faults() -> None:
    """What the tests above look for is found."""
    from openai.types.responses import ResponseStreamEvent
    from openai.types.shared import ErrorObject

    error = {"message": "m", "type": "t", "param": None, "code": None}
    assert faults(ErrorObject, error) == []
    assert faults(ErrorObject, {**error, "hint": "h"}) == [".hint: ErrorObject has no such field"]
    assert faults(ErrorObject, {**error, "message": 5}) != []
    assert faults(ErrorObject, {"type": "t"}) != []
    assert "Field required" in faults(ResponseStreamEvent, {"type": "response.completed", "sequence_number": 1})[0]
