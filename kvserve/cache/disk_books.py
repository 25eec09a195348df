"""The books of a folder as far as they can be had: what is locked or broken costs order and speed, never a blob."""

import sqlite3
from collections.abc import Callable

from kvserve.cache.disk_catalog import Catalog, is_passing
from kvserve.cache.disk_faults import Faults
from kvserve.cache.disk_store import BlobStore


class OpenBooks:
    """Asks and changes the books, and says of each time whether that could be. `begin_anew` is called where they had to
    be emptied. Used by one thread at a time."""

    def __init__(self, store: BlobStore, faults: Faults, begin_anew: Callable[[], None]) -> None:
        self._store = store
        self._faults = faults
        self._begin_anew = begin_anew
        self._books: Catalog | None = None

    @property
    def is_open(self) -> bool:
        """Whether they can be asked."""
        return self._books is not None

    def open(self) -> Catalog | None:
        """Open them, if they are not; None where that cannot be now."""
        if self._books is None:
            try:
                self._books = self._store.open_books()
            except (sqlite3.Error, OSError) as error:
                self._faults.add("index", error)
        return self._books

    def do(self, change: Callable[[Catalog], None]) -> bool:
        """Change them; whether that could be."""

        def done(books: Catalog) -> bool:
            change(books)
            return True

        return self.ask(done) is not None

    def ask[T](self, question: Callable[[Catalog], T]) -> T | None:
        """Ask them; None where they cannot be used."""
        if self._books is None:
            return None
        try:
            return question(self._books)
        except sqlite3.Error as error:
            if is_passing(error):
                self._faults.add("index", error)
            else:
                self._broken(error)
            return None

    def _broken(self, error: sqlite3.Error) -> None:
        """Begin with empty ones; `Ledger.settle` puts the files into them again."""
        self._faults.add("index", error)
        try:
            self._begin_anew()
            if self._books is not None:
                self._books.reset()
        except (sqlite3.Error, OSError) as again:
            self._faults.add("index", again)
            self._books = None

    def close(self) -> None:
        """They may be opened again."""
        if self._books is not None:
            self._books.close()
            self._books = None
