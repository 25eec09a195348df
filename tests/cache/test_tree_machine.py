"""The tree against a plain set of prefixes: whatever happens, both know the same and nothing is lost or mixed up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvserve.cache.match import PrefixMatch
from kvserve.cache.node import Lease, Node
from kvserve.cache.records import Limits
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from tests.cache.payloads import (
    Atom,
    Clock,
    Key,
    Rows,
    WholeState,
    assert_exact,
    flatten,
    keys_of,
    make_tree,
    short_digest,
)
from tests.integrity import check_integrity
from tests.laws import IS_FULL, num_examples

atom = st.one_of(st.integers(0, 1), st.integers(0, 2), st.sampled_from(["cat", "dog"]))
atoms = st.lists(atom, min_size=1, max_size=12)
owners = st.sampled_from([None, "a", "b"])
users = st.sampled_from(["", "c", "d"])
limits = st.builds(
    Limits,
    max_bytes=st.sampled_from([60, 300, 10**6]),
    max_checkpoint_bytes=st.sampled_from([50, 130, 10**6]),
    max_entries=st.sampled_from([1, 3, 100]),
    max_entries_per_owner=st.sampled_from([1, 2, 100]),
    ttl_seconds=st.sampled_from([0.0, 50.0]),
    owner_idle_seconds=st.sampled_from([0.0, 80.0]),
)


@dataclass(frozen=True, eq=False)
class Copied:
    """A record in another tier: the last of these tokens, from `start` on, or the state behind them."""

    keys: tuple[Key, ...]
    start: int
    is_written: bool = True
    is_forgotten: bool = False


class TreeMachine(RuleBasedStateMachine):
    """Three trees (index, no index, a hash that collides) do the same; the model is a set of prefixes."""

    needs_checkpoints = False

    @initialize(limits=limits, first=st.lists(atom, min_size=8, max_size=16))
    def begin(self, limits: Limits, first: list[Atom]) -> None:
        self.clock = Clock()
        self.limits = limits
        options: dict[str, Any] = {"needs_checkpoints": self.needs_checkpoints, "clock": self.clock}
        self.trees = [
            make_tree(limits, **options),
            make_tree(limits, use_index=False, **options),
            make_tree(limits, digest=short_digest, **options),
        ]
        self.conversations: list[list[Atom]] = [first, [*first, *first], []]
        self.rows: list[tuple[TokenSequence, list[Lease]]] = []
        self.stored: set[tuple[Key, ...]] = set()
        self.states: set[tuple[Key, ...]] = set()

    # --- conversations ------------------------------------------------------------------------------------------------

    @rule(data=st.data(), more=atoms)
    def branch_or_edit(self, data: st.DataObject, more: list[Atom]) -> None:
        """A conversation that goes on, differently, from any place of another one."""
        base = data.draw(st.sampled_from(self.conversations))
        keep = data.draw(st.integers(0, len(base)))
        self.conversations.append([*base[:keep], *more])

    @rule(data=st.data(), owner=owners, ttl=st.sampled_from([None, 20.0]), user=users)
    def begin_row(self, data: st.DataObject, owner: str | None, ttl: float | None, user: str) -> None:
        """A request: what is found must be what the model says, and its rows must be the right ones."""
        tokens = flatten(data.draw(st.sampled_from(self.conversations)))
        leases = []
        for tree in self.trees:
            match = tree.lookup(tokens)
            self.check_match(match, tokens)
            leases.append(tree.acquire(match, owner=owner, ttl_seconds=ttl, user=user))
        self.rows.append((tokens, leases))

    @rule(data=st.data(), more=atoms)
    def ask_again(self, data: st.DataObject, more: list[Atom]) -> None:
        """The same prompt and one that goes on from it, after whatever happened since it was looked up last."""
        base = data.draw(st.sampled_from(self.conversations))
        for tokens in (flatten(base), flatten([*base, *more])):
            for tree in self.trees:
                self.check_match(tree.lookup(tokens), tokens)

    def check_match(self, match: PrefixMatch, tokens: TokenSequence) -> None:
        keys = keys_of(tokens)
        matched = max((n for n in range(len(keys) + 1) if keys[:n] in self.stored), default=0)
        inside = {n for span in tokens.images for n in range(span.start + 1, span.end)}
        usable = [
            n
            for n in range(min(matched, max(len(keys) - 1, 0)) + 1)
            if n == 0 or (n not in inside and (not self.needs_checkpoints or keys[:n] in self.states))
        ]
        assert (match.num_matched_tokens, match.num_usable_tokens) == (matched, max(usable))
        assert_exact(match, tokens)
        assert (match.state is not None) == (self.needs_checkpoints and match.num_usable_tokens > 0)

    @rule(data=st.data(), with_state=st.booleans())
    def extend_row(self, data: st.DataObject, with_state: bool) -> None:
        """A live row computes on; only what was not there is asked of it."""
        if self.rows:
            tokens, leases = data.draw(st.sampled_from(self.rows))
            end = data.draw(st.integers(leases[0].num_tokens, len(tokens)))
            self.extend(tokens, leases, end, with_state)

    @rule(data=st.data())
    def rows_cannot_be_copied(self, data: st.DataObject) -> None:
        """Memory runs out where a row stops: nothing has changed, and it may stop again later."""
        if not self.rows:
            return
        tokens, leases = data.draw(st.sampled_from(self.rows))
        end = data.draw(st.integers(leases[0].num_tokens, len(tokens)))

        def fail(_start: int, _end: int) -> Rows:
            raise MemoryError

        is_known = leases[0].is_detached or end == leases[0].num_tokens or keys_of(tokens)[:end] in self.stored
        for tree, lease in zip(self.trees, leases, strict=True):
            before = lease.num_tokens
            try:
                tree.extend(lease, tokens, end, fail)
            except MemoryError:
                assert not is_known and lease.num_tokens == before
            else:
                assert is_known

    @rule(data=st.data(), owner=owners, user=users, num_stops=st.integers(1, 3), stays=st.booleans())
    def whole_row(self, data: st.DataObject, owner: str | None, user: str, num_stops: int, stays: bool) -> None:
        """A request from its lookup to its end, with a state wherever it stops."""
        self.begin_row(data, owner, None, user)
        tokens, leases = self.rows[-1]
        for stop in range(1, num_stops + 1):
            self.extend(tokens, leases, max(leases[0].num_tokens, len(tokens) * stop // num_stops), True)
        if not stays:
            self.leave(len(self.rows) - 1, is_end=True)

    def extend(self, tokens: TokenSequence, leases: list[Lease], end: int, with_state: bool) -> None:
        if leases[0].is_detached:
            return
        keys, start = keys_of(tokens), leases[0].num_tokens
        first_new = max(n for n in range(start, end + 1) if keys[:n] in self.stored or n == start)
        for tree, lease in zip(self.trees, leases, strict=True):
            taken: list[tuple[int, int]] = []

            def take_rows(first: int, last: int, taken: list[tuple[int, int]] = taken) -> Rows:
                taken.append((first, last))
                return Rows(keys[first:last])

            take_state = (lambda: WholeState(keys[:end])) if with_state else None
            extension = tree.extend(lease, tokens, end, take_rows, take_state)
            assert taken == ([(first_new, end)] if first_new < end else [])
            assert (extension.start, extension.first_new, extension.end) == (start, first_new, end)
            is_new = with_state and self.needs_checkpoints and end > 0 and keys[:end] not in self.states
            assert extension.has_new_checkpoint == is_new
        self.stored |= {keys[:n] for n in range(start, end + 1)}
        if with_state and end > 0:
            self.states.add(keys[:end])

    @rule(data=st.data(), is_end=st.booleans())
    def end_row(self, data: st.DataObject, is_end: bool) -> None:
        """A row finishes or is cancelled."""
        if self.rows:
            self.leave(data.draw(st.integers(0, len(self.rows) - 1)), is_end)

    def leave(self, number: int, is_end: bool) -> None:
        row = self.rows.pop(number)
        for tree, lease in zip(self.trees, row[1], strict=True):
            if is_end:
                tree.mark_end(lease)
            tree.release(lease)

    @rule(data=st.data())
    def retract_row(self, data: st.DataObject) -> None:
        """A row that is ended takes with it what lies behind a place, and nothing that anybody else needs."""
        if not self.rows:
            return
        tokens, leases = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        start, end = data.draw(st.integers(0, len(tokens))), leases[0].num_tokens
        needed = set[tuple[Key, ...]]()
        for nodes in self.trees[0].sequences():
            if nodes[-1].sequence_end is not None:
                needed |= {key for key in self.stored if key == path_of(nodes)[: len(key)]}
        for tree, lease in zip(self.trees, leases, strict=True):
            tree.retract(lease, start)
        gone = self.stored - contents(self.trees[0])[0] - {()}
        assert gone <= {keys_of(tokens)[:n] for n in range(start + 1, end + 1)} - needed
        self.forget_what_left()

    # --- housekeeping -------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 30.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(live_bytes=st.sampled_from([0, 40]), needed=st.sampled_from([0, 100]))
    def evict(self, live_bytes: int, needed: int) -> None:
        """Limits hold afterwards unless live rows are in the way; what is left was there before."""
        for tree in self.trees:
            before = tree.stats().ram_bytes
            tree.account_live(live_bytes)
            eviction = tree.evict(needed)
            stats = tree.stats()
            assert eviction.num_freed_bytes == before - stats.ram_bytes
            fits = stats.ram_bytes + live_bytes + needed <= self.limits.max_bytes
            assert eviction.is_within_limits == fits
            leaves = [nodes[-1] for nodes in tree.sequences()]
            if not fits:
                assert all(leaf.leases for leaf in leaves)
            assert not [leaf for leaf in leaves if not leaf.leases and self.is_over(leaf)]
            if stats.checkpoint_bytes > self.limits.max_checkpoint_bytes:
                assert all(node.leases for nodes in tree.sequences() for node in nodes if node.checkpoint)
        self.forget_what_left()

    def is_over(self, leaf: Node) -> bool:
        """Whether a leaf has outlived its own time limit or, without one, the general limit."""
        own = leaf.sequence_end.ttl_seconds if leaf.sequence_end is not None else None
        limit = self.limits.ttl_seconds if own is None else own
        return 0 < limit < self.clock.now - leaf.last_used_at

    def forget_what_left(self) -> None:
        left = [contents(tree) for tree in self.trees]
        assert left[0] == left[1] == left[2]
        stored, states = left[0]
        assert stored <= self.stored and states <= self.states
        for tokens, leases in self.rows:
            if not leases[0].is_detached:
                assert leases[0].num_tokens == 0 or keys_of(tokens)[: leases[0].num_tokens] in stored
        self.stored, self.states = stored, states

    @rule(user=st.sampled_from(["c", "d"]), sure=st.sampled_from([*[False] * 5, True]))
    def forget_user(self, user: str, sure: bool) -> None:
        """What only this one used goes, while others stand where they stood."""
        if sure:
            for tree in self.trees:
                tree.forget(lambda name: name == user)
                assert not any(user in node.users for path in tree.sequences() for node in path)
            self.forget_what_left()

    @rule(data=st.data(), ratio=st.floats(0, 1))
    def copy_end(self, data: st.DataObject, ratio: float) -> None:
        """Another tier takes what it lacks of what a row stands on, and has all of it then."""
        if not self.rows:
            return
        for tree, lease in zip(self.trees, data.draw(st.sampled_from(self.rows))[1], strict=True):
            whole, path = tree.kept(lease), tree.kept_end(lease, int(ratio * lease.num_tokens))
            if whole is None or path is None:
                assert whole is path is None
                continue
            keys, start = path_of(lease.node.path()), path.run.start
            assert path.run == whole.run.part(start, whole.run.end)
            assert path.chain.hashes == whole.chain.hashes[path.chain.num_dropped :]
            assert path.chain.num_tokens == whole.chain.num_tokens
            assert path.parts == whole.parts[len(whole.parts) - len(path.parts) :]
            assert bool(path.above) == (start > 0)
            for part in path.parts:
                part.copies.rows = (Copied(keys[: part.piece.end], part.piece.start),)
                part.copies.state = Copied(keys[: part.piece.end], part.piece.end) if part.state is not None else None

    @rule(data=st.data())
    def copy_row(self, data: st.DataObject) -> None:
        """Another tier takes what a live row stands on, as the tree's parts of it are then."""
        if not self.rows:
            return
        for tree, lease in zip(self.trees, data.draw(st.sampled_from(self.rows))[1], strict=True):
            if (path := tree.kept(lease)) is None:
                continue
            for part in path.parts:
                keys = tuple(path.run.key_at(place) for place in range(part.piece.end))
                part.copies.rows = (Copied(keys, part.piece.start),)
                part.copies.state = Copied(keys, part.piece.end) if part.state is not None else None

    @rule()
    def coalesce(self) -> None:
        """Idle work: nothing changes but the number of records."""
        for tree in self.trees:
            while (run := tree.plan_coalesce(max_tokens=16)) is not None:
                before = tree.stats()
                keys: list[Key] = []
                for piece in run.pieces:
                    assert isinstance(piece.payload, Rows)
                    keys += piece.payload.keys[piece.first_row : piece.end_row]
                tree.replace(run, Rows(tuple(keys)))
                assert (tree.stats().num_stored_tokens, tree.stats().ram_bytes) == (
                    before.num_stored_tokens,
                    before.ram_bytes,
                )

    @rule(sure=st.sampled_from([*[False] * 15, True]))
    def clear(self, sure: bool) -> None:
        """Everything goes; live rows compute on for themselves."""
        if sure:
            for tree in self.trees:
                tree.clear()
                assert tree.stats().ram_bytes == 0
            self.stored, self.states = set(), set()

    @invariant()
    def all_is_well(self) -> None:
        for tree in getattr(self, "trees", []):
            check_integrity(tree)
            check_places(tree)
            stored, states = contents(tree)
            assert stored == self.stored - {()}
            assert states == (self.states if self.needs_checkpoints else set())
            for nodes in tree.sequences():
                check_copies(nodes)


