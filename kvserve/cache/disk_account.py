"""What is on disk, over all models, and what is evicted: keeps the catalog true to the files, and the bounds of age and
size.

One thread at a time. Other servers share the folder: a file may go, and come back, at any time but within
`BlobStore.locked`. A blob counts as written once the catalog has its row. Where the catalog cannot be used now, the row
follows later: until then another server may evict the parents of that blob.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator

from kvserve.cache.disk_age import AgeClock
from kvserve.cache.disk_blob import BlobHead, BlobName, DamagedBlob, partition_of_first
from kvserve.cache.disk_catalog import Catalog, Listed, OpenCatalog, Victim
from kvserve.cache.disk_records import DiskLimits, Entry, Faults, Removal
from kvserve.cache.disk_scratch import BlobStore
from kvserve.cache.disk_store import StoredFile
from kvserve.cache.disk_trie import BlobTrie
from kvserve.cache.forget_users import IsForgotten

VICTIMS_AT_ONCE = 64
AUTO_MAX_BYTES = 500 * 10**9
AUTO_SHARE_OF_FREE = 0.2


class DiskAccount:
    """Catalog and files of a folder, as the server of one model sees them."""

    def __init__(self, store: BlobStore, index: BlobTrie, limits: DiskLimits, faults: Faults) -> None:
        self._store = store
        self._index = index
        self._limits = limits
        self._faults = faults
        self._clock = AgeClock(limits.ttl_seconds / 2)
        self._seen: set[tuple[str, BlobName]] = set()
        self.catalog = OpenCatalog(store.open_catalog, faults, self._seen.clear)  # a new one needs all rows again
        self._unlisted: list[Listed] = []
        self._touched: dict[BlobName, float] = {}
        self._users: dict[tuple[BlobName, str], int | None] = {}
        self.total_bytes = 0
        self.beside_bytes = 0
        self.max_bytes = 0
        self.num_evicted = 0

    # --- opening ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Find what is there, without reading a payload: rows of the catalog, and files without a row.

        Raises OSError where the folder cannot be read.
        """
        self._store.sweep()
        found = list(self._store.files())
        self._measure(found)
        files = {file.name: file for file in found if file.model == self._index.model}
        self._open_catalog()
        self._take_rows(files)
        self._adopt([file for name, file in files.items() if not self._index.is_known(name)])
        self._take_users()

    def _open_catalog(self) -> None:
        catalog = self.catalog.open()
        self._tick()
        if catalog is not None and catalog.fault is not None and self.total_bytes:  # an empty folder needs none
            self._faults.add("index", catalog.fault)

    def _tick(self) -> None:
        """Take the later of the catalog's time and ours, and write it down."""
        self.catalog.do(lambda catalog: catalog.set_clock(self._clock.tick(catalog.clock())))

    def _take_rows(self, files: dict[BlobName, StoredFile]) -> None:
        """Adopt the rows that agree with their own names and whose file is there."""
        false, missing = list[tuple[str, BlobName]](), set[tuple[str, BlobName]]()
        now, model = self._clock.now(), self._index.model
        for row in self.catalog.ask(lambda catalog: list(catalog.listed(model))) or ():
            if not isinstance(row, Listed):
                self._faults.add("index", "a row contradicts its name")
                false.append((model, row))
            elif row.head.name not in files:
                missing.add((model, row.head.name))
            elif self._index.adopt(row.head, files[row.head.name].num_bytes) and row.used_at > now:
                self._touched[row.head.name] = now
        if false:
            self.catalog.do(Catalog.drop, false)
        for _, name in self._drop_missing(missing):
            self._faults.add("missing", name)

    def _take_users(self) -> None:
        """Read the users of the blobs from the catalog."""
        for name, user, depth in self.catalog.ask(lambda catalog: list(catalog.users(self._index.model))) or ():
            self._index.add_user(name, user, depth)

    def _adopt(self, files: Iterable[StoredFile]) -> None:
        """Adopt files without a row: the last ones before a crash, or all where the catalog is new."""
        heads = [(head, file) for file in files if (head := self._head_of(file)) is not None]
        for head, file in sorted(heads, key=lambda pair: (pair[0].tokens.start, pair[0].kind != "segment")):
            if file.model == self._index.model:
                self._index.adopt(head, file.num_bytes)
            self._unlisted.append(Listed(head, file.num_bytes, self._clock.of_file(file.written_at)))

    def _head_of(self, file: StoredFile) -> BlobHead | None:
        """A file's head; a damaged file, or one in another model's folder, is deleted."""
        try:
            head = self._store.read_head(file)
            if head.model == file.model:
                return head
            raise DamagedBlob("it belongs to another model")
        except DamagedBlob as error:
            self._faults.add("damaged", f"{file.name}: {error}")
            self._delete(file.model, file.name)
        except FileNotFoundError:
            self._faults.add("missing", file.name)
        except OSError as error:
            self._faults.add("unreadable", error)
        return None

    def reconcile(self) -> None:
        """Bring index and catalog up to date with the files of all models and servers, then apply the bounds."""
        before = self._index.written()
        try:
            self._store.sweep()
            files = {(file.model, file.name): file for file in self._store.files()}
            missing = [each for each in before if not self._is_there(each.name, files)]
        except OSError as error:
            self._faults.add("unreadable", error)
            return
        self._measure(files.values())
        for entry in missing:
            if self._index.forget_entry(entry):
                self._faults.add("missing", entry.name)
        self._seen.intersection_update(files.keys())  # the same set, which the catalog empties: `&=` makes another one
        self.commit()
        known = self.catalog.ask(Catalog.names)
        if known is not None:
            self._drop_missing(known - files.keys())
            if news := [file for key, file in files.items() if self._is_news(key, known)]:
                self._adopt(news)
                self._take_users()  # another server wrote them
        self.commit()
        self._tick()
        self.expire()
        self.make_room(0)

    def _drop_missing(self, keys: Collection[tuple[str, BlobName]]) -> list[tuple[str, BlobName]]:
        """Drop the rows whose files are still not there; returns them."""
        if not keys:
            return []
        try:
            with self._store.locked():
                gone = [key for key in keys if not self._store.has(*key)]
                self.catalog.do(Catalog.drop, gone)
        except OSError as error:
            self._faults.add("unreadable", error)
            return []
        return gone

    def _is_there(self, name: BlobName, files: Collection[tuple[str, BlobName]]) -> bool:
        """Whether a blob of this model has a file; a walk may miss one that was replaced meanwhile."""
        return (self._index.model, name) in files or self._store.has(self._index.model, name)

    def _is_news(self, key: tuple[str, BlobName], known: set[tuple[str, BlobName]]) -> bool:
        """Whether a file is not known yet. One that found no place once is not tried again."""
        if key in self._seen:
            return False
        is_own = key[0] == self._index.model
        is_news = key not in known or (is_own and not self._index.is_known(key[1]))
        if is_news:
            self._seen.add(key)
        return is_news

    def _measure(self, files: Iterable[StoredFile]) -> None:
        """Measure how much there is, and how much there may be."""
        self.total_bytes = sum(file.num_bytes for file in files)
        self._look_beside()
        self.max_bytes = self._limits.max_bytes or self._auto_max_bytes()

    def _look_beside(self) -> None:
        """Measure what other files take of the cap; the old figure stays where that fails."""
        with contextlib.suppress(OSError):
            self.beside_bytes = self._store.beside_bytes()

    def _fits(self, num_bytes: int) -> bool:
        return self.total_bytes + self.beside_bytes + num_bytes <= self.max_bytes

    def _auto_max_bytes(self) -> int:
        """A share of what would be free without this cache."""
        try:
            free = self._store.free_bytes() + self.total_bytes + self.beside_bytes
        except OSError:
            return AUTO_MAX_BYTES
        return min(AUTO_MAX_BYTES, int(free * AUTO_SHARE_OF_FREE))

    # --- writing down -------------------------------------------------------------------------------------------------

    def wrote(self, head: BlobHead, num_bytes: int, above: Iterable[BlobName]) -> bool:
        """Put a written blob into the catalog. Its ancestors `above` count as used now, so none is evicted before it.
        False where another server has evicted it or its parent meanwhile: then it is of no use. Raises OSError."""
        now = self._clock.now()
        with self._store.locked():
            needed = [BlobName(each) for each in (head.parent, head.base) if partition_of_first(each) is None]
            if gone := [each for each in needed if not self._store.has(head.model, each)]:
                for each in gone:
                    self._index.forget_written(each)
                self._delete(head.model, head.name)
                return False
            if not self._store.has(head.model, head.name):
                return False
            self.total_bytes += num_bytes
            self._unlisted.append(Listed(head, num_bytes, now))
            self._touched.update(dict.fromkeys(above, now))
            self._put_down()
        return True

    def used(self, names: Iterable[BlobName]) -> None:
        """Blobs were used now."""
        self._touched.update(dict.fromkeys(names, self._clock.now()))

    def commit(self) -> bool:
        """Write what happened since the last time into the catalog. What cannot be written now waits for the next."""
        if not self.catalog.is_open:
            self._open_catalog()
        self._users |= self._index.take_uses()
        if not self._put_down():
            return False
        self._look_beside()  # the catalog's file has grown
        return True

    def _put_down(self) -> bool:
        """Write new blobs and uses."""
        news = self._unlisted, self._index.model, self._touched, self._users
        if (self._unlisted or self._touched or self._users) and not self.catalog.do(Catalog.put, *news):
            return False
        self._unlisted, self._touched, self._users = [], {}, {}
        return True

    # --- bounds -------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Evict what was not used for too long."""
        moment = self._clock.now() - self._limits.ttl_seconds
        for victim in self.catalog.ask(Catalog.unused_since, moment) or ():
            self._evict(victim)

    def make_room(self, num_bytes: int, keep: Collection[BlobName] = ()) -> bool:
        """Evict the oldest, but none of `keep`, until so many bytes more fit under the cap. Whether they do."""
        if self._fits(num_bytes):
            return True
        for victim in self._victims():
            if victim.name not in keep:
                self._evict(victim)
            if self._fits(num_bytes):
                return True
        return False

    def _victims(self) -> Iterator[Victim]:
        """Blobs in the order of eviction, each once: least recently used first."""
        seen: set[BlobName] = set()
        while self.total_bytes and self.commit():
            oldest = self.catalog.ask(Catalog.least_recent, len(seen) + VICTIMS_AT_ONCE) or ()
            fresh = [victim for victim in oldest if victim.name not in seen]
            if not fresh:
                return
            seen |= {victim.name for victim in fresh}
            yield from fresh

    def _evict(self, victim: Victim) -> None:
        """Evict a blob with its descendants, if it was not used since it was chosen. Rows go first: a crash in between
        leaves files, which are found again. Of the files descendants go first: none is left without its parent."""
        try:
            with self._store.locked():
                if self.catalog.ask(Catalog.used_at, victim) == victim.used_at:
                    self._evict_now(victim)
        except OSError as error:
            self._faults.add("unwritable", error)

    def _evict_now(self, victim: Victim) -> None:
        gone = self.catalog.ask(Catalog.with_descendants, victim) or [victim]
        self.catalog.do(Catalog.drop, [(each.model, each.name) for each in gone])
        for each in reversed(gone):
            if each.model == self._index.model:
                self._index.forget_written(each.name)
            if self._delete(each.model, each.name):
                self.total_bytes -= each.num_bytes
                self.num_evicted += 1

    def discard(self, entry: Entry) -> None:
        """Delete a useless blob and its descendants. A new blob of the same name keeps its file, or will write it."""
        self.commit()
        gone = self._index.forget_entry(entry)
        if gone or not self._index.is_known(entry.name):
            self.remove({entry.name, *gone})

    def take_back(self, name: BlobName) -> None:
        """Delete the file of a forgotten blob, unless another server's blob has it as its parent."""
        victim = Victim(self._index.model, name, 0, 0.0)
        try:
            with self._store.locked():
                if len(self.catalog.ask(Catalog.with_descendants, victim) or ()) <= 1:
                    self.remove([name])
        except OSError as error:
            self._faults.add("unwritable", error)

    def remove(self, gone: Collection[BlobName]) -> None:
        """Delete files of this model that the index has no more."""
        self.catalog.do(Catalog.drop, [(self._index.model, each) for each in gone])
        for each in gone:
            self._delete(self._index.model, each)

    def forget(self, is_forgotten: IsForgotten) -> Removal:
        """Forget users of this model, and delete the blobs that no other user needs."""
        self.reconcile()  # a file without a row has no known user; it has a row from here on
        model, unused, is_done = self._index.model, self._index.forget_users(is_forgotten), self.commit()
        gone, users = [name for name in unused.names if not self._index.is_known(name)], unused.users
        listed = self.catalog.ask(Catalog.unused, model, is_forgotten)
        if listed is not None:  # the index has no place for a blob that lost its parent, nor for a second state
            gone += [name for name in listed.names if (model, name) in self._seen and self._index.head_of(name) is None]
            users = (*users, *listed.users)
        self.total_bytes -= unused.num_bytes
        return Removal(unused.num_bytes, is_done & self._delete_blobs(model, gone, users))

    def forget_of_others(self, is_forgotten: IsForgotten) -> Removal:
        """The same for models that are not loaded here: the catalog knows who used their blobs."""
        listed = self.catalog.ask(Catalog.names)
        if listed is None:
            return Removal(0, is_done=False)
        num_bytes, is_done = 0, True
        for model in sorted({model for model, _ in listed} - {self._index.model}):
            unused = self.catalog.ask(Catalog.unused, model, is_forgotten)
            is_done &= unused is not None and self._delete_blobs(model, unused.names, unused.users)
            num_bytes += unused.num_bytes if unused is not None else 0
        self.total_bytes -= num_bytes
        return Removal(num_bytes, is_done)

    def _delete_blobs(self, model: str, names: Collection[BlobName], users: Collection[str]) -> bool:
        """Delete blobs; whether all are gone. Files first: another server adopts a file without a row."""
        is_done = all([self._delete(model, name) is not None for name in names])
        is_done &= self.catalog.do(Catalog.drop, [(model, name) for name in names])
        return is_done & self.catalog.do(Catalog.forget_users, model, users)

    def clear(self) -> None:
        """Delete everything of this model."""
        self._index.clear()
        self._unlisted, self._touched, self._users = [], {}, {}
        try:
            gone = [file for file in self._store.files() if file.model == self._index.model]
        except OSError as error:
            self._faults.add("unreadable", error)
            return
        self.catalog.do(Catalog.drop, [(file.model, file.name) for file in gone])
        for file in gone:
            if self._delete(file.model, file.name):
                self.total_bytes -= file.num_bytes

    def close(self) -> None:
        """Write what is left and close the catalog."""
        self.commit()
        self._tick()
        self.catalog.close()

    def _delete(self, model: str, name: BlobName) -> bool | None:
        """Whether a file was there and is deleted now; None where that failed. A later file of this name is new."""
        self._seen.discard((model, name))
        try:
            return self._store.delete(model, name)
        except OSError as error:
            self._faults.add("unwritable", error)
            return None
