"""The pages in which `/v1/responses/{id}/input_items` lists items. Knows the query's words and the list's form."""

from collections.abc import Mapping, Sequence

from kvserve.core import JsonObject
from kvserve.errors import BadRequest

MAX_LIMIT = 100
_DEFAULT_LIMIT = 20


def list_items(items: Sequence[JsonObject], query: Mapping[str, str]) -> dict[str, object]:
    """A page of `items` (oldest first): `order`, `limit` and `after` are as in the query. Raises BadRequest."""
    order, limit, after = query.get("order", "desc"), query.get("limit", str(_DEFAULT_LIMIT)), query.get("after")
    if order not in ("asc", "desc"):
        raise BadRequest('order: expected "asc" or "desc".', param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= MAX_LIMIT):
        raise BadRequest(f"limit: expected an integer from 1 to {MAX_LIMIT}.", param="limit")
    ordered = list(items) if order == "asc" else list(reversed(items))
    ids = [item.get("id") for item in ordered]
    if after is not None:
        if after not in ids:
            raise BadRequest(f"after: there is no item {after!r}.", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0].get("id") if page else None,
        "last_id": page[-1].get("id") if page else None,
        "has_more": len(page) < len(ordered),
    }
