"""Memory as a running server tells of it: by account, with the bounds that are met."""

import math
from pathlib import Path

from kvserve.cache.disk_tier import DiskTier
from tests.serving import serving_app
from tests.web.fakes import eventually

ACCOUNTS = {"live", "copies", "kept", "write_queue", "read_ahead", "records", "drafts", "image_features", "buffers"}


def test_the_ledger_is_told_by_account_everywhere(tmp_path: Path) -> None:
    """`/health` and `/v1/cache` have one ledger, and `/metrics` its numbers; a small budget is its bound."""
    with serving_app(tmp_path, prompt_cache_max_bytes=2**24, session_records_max_bytes=2**20) as app:
        app.chat("Keep this.", max_tokens=4)
        assert eventually(lambda: app.health()["memory"]["accounts"]["live"]["num_bytes"] == 0)
        memory, cache = app.health()["memory"], app.get("/v1/cache").json
        metrics = app.get("/metrics").body.decode()
    accounts = memory["accounts"]
    assert accounts.keys() == cache["memory"]["accounts"].keys() == ACCOUNTS
    assert accounts["kept"] == {"num_bytes": cache["ram_bytes"], "max_bytes": 2**24} and cache["ram_bytes"] > 0
    assert accounts["records"] == {"num_bytes": cache["record_bytes"], "max_bytes": 2**20} and cache["record_bytes"] > 0
    assert memory["total_bytes"] <= memory["budget_bytes"] and memory["pressures"] == []
    for name in ACCOUNTS:
        assert f"kvserve_memory_{name}_bytes " in metrics
    assert "kvserve_memory_bytes " in metrics and "kvserve_memory_budget_bytes " in metrics


SMALL = {"prompt_cache_max_bytes": 2**17, "max_batch_bytes": 3 * 2**19}
"""Less than a row of 700 words leaves behind."""


def test_full_memory_is_named_with_what_it_costs(tmp_path: Path) -> None:
    """KV that cannot be kept is told once in the terminal."""
    with serving_app(tmp_path, disk_cache="off", **SMALL) as app:
        for number in range(2):
            app.chat(f"{number} " + "word " * 700, max_tokens=4)
        assert [each["bound"] for each in app.health()["memory"]["pressures"]] == ["kv_pool"]
        assert sum("Memory for KV is full" in line for line in app.lines()) == 1


def test_a_full_disk_is_named_with_what_it_costs(tmp_path: Path) -> None:
    """As long as it is full; with room on it all KV goes there, and there is nothing to name."""
    with serving_app(tmp_path, **SMALL) as app:
        for number in range(2):
            app.chat(f"{number} " + "word " * 700, max_tokens=4)
        assert app.health()["memory"]["pressures"] == []
        tier: DiskTier = app.served.engine._ask(lambda scheduler: scheduler.cache._disk).tier
        with tier._wake:
            tier._note_outcome("no room")
            tier._full_check_at = math.inf
        full = {each["bound"]: each["cost"] for each in app.health()["memory"]["pressures"]}
        assert full.keys() == {"disk"} and "RAM only" in full["disk"]
        tier._look_for_room()
        assert app.health()["memory"]["pressures"] == []
