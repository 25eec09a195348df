"""What a tree holds and has done, counted by looking at every node. It changes nothing."""

from kvserve.cache.records import CacheStats
from kvserve.cache.store import Store


def stats_of(store: Store, *, live_bytes: int, num_leases: int) -> CacheStats:
    """A snapshot for other threads; `live_bytes` are those of the live rows' own caches."""
    trie, counters = store.trie, store.counters
    nodes = list(trie.nodes())
    return CacheStats(
        num_nodes=trie.num_nodes,
        num_segments=len(trie.holders),
        num_checkpoints=store.num_checkpoints,
        num_entries=len(trie.entries),
        num_stored_tokens=sum(node.end - node.start for node in nodes),
        ram_bytes=store.ram.num_bytes,
        checkpoint_bytes=store.checkpoint_bytes,
        live_bytes=live_bytes,
        num_leases=num_leases,
        num_lookups=counters.num_lookups,
        num_hits=counters.num_hits,
        num_matched_tokens=counters.num_matched_tokens,
        num_usable_tokens=counters.num_usable_tokens,
        num_image_retreats=counters.num_image_retreats,
        num_hash_collisions=trie.num_collisions,
        num_culled_prefixes=counters.num_culled_prefixes,
        num_evicted_tokens=counters.num_evicted_tokens,
        num_evicted_checkpoints=counters.num_evicted_checkpoints,
    )
