"""The catalog and a plain dict: the same answers, whatever is put down, touched and dropped."""

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvserve.cache.disk_blob import BlobHead, BlobName
from kvserve.cache.disk_catalog import Catalog, Listed, Victim, is_passing
from kvserve.cache.token_run import pack
from kvserve.core import ImageSpan, TokenSequence
from tests.laws import num_examples

ROOT = BlobHead("m", "segment", "", pack(TokenSequence((1, 2, 3), (ImageSpan(1, 2, "cat"),))), "system")
CHILD = BlobHead("m", "segment", ROOT.name, pack(TokenSequence((1, 2, 3, 4)), 3), "user")
STATE = BlobHead("m", "checkpoint", CHILD.name, pack(TokenSequence((1, 2, 3, 4)), 4), "tail")
OTHER = BlobHead("n", "segment", "", pack(TokenSequence((1, 2, 3))), "stride")
NEXT = BlobHead("m", "checkpoint", CHILD.name, pack(TokenSequence((1, 2, 3, 4, 5)), 5), "answer", STATE.name)
HEADS = (ROOT, CHILD, STATE, NEXT, OTHER)

steps = st.lists(
    st.tuples(st.sampled_from(["put", "touch", "drop"]), st.sampled_from(HEADS), st.integers(0, 5)), max_size=20
)


class PlainCatalog:
    """What the catalog are to say, by a dict."""

    def __init__(self) -> None:
        self._blobs: dict[tuple[str, BlobName], Listed] = {}

    def listed(self, model: str) -> Iterator[Listed]:
        own = (blob for blob in self._blobs.values() if blob.head.model == model)
        return iter(sorted(own, key=lambda blob: blob.head.tokens.start))

    def names(self) -> set[tuple[str, BlobName]]:
        return set(self._blobs)

    def unused_since(self, moment: float) -> list[Victim]:
        return [_victim(blob) for blob in self._blobs.values() if blob.used_at < moment]

    def least_recent(self, limit: int) -> list[Victim]:
        def rank(blob: Listed) -> tuple[float, int, str, str]:
            return blob.used_at, -blob.head.tokens.start, blob.head.kind, blob.head.name

        return [_victim(blob) for blob in sorted(self._blobs.values(), key=rank)[:limit]]

    def with_descendants(self, victim: Victim) -> list[Victim]:
        found = [victim]
        for above in found:  # grows while it is walked over
            blobs = self._blobs.values()
            standing = (_victim(each) for each in blobs if above.name in (each.head.parent, each.head.base))
            found += [each for each in standing if each not in found]
        return found

    def put(self, blobs: Iterable[Listed], model: str, used_at: Mapping[BlobName, float], _: object) -> None:
        for blob in blobs:
            key = (blob.head.model, blob.head.name)
            youngest = max(blob.used_at, self._blobs[key].used_at) if key in self._blobs else blob.used_at
            self._blobs[key] = Listed(blob.head, blob.num_bytes, youngest)
        for name, moment in used_at.items():
            if (blob := self._blobs.get((model, name))) is not None:
                self._blobs[model, name] = Listed(blob.head, blob.num_bytes, moment)

    def drop(self, blobs: Collection[tuple[str, BlobName]]) -> None:
        for key in blobs:
            self._blobs.pop(key, None)


def _victim(blob: Listed) -> Victim:
    return Victim(blob.head.model, blob.head.name, blob.num_bytes, blob.used_at)


def answers(catalog: Catalog | PlainCatalog) -> object:
    """All that can be asked."""
    listed = [
        [row if isinstance(row, str) else (row.head, row.num_bytes, row.used_at) for row in catalog.listed(model)]
        for model in "mn"
    ]
    victims = [victim for limit in (1, 9) for victim in catalog.least_recent(limit)]
    families = [sorted(each.name for each in catalog.with_descendants(victim)) for victim in victims]
    old = sorted(victim.name for victim in catalog.unused_since(3.0))
    return listed, catalog.names(), [victim.name for victim in victims], families, old


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=num_examples(30))
@given(steps)
def test_the_books_say_what_a_dict_says(tmp_path: Path, todo: list[tuple[str, BlobHead, int]]) -> None:
    """Also after the file was closed and opened again."""
    for path in tmp_path.iterdir():
        path.unlink()
    file, plain = Catalog(tmp_path / "index.sqlite"), PlainCatalog()
    for action, head, number in todo:
        for catalog in (file, plain):
            if action == "put":
                catalog.put([Listed(head, number, float(number))], head.model, {}, {})
            elif action == "touch":
                catalog.put([], head.model, {head.name: float(number)}, {})
            else:
                catalog.drop([(head.model, head.name)])
    file.close()
    again = Catalog(tmp_path / "index.sqlite")
    assert answers(again) == answers(plain)
    again.close()


def test_books_in_ram_are_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say the same, and end with their connection."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        catalog = Catalog(None)
        assert catalog.names() == set()
        catalog.put([Listed(head, 1, 2.0) for head in HEADS], "m", {}, {})
        plain = PlainCatalog()
        plain.put([Listed(head, 1, 2.0) for head in HEADS], "m", {}, {})
        assert answers(catalog) == answers(plain)
        catalog.reset()
        assert catalog.names() == set() and list(tmp_path.iterdir()) == []
        catalog.put([Listed(ROOT, 1, 2.0)], "m", {}, {})
        catalog.close()


def test_rates_outlive_the_process(tmp_path: Path) -> None:
    """What was measured once is known the next time."""
    catalog = Catalog(tmp_path / "index.sqlite")
    assert catalog.rate("read") is None
    catalog.set_rate("read", 5.5)
    catalog.close()
    catalog = Catalog(tmp_path / "index.sqlite")
    assert catalog.rate("read") == 5.5
    catalog.close()


def test_a_lock_is_told_from_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A held index is not thrown away; rubbish is."""
    monkeypatch.setattr("kvserve.cache.disk_catalog.BUSY_SECONDS", 0.01)
    catalog = Catalog(tmp_path / "index.sqlite")
    catalog.put([Listed(ROOT, 1, 1.0)], "m", {}, {})
    holder = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError) as raised:
        catalog.put([Listed(CHILD, 1, 1.0)], "m", {}, {})
    assert is_passing(raised.value)
    holder.close()
    assert catalog.names() == {("m", ROOT.name)}
    catalog.close()
    assert not is_passing(sqlite3.DatabaseError("malformed"))
    (tmp_path / "index.sqlite").write_bytes(b"rubbish" * 999)
    catalog = Catalog(tmp_path / "index.sqlite")
    assert catalog.names() == set()
    catalog.close()


def test_an_index_whose_tables_have_broken_names_is_made_anew(tmp_path: Path) -> None:
    """SQLite complains with the name, which is no text any more."""
    path = tmp_path / "index.sqlite"
    Catalog(path).close()
    path.write_bytes(path.read_bytes().replace(b"clock", b"cl\xefck", 1))
    catalog = Catalog(path)
    assert catalog.fault and catalog.fault != "there is none" and catalog.names() == set()
    catalog.close()
