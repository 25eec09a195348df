"""What cannot leave RAM: the records that live rows stand on. It knows nodes and sizes."""

from collections.abc import Iterable

from kvserve.cache.node import Lease, Node


def leased_bytes(leases: Iterable[Lease]) -> int:
    """Bytes of all rows and states on the paths of these leases, each once."""
    seen: set[int] = set()
    num_bytes = 0
    for lease in leases:
        node: Node | None = lease.node
        while node is not None and node.segment is not None and id(node) not in seen:
            seen.add(id(node))
            num_bytes += node.segment.num_bytes * (node.end - node.start) // len(node.segment.tokens)
            num_bytes += node.checkpoint.num_bytes if node.checkpoint is not None else 0
            node = node.parent
    return num_bytes
