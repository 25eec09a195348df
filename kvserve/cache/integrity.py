"""The invariants of the tree, checked by looking at everything. For tests and idle time; it changes nothing."""

from kvserve.cache.node import Lease, Node
from kvserve.cache.store import Store
from kvserve.cache.token_run import common_end
from kvserve.cache.trie import Trie


def expect(holds: bool, what: str) -> None:
    """Raise AssertionError; unlike an assert statement also under -O."""
    if not holds:
        raise AssertionError(what)


def check_shape(trie: Trie, leases: set[Lease], block_size: int) -> None:
    """Ranges tile their paths, siblings differ in their first token, every block is indexed, every lease has a node."""
    num_nodes = 0
    standing: set[Lease] = {lease for root in trie.roots() for lease in root.leases}
    reachable: set[Node] = set()
    for node in trie.nodes():
        num_nodes += 1
        reachable.add(node)
        standing |= node.leases
        _check_node(trie, node, block_size)
    expect(num_nodes == trie.num_nodes, f"{trie.num_nodes} nodes are counted, {num_nodes} can be reached")
    expect(standing == leases, "the leases at nodes are not those that were handed out")
    for name, node in trie.index.items():
        expect(node in reachable and name in node.hashes, "the index names a node that is gone or a foreign block")
    entries = {node for node in reachable if node.sequence_end is not None}
    expect(set(trie.entries) == entries, "the entries are not the nodes that a row ended at")
    for lease in leases:
        node = lease.node
        is_there = node.start < lease.num_tokens <= node.end or (node.parent is None and lease.num_tokens == 0)
        expect(is_there and not lease.is_detached and lease in node.leases, "a lease ends outside of its node")
        expect(lease.chain.num_tokens <= lease.num_tokens, "a lease's chain names tokens that it does not hold")


def _check_node(trie: Trie, node: Node, block_size: int) -> None:
    parent, segment = node.parent, node.segment
    if parent is None or segment is None:
        raise AssertionError("a node has no parent or no record")
    where = f"node [{node.start}, {node.end})"
    expect(parent.end == node.start < node.end, f"{where} does not continue its parent, which ends at {parent.end}")
    expect(segment.tokens.start <= node.start and node.end <= segment.tokens.end, f"{where} is not in its record")
    expect(parent.children.get(segment.tokens.key_at(node.start)) is node, f"{where} is not its parent's child")
    expect(node in trie.holders[segment.record_id], f"{where} is no holder of its record")
    num_blocks = node.end // block_size - node.start // block_size
    expect(len(node.hashes) == num_blocks, f"{where} has {len(node.hashes)} hashes for {num_blocks} blocks")
    for name in node.hashes:
        is_indexed = trie.index.get(name) is node
        expect(is_indexed or trie.num_collisions > 0, f"a block of {where} is not indexed")
    expect(node.checkpoint is None or node.checkpoint.offset == node.end, f"the checkpoint of {where} is elsewhere")
    expect(not (node.sequence_end and node.children), f"{where} is an entry and yet continued")


def check_totals(store: Store) -> None:
    """References and bytes add up, no payload is held that no node needs, and only a loose record is larger than its
    holders."""
    segments = {node.segment.record_id: node.segment for node in store.trie.nodes() if node.segment is not None}
    checkpoints = [node.checkpoint for node in store.trie.nodes() if node.checkpoint is not None]
    expect(segments.keys() == store.trie.holders.keys(), "records and holders differ")
    for record_id, segment in segments.items():
        holders = sorted(store.trie.holders[record_id], key=lambda node: node.start)
        payload = store.ram.get(record_id)
        expect((payload.num_bytes if payload else 0) == segment.num_bytes, f"segment {record_id} is not held whole")
        edges = [segment.tokens.start, *(node.end for node in holders)]
        tiles = [node.start for node in holders] == edges[:-1] and edges[-1] == segment.tokens.end
        expect(tiles or store.is_loose(record_id), f"the holders of segment {record_id} do not tile it")
        expect(all(node.segment is segment for node in holders), f"segment {record_id} has a foreign holder")
        run = segment.tokens
        expect(common_end(run, run, run.start, run.end) == run.end, f"segment {record_id} has broken tokens")
    checkpoint_bytes = sum(checkpoint.num_bytes for checkpoint in checkpoints)
    expect(checkpoint_bytes == store.checkpoint_bytes, "checkpoint bytes do not add up")
    expect(len(checkpoints) == store.num_checkpoints, "checkpoints do not add up")
    expect(all(store.ram.get(checkpoint.record_id) for checkpoint in checkpoints), "a checkpoint has no payload")
    total = checkpoint_bytes + sum(segment.num_bytes for segment in segments.values())
    expect(total == store.ram.num_bytes, f"{store.ram.num_bytes} bytes are counted, {total} are referenced")
    num_payloads = len(checkpoints) + sum(store.ram.get(record_id) is not None for record_id in segments)
    expect(num_payloads == len(store.ram), "payloads are held that no node needs")
