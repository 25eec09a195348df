"""Model lists as Anthropic writes them: entries, pages, and what the SDK reads of them."""

import json
from typing import Any

import httpx2
import pytest

from kvserve.errors import BadRequest
from kvserve.protocols.model_cards import ModelCard, encode_anthropic_model, encode_anthropic_model_list

CARDS = [ModelCard("org/first", 1_700_000_000, 131_072), ModelCard("short", 1_700_000_001, alias_of="org/first")]
MANY = [ModelCard(f"m{number}", 0) for number in range(7)]


def test_a_model_has_its_wire_form() -> None:
    """An alias is shown as the model that it stands for; what is not known is null."""
    assert encode_anthropic_model(CARDS[0]) == {
        "type": "model",
        "id": "org/first",
        "display_name": "org/first",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": 131_072,
        "max_tokens": 131_072,
    }
    alias = encode_anthropic_model(CARDS[1])
    assert (alias["id"], alias["display_name"], alias["max_tokens"]) == ("short", "org/first", None)


def test_the_sdk_reads_all_pages() -> None:
    """Page after page in the order given, and one model by its name."""
    from anthropic import Anthropic

    def serve(request: httpx2.Request) -> httpx2.Response:
        assert request.headers["anthropic-version"]
        name = request.url.path.partition("/v1/models/")[2]
        if name:
            return httpx2.Response(200, json=encode_anthropic_model(next(card for card in MANY if card.name == name)))
        return httpx2.Response(200, json=encode_anthropic_model_list(MANY, dict(request.url.params)))

    with Anthropic(api_key="any", http_client=httpx2.Client(transport=httpx2.MockTransport(serve))) as client:
        assert [model.id for model in client.models.list(limit=3)] == [card.name for card in MANY]
        assert client.models.retrieve("m3").id == "m3"


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ({}, "0123456", False),
        ({"limit": "3"}, "012", True),
        ({"limit": "3", "after_id": "m2"}, "345", True),
        ({"after_id": "m6"}, "", False),
        ({"limit": "2", "before_id": "m4"}, "23", True),
        ({"before_id": "m2"}, "01", False),
    ],
)
def test_pages(query: dict[str, str], names: str, has_more: bool) -> None:
    """`after_id` goes forwards, `before_id` backwards; both ends of the page are named."""
    page: Any = encode_anthropic_model_list(MANY, query)
    ids = [f"m{name}" for name in names]
    assert [entry["id"] for entry in page["data"]] == ids
    assert (page["has_more"], page["first_id"], page["last_id"]) == (
        has_more,
        ids[0] if ids else None,
        ids[-1] if ids else None,
    )
    assert json.loads(json.dumps(page)) == page


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"limit": "²"}, {"after_id": "x"}, {"before_id": ""}]
)
def test_a_wrong_query_is_named(query: dict[str, str]) -> None:
    """By its word."""
    with pytest.raises(BadRequest) as raised:
        encode_anthropic_model_list(MANY, query)
    assert raised.value.param in query
