"""Which prefixes of one model are on disk: a trie of blobs in memory, every token compared. It touches no file.

    blob A [0, 40) ---- blob C [40, 64)         a blob begins at a position inside its parent, so a branch in the middle
             `---- blob B [24, 31)              of a written blob rewrites nothing

A blob is known before it is written, so that none is written twice; it is on disk once it is confirmed. Any thread may
call any method.
"""

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvserve.cache.block_hash import BlockHasher, HashChain
from kvserve.cache.disk_blob import BlobHead, BlobKind, BlobName, parent_of_first, partition_of_first
from kvserve.cache.disk_paths import Aliases, BlobPaths, SharedPrefix, hashes_at, serving_only, shared_prefixes
from kvserve.cache.disk_records import DiskUses, Entry, Found, Unused
from kvserve.cache.forget_users import IsForgotten, is_needed, remaining
from kvserve.cache.node import Node, Position, note_use
from kvserve.cache.records import BoundaryKind, Checkpoint, Copy, RecordId, Segment
from kvserve.cache.token_run import TokenRun

NUM_TOUCHED_CHECKPOINTS = 2
"""Of a path's states, the deepest ones that a request could start from count as used; the others age and are evicted
first."""


class BlobTrie:
    """All blobs of one model, by prefix. `model` is the name of its folder."""

    def __init__(self, hasher: BlockHasher, model: str) -> None:
        self.model = model
        self._hasher = hasher
        self._lock = threading.RLock()
        self._paths = BlobPaths()
        self._trie, self._entries = self._paths.trie, self._paths.entries
        self._by_name: dict[BlobName, Entry] = {}
        self._next_id = 0
        self._num_written: Counter[BlobKind] = Counter()
        self._num_bytes = 0
        self._uses = DiskUses()
        self._marked_deleted: set[BlobName] = set()
        self._aliases = Aliases(self._trie)

    def is_known(self, name: BlobName) -> bool:
        return name in self._by_name

    # --- finding ------------------------------------------------------------------------------------------------------

    def find(self, run: TokenRun, chain: HashChain, above: Sequence[Copy] = ()) -> Found:
        """The longest known prefix of `run`, whose block hashes are `chain`. A run that does not begin at 0 follows on
        tokens that are in `above`, which are not among the steps; where those are forgotten the depth is 0."""
        with self._lock:
            position = self._paths.find(run, chain, above)
            return Found(position.depth, tuple(self._paths.steps(position, run.start)))

    def state_behind(self, rows: Sequence[Copy], end: int) -> tuple[Entry | None, int]:
        """The last state before `end`, and how many tokens are between, at least; None where it is far above. The last
        tokens before `end` are in one of `rows`."""
        with self._lock:
            if (position := self._paths.inside(rows, end)) is None:
                return None, end
            state, offset = self._paths.last_state(position, end)
            return state, end - offset

    def restored_names(self, rows: Sequence[Copy], end: int) -> list[BlobName]:
        """The blobs that a request uses which starts from `end` tokens, the last of which are in one of `rows`: all
        segments, the newest states, and the state at the end of system and tools, which branches share."""
        with self._lock:
            position = self._paths.inside(rows, end)
            steps = list(self._paths.steps(position)) if position is not None else []
            aliases = {name for step in steps for name in self._aliases.parents(step.segment.head.parent)}
        states = [step.checkpoint for step in reversed(steps) if step.checkpoint is not None]
        used = [state for place, state in enumerate(states) if place < NUM_TOUCHED_CHECKPOINTS or state.is_anchor]
        chains = (each for state in used for each in state.chain)
        return [*aliases, *(entry.name for entry in (*(step.segment for step in steps), *chains))]

    def partitions(self) -> list[str]:
        """The partitions that hold something, or were asked for."""
        with self._lock:
            return [root.partition for root in self._trie.roots()]

    # --- adding -------------------------------------------------------------------------------------------------------

    def add_segment(
        self, run: TokenRun, chain: HashChain, start: int, end: int, kind: BoundaryKind, above: Sequence[Copy] = ()
    ) -> Entry | None:
        """Add `[start, end)` of a prefix; None where it is known already, or what precedes it is not. The tokens before
        `start` are in `above`; without it they are looked for."""
        with self._lock:
            part = run.part(start if above else run.start, end)
            position = self._paths.find(part, chain, above)
            if position.depth != start or start >= end:
                return None
            head = self._head("segment", position, run.part(start, end), kind)
            return self._attach(position, head, chain.between(start, end))

    def add_checkpoint(
        self,
        run: TokenRun,
        chain: HashChain,
        offset: int,
        kind: BoundaryKind,
        above: Sequence[Copy] = (),
        base: Entry | None = None,
    ) -> Entry | None:
        """Add the state behind `offset` tokens; None where it is known already, or the tokens are not, or the state
        `base`, whose windows it continues, is forgotten. The tokens are in `above`; without it they are looked for."""
        with self._lock:
            position = self._paths.find(run.part(offset if above else run.start, offset), chain, above)
            if position.depth != offset or offset == 0:
                return None
            head = self._head("checkpoint", position, TokenRun(offset, b""), kind)
            entry = self._stand(position, replace(head, base=base.name) if base is not None else head)
            if entry is not None:
                self._note_who_passed(entry, position)
            return entry

    def _note_who_passed(self, state: Entry, position: Position) -> None:
        """A new state is used by everybody whose requests came as far as it stands, whoever wrote it."""
        for user, depth in self._paths.entry_of(position.node).users.items():
            if depth >= position.depth:
                self._uses.note(state, user, position.depth)

    def adopt(self, head: BlobHead, num_bytes: int) -> bool:
        """Add a blob that is on disk. False where its parent is not known, the same tokens are known already, or it is
        marked deleted."""
        with self._lock:
            position = self._place(head)
            is_taken = head.name in self._by_name or head.name in self._marked_deleted
            if position is None or is_taken or head.model != self.model:
                return False
            adopted = self._stand if head.kind == "checkpoint" else self._adopt_rows
            entry = adopted(position, head)
            if entry is not None:
                self._count(entry, num_bytes)
            return entry is not None

    def _adopt_rows(self, position: Position, head: BlobHead) -> Entry | None:
        """Add the tokens of a segment that are not known from others."""
        end = self._trie.walk(position, head.tokens, head.tokens.end)
        entry, is_whole = None, False
        if end.depth < head.tokens.end:
            rest = head.tokens.part(end.depth, head.tokens.end)
            entry = self._attach(end, head, hashes_at(self._hasher, end, rest))
            [node] = self._trie.holders[entry.record_id]
            end, is_whole = Position(node, head.tokens.end), node.start == head.tokens.start
        if not is_whole:
            self._aliases.add(head, end)
        return entry

    def confirm(self, entry: Entry, num_bytes: int) -> bool:
        """Note that a blob is on disk. False if it was forgotten meanwhile."""
        with self._lock:
            if not entry.is_forgotten:
                self._count(entry, num_bytes)
            return not entry.is_forgotten

    def _count(self, entry: Entry, num_bytes: int) -> None:
        entry.num_bytes, entry.is_written = num_bytes, True
        self._num_written[entry.head.kind] += 1
        self._num_bytes += num_bytes

    def _head(self, kind: BlobKind, position: Position, tokens: TokenRun, boundary: BoundaryKind) -> BlobHead:
        is_first = position.node.parent is None
        parent = parent_of_first(position.node.partition) if is_first else self._paths.entry_of(position.node).name
        return BlobHead(self.model, kind, parent, tokens, boundary)

    def _attach(self, position: Position, head: BlobHead, hashes: tuple[bytes, ...]) -> Entry:
        """Add a segment, whose tokens from its position on are new."""
        self._split_at(position)
        entry = self._new_entry(head)
        _, entry.state_end = self._paths.last_state(position, position.depth + 1)
        tokens = head.tokens.part(position.depth, head.tokens.end)
        self._trie.attach(position.node, Segment(entry.record_id, tokens, 0), hashes)
        return entry

    def _stand(self, position: Position, head: BlobHead) -> Entry | None:
        self._split_at(position)
        base = self._base(head)
        if position.node.checkpoint is not None:
            self._aliases.add(head, position)
        if position.node.checkpoint is not None or position.node.parent is None or (head.base and base is None):
            return None
        entry = self._new_entry(head)
        if base is not None:
            entry.base = base
            base.leaning.append(entry)
        position.node.checkpoint = Checkpoint(entry.record_id, head.tokens.start, 0, head.boundary)
        return entry

    def _base(self, head: BlobHead) -> Entry | None:
        """The state whose windows this one continues, or another server's at the same position."""
        known = self._by_name.get(BlobName(head.base))
        if known is None and (place := self._aliases.state_place(head.base)) is not None and place.node.checkpoint:
            return self._entries[place.node.checkpoint.record_id] if place.depth == place.node.end else None
        return known

    def _split_at(self, position: Position) -> None:
        if position.node.start < position.depth < position.node.end:
            self._trie.split(position.node, position.depth, self._hasher.block_size)

    def _new_entry(self, head: BlobHead) -> Entry:
        self._next_id += 1
        entry = Entry(RecordId(self._next_id), head)
        self._entries[entry.record_id] = self._by_name[head.name] = entry
        self._marked_deleted.discard(head.name)
        return entry

    def _place(self, head: BlobHead) -> Position | None:
        """The position where a blob begins: at the root, or inside its parent."""
        offset = head.tokens.start
        if (partition := partition_of_first(head.parent)) is not None:
            return Position(self._trie.root(partition), 0) if offset == 0 and head.kind == "segment" else None
        name = BlobName(head.parent)
        parent = self._by_name.get(name)
        found = self._paths.inside([parent], offset) if parent is not None else None
        return found or self._aliases.place(name, offset)

    def written(self) -> list[Entry]:
        """All blobs that are on disk, as far as is known."""
        with self._lock:
            return [entry for entry in self._entries.values() if entry.is_written]

    def ancestors(self, entry: Entry) -> set[BlobName]:
        """The segments above a blob, and the states whose windows it continues."""
        with self._lock:
            found, head = {each.name for each in entry.chain[:-1]}, self.head_of(entry.head.parent)
            while head is not None:
                found.add(head.name)
                head = self.head_of(head.parent)
            return found

    def head_of(self, name: str) -> BlobHead | None:
        """The head of a blob or alias."""
        entry = self._by_name.get(BlobName(name))
        return entry.head if entry is not None else self._aliases.head(name)

    def entry_of(self, name: str) -> Entry | None:
        """A blob that serves requests; an alias does not."""
        return self._by_name.get(BlobName(name))

    # --- users --------------------------------------------------------------------------------------------------------

    def use(
        self,
        run: TokenRun,
        chain: HashChain,
        users: Mapping[str, int],
        above: Sequence[Copy] = (),
        num_told_tokens: int = 0,
    ) -> bool:
        """Note users of a prefix, each up to an offset; of its first `num_told_tokens` they were noted before. Whether
        any use is new."""
        with self._lock:
            for step in self._paths.steps(self._paths.find(run, chain, above), num_told_tokens):
                for user, depth in users.items():
                    if depth > step.start:
                        self._uses.note(step.segment, user, min(depth, step.end))
                    if step.checkpoint is not None and depth >= step.end:
                        self._uses.note(step.checkpoint, user, step.end)
            return self._uses.are_new

    def take_uses(self) -> dict[tuple[BlobName, str], int | None]:
        """New uses since the last call: (blob, user) -> how far it came; None where the user was dropped."""
        with self._lock:
            return self._uses.take()

    def add_user(self, name: BlobName, user: str, depth: int) -> None:
        """Add a user that the catalog has of a blob; nothing where the blob is not known."""
        with self._lock:
            if (entry := self._by_name.get(name)) is not None:
                note_use(entry.users, user, depth)

    def shared_prefixes(self, is_forgotten: IsForgotten) -> list[SharedPrefix]:
        """The prefixes that others used and would lose with these users' blobs."""
        with self._lock:
            return shared_prefixes(self._trie, lambda node: self._paths.entry_of(node).users, is_forgotten)

    def forget_users(self, is_forgotten: IsForgotten) -> Unused:
        """Forget the blobs with tokens that only these users, or no known user, have used, and their descendants; and
        these users of all other blobs."""
        with self._lock:
            users = {user for entry in self._by_name.values() for user in entry.users if is_forgotten(user)}
            before, deleted = self._num_bytes, list[BlobName]()
            for entry in self._by_name.values():
                entry.users = remaining(entry.users, users.__contains__)
                if not is_needed(entry.users, entry.head.tokens.end):
                    deleted.append(entry.name)
            gone = tuple(each for name in deleted for each in self.forget(name))
            return Unused((*gone, *self._aliases.lost()), tuple(users), before - self._num_bytes)

    # --- removing -----------------------------------------------------------------------------------------------------

    def exclusive(self, run: TokenRun, chain: HashChain, start: int = 0) -> list[BlobName]:
        """The blobs that serve only a prefix: from its end up to a branch, or to the end of system and tools; with
        `start` only those that begin there or behind it."""
        with self._lock:
            records = serving_only(self._trie, self._paths.entry_of, self._paths.find(run, chain), start)
            return [self._entries[record_id].name for record_id in records]

    def forget(self, name: BlobName) -> list[BlobName]:
        """Forget a blob and its descendants, and return their names; nothing where it is not known."""
        with self._lock:
            entry = self._by_name.get(name)
            if entry is None:
                return []
            if entry.head.kind == "checkpoint":
                return self._forget_checkpoint(entry)
            nodes = self._trie.holders[entry.record_id]
            tops = [node for node in nodes if node.parent not in nodes]
            gone = [gone for top in tops for gone in self._forget_subtree(top)]
            self._trie.prune()
            return gone

    def forget_entry(self, entry: Entry) -> list[BlobName]:
        """Forget this very blob, not a newer one of the same name."""
        with self._lock:
            return self.forget(entry.name) if not entry.is_forgotten else []

    def forget_written(self, name: BlobName) -> list[BlobName]:
        """Forget a blob if it is on disk: one that waits to be written will be there."""
        with self._lock:
            self._aliases.forget(name)
            entry = self._by_name.get(name)
            return self.forget(name) if entry is not None and entry.is_written else []

    def mark_deleted(self, name: BlobName) -> list[BlobName]:
        """Forget it, and adopt none of the files of these until `unmark_deleted`, or until one is added again."""
        with self._lock:
            gone = self.forget(name)
            self._marked_deleted.update(gone)
            return gone

    def unmark_deleted(self, name: BlobName) -> bool:
        """Take the mark off a blob whose file is deleted now. False where it has none."""
        with self._lock:
            is_marked = name in self._marked_deleted
            self._marked_deleted.discard(name)
            return is_marked

    def _forget_checkpoint(self, entry: Entry) -> list[BlobName]:
        place = self._place(entry.head)
        # Without a position its parent was forgotten before it: look at all nodes.
        for node in [place.node] if place is not None else self._trie.nodes():
            if node.checkpoint is not None and node.checkpoint.record_id == entry.record_id:
                node.checkpoint = None
        leaning = [each for each in entry.leaning if not each.is_forgotten]
        self._drop(entry)
        return [*(name for each in leaning for name in self.forget_entry(each)), entry.name]

    def _forget_subtree(self, top: Node) -> list[BlobName]:
        names: dict[BlobName, None] = {}
        for node in [top, *top.descendants()][::-1]:
            gone = [self._paths.entry_of(node)]
            if node.checkpoint is not None:
                gone.append(self._entries[node.checkpoint.record_id])
            self._trie.detach(node)
            for entry in gone:
                if entry.head.kind == "checkpoint" or entry.record_id not in self._trie.holders:
                    self._drop(entry)
                    names[entry.name] = None
        return list(names)

    def _drop(self, entry: Entry) -> None:
        entry.is_forgotten = True
        if entry.base is not None:
            entry.base.leaning.remove(entry)
        del self._entries[entry.record_id]
        del self._by_name[entry.name]
        self._aliases.forget(entry.name)
        if entry.is_written:
            self._num_written[entry.head.kind] -= 1
            self._num_bytes -= entry.num_bytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            for entry in self._entries.values():
                entry.is_forgotten = True
            self._trie.clear()
            self._aliases.clear()
            self._entries.clear()
            self._by_name.clear()
            self._num_written.clear()
            self._uses.take()
            self._num_bytes = 0

    # --- reports ------------------------------------------------------------------------------------------------------

    def num_bytes(self) -> int:
        """Bytes of all blobs of this model that are on disk."""
        return self._num_bytes

    def num_of(self, kind: BlobKind) -> int:
        """How many blobs of a kind are on disk."""
        return self._num_written[kind]
