"""What GET /health says of models and rows. It decides nothing."""

from dataclasses import asdict

from kvserve.app.model_pool import ModelPoolStatus
from kvserve.core import JsonObject
from kvserve.observe.reports import memory_body, ranks_body


def engine_fields(pool: ModelPoolStatus, *, default_name: str) -> JsonObject:
    """What GET /health says of models and rows. `swapping`: another model is loading, requests wait and are served."""
    engine = pool.engine
    support = engine.cache_support if engine is not None else None
    is_ready = pool.loaded is not None and engine is not None and engine.state == "ready"
    state: str = "loading" if engine is None else engine.state
    if not is_ready and pool.loading is not None and pool.has_served:
        state = "swapping"
    return {
        "status": "ok" if is_ready else state,
        "model": pool.loaded.name if pool.loaded is not None else pool.loading or default_name,
        "num_running": engine.num_prefilling + engine.num_decoding if engine else 0,
        "num_prefilling": engine.num_prefilling if engine else 0,
        "num_decoding": engine.num_decoding if engine else 0,
        "num_waiting": (engine.num_waiting if engine else 0) + pool.num_waiting,
        "num_waiting_for_model": pool.num_waiting,
        "num_swaps": pool.num_swaps,
        "last_swap": asdict(pool.last_swap) if pool.last_swap is not None else None,
        "active_memory_bytes": engine.active_memory_bytes if engine else 0,
        "ram_bytes": engine.held_bytes[0] if engine else 0,
        "disk_bytes": engine.held_bytes[1] if engine else 0,
        "is_batched": support.can_batch if support else None,
        "is_prefix_cached": support.can_keep if support else None,
        "images": support.image_rule if support else None,
        "weights": asdict(engine.digest) if engine else None,
        "draft_model": asdict(engine.draft_model) if engine and engine.draft_model is not None else None,
        "ranks": ranks_body(engine.ranks) if engine else None,
        "memory": memory_body(engine.memory) if engine and engine.memory is not None else None,
    }
