"""What goes with those who are forgotten of models that nobody has loaded: known by the books alone, as no trie of it
is in memory. It touches no file.
"""

from collections import defaultdict
from dataclasses import dataclass

from kvserve.cache.disk_blob import BlobName
from kvserve.cache.disk_catalog import Catalog, Listed
from kvserve.cache.forgetting import IsForgotten, is_needed, remaining


@dataclass(frozen=True, slots=True)
class UnusedOfModel:
    """Of a model what nobody needs once these users are forgotten: blobs, and their bytes as far as they are known."""

    model: str
    names: tuple[BlobName, ...]
    users: tuple[str, ...]
    num_bytes: int


def models_but(books: Catalog, own: str) -> list[str]:
    """The other models that something is listed of. May raise sqlite3.Error."""
    return sorted({model for model, _ in books.names()} - {own})


def unused_of_model(books: Catalog, model: str, is_forgotten: IsForgotten) -> UnusedOfModel:
    """The blobs with tokens that only these users are known to have used, or nobody, and what stands on them: nobody
    can read what others have there and write it anew, as is done for the model that is loaded. A row that contradicts
    its own name goes too. May raise sqlite3.Error."""
    depths: defaultdict[BlobName, dict[str, int]] = defaultdict(dict)
    for name, user, depth in books.users(model):
        depths[name][user] = depth
    users = {user for of_blob in depths.values() for user in of_blob if is_forgotten(user)}
    doomed: dict[str, int] = {}
    for row in books.listed(model):  # parents before children
        if not isinstance(row, Listed):
            doomed[row] = 0
            continue
        others = remaining(depths[row.head.name], users.__contains__)
        if row.head.parent in doomed or row.head.base in doomed or not is_needed(others, row.head.tokens.end):
            doomed[row.head.name] = row.num_bytes
    return UnusedOfModel(model, tuple(map(BlobName, doomed)), tuple(sorted(users)), sum(doomed.values()))