class CheckpointTreeMachine(TreeMachine):
    """The same for a model with layers that cannot be cut."""

    needs_checkpoints = True


def path_of(nodes: Sequence[Node]) -> tuple[Key, ...]:
    """All tokens of a path."""
    return tuple(node.tokens.key_at(place) for node in nodes for place in range(node.start, node.end))


def check_places(tree: PrefixTree) -> None:
    """Where a prompt was found before is where it is found by whoever has no memory."""
    for named in tree._names._kept:
        root = tree._trie.root(named.partition)
        found = tree._trie.find(root, named.run, named.chain)
        assert tree._trie.find(root, named.run, named.chain, known=named.place) == found


def check_copies(nodes: Sequence[Node]) -> None:
    """What is said to be in another tier is there: every row of a node, and its state and no other."""
    keys = path_of(nodes)
    for node in nodes:
        covered: set[int] = set()
        for copy in node.copies.rows:
            assert isinstance(copy, Copied)
            num_common = next(
                (n for n, (one, two) in enumerate(zip(keys, copy.keys, strict=False)) if one != two), None
            )
            covered |= set(range(copy.start, min(len(keys), len(copy.keys)) if num_common is None else num_common))
        assert not node.copies.rows or covered >= set(range(node.start, node.end))
        if (state := node.copies.state) is not None:
            assert isinstance(state, Copied) and node.checkpoint is not None and state.keys == keys[: node.end]


def contents(tree: PrefixTree) -> tuple[set[tuple[Key, ...]], set[tuple[Key, ...]]]:
    """All prefixes that are stored and all that have a checkpoint, read from the payloads."""
    stored: set[tuple[Key, ...]] = set()
    states: set[tuple[Key, ...]] = set()
    for nodes in tree.sequences():
        keys: tuple[Key, ...] = ()
        for node in nodes:
            piece = tree._store.piece_of(node, node.end)
            assert isinstance(piece.payload, Rows)
            for key in piece.payload.keys[piece.first_row : piece.end_row]:
                keys = (*keys, key)
                stored.add(keys)
            if node.checkpoint is not None:
                states.add(keys)
    return stored, states


@pytest.mark.parametrize("machine", [TreeMachine, CheckpointTreeMachine])
def test_the_tree_knows_what_a_set_of_prefixes_knows(machine: type[TreeMachine]) -> None:
    """Any order of requests, branches, evictions and merges: same depth, right rows, bytes that add up."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples(50) if IS_FULL else 14,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
