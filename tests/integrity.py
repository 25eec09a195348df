"""The invariants of what keeps KV and conversations, checked by looking at everything. It changes nothing.

`check_integrity` raises AssertionError, naming what is wrong, where maps, counts and bytes do not agree.
"""

from collections import Counter
from functools import singledispatch

from kvserve.cache.node import Lease, Node
from kvserve.cache.store import Store
from kvserve.cache.token_run import common_end
from kvserve.cache.tree import PrefixTree
from kvserve.cache.trie import Trie
from kvserve.sessions.seen import PathNode
from kvserve.sessions.tool_layouts import ToolLayouts
from kvserve.sessions.turn_state import LeafOrder, RecordStore, node_bytes
from kvserve.sessions.turns import TurnStore


@singledispatch
def check_integrity(kept: object) -> None:
    """Whether the invariants of a prefix tree, or of a store of turns, records or layouts, hold."""
    raise TypeError(f"{type(kept).__name__} has no invariants here")


# --- KV --------------------------------------------------------------------------------------------------------------


@check_integrity.register
def _(kept: PrefixTree) -> None:
    _check_shape(kept._trie, kept._leases, kept._hasher.block_size)
    _check_totals(kept._store)


def _check_shape(trie: Trie, leases: set[Lease], block_size: int) -> None:
    """Ranges tile their paths, siblings differ in their first token, every block is indexed, every lease has a node."""
    standing: set[Lease] = {lease for root in trie.roots() for lease in root.leases}
    reachable: set[Node] = set()
    for node in trie.nodes():
        reachable.add(node)
        standing |= node.leases
        _check_node(trie, node, block_size)
    assert standing == leases, "the leases at nodes are not those that were handed out"
    for name, node in trie.index.items():
        assert node in reachable and name in node.hashes, "the index names a node that is gone or a foreign block"
    entries = {node for node in reachable if node.sequence_end is not None}
    assert set(trie.entries) == entries, "the entries are not the nodes that a row ended at"
    for lease in leases:
        node = lease.node
        is_there = node.start < lease.num_tokens <= node.end or (node.parent is None and lease.num_tokens == 0)
        assert is_there and not lease.is_detached and lease in node.leases, "a lease ends outside of its node"
        assert lease.chain.num_tokens <= lease.num_tokens, "a lease's chain names tokens that it does not hold"


def _check_node(trie: Trie, node: Node, block_size: int) -> None:
    parent, segment = node.parent, node.segment
    assert parent is not None and segment is not None, "a node has no parent or no record"
    where = f"node [{node.start}, {node.end})"
    assert parent.end == node.start < node.end, f"{where} does not continue its parent, which ends at {parent.end}"
    assert segment.tokens.start <= node.start and node.end <= segment.tokens.end, f"{where} is not in its record"
    assert parent.children.get(segment.tokens.key_at(node.start)) is node, f"{where} is not its parent's child"
    assert node in trie.holders[segment.record_id], f"{where} is no holder of its record"
    num_blocks = node.end // block_size - node.start // block_size
    assert len(node.hashes) == num_blocks, f"{where} has {len(node.hashes)} hashes for {num_blocks} blocks"
    for name in node.hashes:
        is_indexed = trie.index.get(name) is node
        assert is_indexed or trie.num_collisions > 0, f"a block of {where} is not indexed"
    assert node.checkpoint is None or node.checkpoint.offset == node.end, f"the checkpoint of {where} is elsewhere"
    assert not (node.sequence_end and node.children), f"{where} is an entry and yet continued"


def _check_totals(store: Store) -> None:
    """References and bytes add up, no payload is held that no node needs, and only a loose record is larger than its
    holders."""
    segments = {node.segment.record_id: node.segment for node in store.trie.nodes() if node.segment is not None}
    checkpoints = [node.checkpoint for node in store.trie.nodes() if node.checkpoint is not None]
    assert segments.keys() == store.trie.holders.keys(), "records and holders differ"
    for record_id, segment in segments.items():
        holders = sorted(store.trie.holders[record_id], key=lambda node: node.start)
        payload = store.ram.get(record_id)
        assert (payload.num_bytes if payload else 0) == segment.num_bytes, f"segment {record_id} is not held whole"
        edges = [segment.tokens.start, *(node.end for node in holders)]
        tiles = [node.start for node in holders] == edges[:-1] and edges[-1] == segment.tokens.end
        assert tiles or record_id in store._loose, f"the holders of segment {record_id} do not tile it"
        assert all(node.segment is segment for node in holders), f"segment {record_id} has a foreign holder"
        run = segment.tokens
        assert common_end(run, run, run.start, run.end) == run.end, f"segment {record_id} has broken tokens"
    checkpoint_bytes = sum(checkpoint.num_bytes for checkpoint in checkpoints)
    assert checkpoint_bytes == store.checkpoint_bytes, "checkpoint bytes do not add up"
    assert all(store.ram.get(checkpoint.record_id) for checkpoint in checkpoints), "a checkpoint has no payload"
    total = checkpoint_bytes + sum(segment.num_bytes for segment in segments.values())
    assert total == store.ram.num_bytes, f"{store.ram.num_bytes} bytes are counted, {total} are referenced"
    num_payloads = len(checkpoints) + sum(store.ram.get(record_id) is not None for record_id in segments)
    assert num_payloads == len(store.ram._payloads), "payloads are held that no node needs"


# --- conversations ---------------------------------------------------------------------------------------------------


@check_integrity.register
def _(kept: TurnStore) -> None:
    with kept._lock:
        _check_nodes(kept)
        check_integrity(kept._records)
        check_integrity(kept._layouts)
        assert kept._num_bytes == sum(each.num_bytes for each in kept._kept.values()), "bytes do not add up"
        assert len(kept._kept) <= kept._max_nodes and kept._num_bytes <= kept._max_bytes, "over a limit"


def _check_nodes(store: TurnStore) -> None:
    num_children = Counter(node.parent for node in store._kept)
    waiting = leaves(store._leaves)
    for node, kept in store._kept.items():
        state = store._states[node.chain]
        assert node in state.nodes, "a node that its chain does not know"
        assert node in store._children(node.parent)[node.chain], "a node that its parent does not know"
        assert kept.num_children == sum(map(len, kept.children.values())), "a child that is gone"
        assert node.parent is None or node.parent in store._kept, "a path with a hole"
        assert kept.num_children == num_children[node], "children miscounted"
        assert kept.num_children or state.newest is node, "a node that no lookup can reach"
        assert kept.num_children or node in waiting, "a leaf that would never leave"
        assert kept.num_bytes == node_bytes(node), "a node that was changed"
    assert sum(len(state.nodes) for state in store._states.values()) == len(store._kept), "a place without its node"


def leaves(order: LeafOrder) -> set[PathNode]:
    """The leaves that have an entry in the order of eviction."""
    return {node for used, _, node in order._heap if order._is_current(used, node)}


@check_integrity.register
def _(kept: RecordStore) -> None:
    assert kept.num_bytes == sum(size for _, size in kept._by_leaf.values()), "bytes do not add up"
    assert kept.num_bytes <= kept._max_bytes, "over the limit"
    records = {record for record, _ in kept._by_leaf.values()}
    assert records == set(kept._newest_through.values()), "a record is unreachable or was dropped"
    assert set(kept._newest_of.values()) <= records, "a session has a record that was dropped"


@check_integrity.register
def _(kept: ToolLayouts) -> None:
    assert kept._num_digests == sum(len(layout.tools) for each in kept._at.values() for layout in each)
    assert kept._written <= set(kept._at), "a row of what is gone"
