"""KV on disk as a person sees it: flags and settings, the banner, /v1/cache, DELETE, and a server that starts again."""

import contextlib
from pathlib import Path

import pytest

from kvserve.app.wiring import engine_settings, max_record_disk_bytes
from kvserve.config import Settings, load_launch
from tests.laws import TWO_KINDS, sampled
from tests.serving import chat_body, eventually, serving_app

WORDS = "The quick brown fox jumps over the lazy dog and reads the file again. "


@pytest.mark.parametrize("family", sampled(TWO_KINDS, ("qwen3_5",)))
def test_a_server_that_starts_again_is_warm(tmp_path: Path, family: str) -> None:
    """The same chat before and after: the same text, and all but the generation tail from the disk."""
    said = [{"role": "system", "content": WORDS * 20}, {"role": "user", "content": "List the files."}]
    with serving_app(tmp_path, family) as app:
        first = app.chat(said, max_tokens=16)
        assert any("disk" in line and str(tmp_path / "kv") in line for line in app.lines())
    with serving_app(tmp_path, family) as app:
        again = app.chat(said, max_tokens=16)
        report = app.get("/v1/cache").json
    assert again == first and again.usage is not None and again.num_cached_tokens is not None
    assert again.num_cached_tokens >= 0.95 * again.usage["prompt_tokens"]
    assert report["disk"]["num_hits"] == 1 and report["disk"]["num_restored_tokens"] >= again.num_cached_tokens - 16
    assert report["disk_bytes"] > 0 and report["disk"]["errors"] == {}
    assert report["disk"]["num_errors"] == report["num_disk_faults"] == 0


def test_clearing_empties_the_disk(tmp_path: Path) -> None:
    """DELETE /v1/cache: no blob is left, no byte counted."""
    with serving_app(tmp_path) as app:
        app.post("/v1/chat/completions", chat_body(WORDS * 5, max_tokens=2))
        assert eventually(lambda: app.get("/v1/cache").json["disk_bytes"] > 0)
        app.clear_cache()
        assert app.get("/v1/cache").json["disk_bytes"] == 0
        assert not list((tmp_path / "kv").rglob("*.safetensors"))


def test_records_and_index_count_in_the_cap(tmp_path: Path) -> None:
    """What the disk tier believes of the other files below DISK_CACHE_DIR is what lies there."""
    with serving_app(tmp_path) as app:
        app.chat(WORDS * 5, max_tokens=2)
        app.served.conversations.flush()

        def is_seen() -> bool:
            disk = app.served.engine._ask(lambda scheduler: scheduler.cache._disk)
            assert disk is not None
            disk.tier._order(disk.tier._reconcile, 30.0)
            files = [*(tmp_path / "kv").glob("index.sqlite*"), *(tmp_path / "kv").glob("records-*/*")]
            assert {path.name for path in files} >= {"index.sqlite", "records.sqlite"}
            with contextlib.suppress(FileNotFoundError):  # SQLite has taken one away meanwhile
                return bool(disk.tier.worker.account.beside_bytes == sum(path.stat().st_size for path in files))
            return False

        assert eventually(is_seen)


def test_a_disk_that_cannot_be_used_is_said_and_costs_nothing(tmp_path: Path) -> None:
    """A file in the place of the folder: one line, and the server serves from RAM."""
    (tmp_path / "taken").write_text("in the way")
    with serving_app(tmp_path, disk_cache_dir=tmp_path / "taken") as app:
        assert app.chat("Hello.", max_tokens=2).num_completion_tokens == 2
        assert sum("DISK_CACHE_DIR" in line for line in app.lines()) == 1
        report = app.get("/v1/cache").json
        assert report["disk"] is None and report["num_disk_faults"] == 1


def test_flags_and_settings_reach_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of the three modes, the cap, what stays free and the time limit."""
    monkeypatch.setenv("DISK_CACHE_MAX_BYTES", "3GB")
    monkeypatch.setenv("SESSION_RECORDS_MAX_BYTES", "1GB")
    monkeypatch.setenv("DISK_CACHE_MIN_FREE_BYTES", "1GB")
    monkeypatch.setenv("DISK_CACHE_TTL_HOURS", "2")
    launch = load_launch(["--disk-cache", str(tmp_path)])
    disk = engine_settings(launch.settings, launch.disk_cache).disk
    assert disk is not None and (disk.folder, disk.max_bytes, disk.is_ephemeral) == (tmp_path, 3 * 10**9, False)
    assert (disk.min_free_bytes, disk.ttl_hours) == (10**9, 2.0)
    assert max_record_disk_bytes(launch.settings) == 3 * 10**9 // 8
    assert max_record_disk_bytes(launch.settings.model_copy(update={"disk_cache_max_bytes": None})) == 10**9
    ephemeral = engine_settings(Settings(), load_launch(["--ephemeral-cache"]).disk_cache).disk
    assert ephemeral is not None and ephemeral.is_ephemeral
    assert engine_settings(Settings(), load_launch(["--no-disk-cache"]).disk_cache).disk is None


def test_it_is_on_where_nobody_says_otherwise() -> None:
    """No flag, no setting: KV is kept on disk and stays there."""
    disk = engine_settings(Settings(_env_file=None), load_launch([]).disk_cache).disk  # type: ignore[call-arg]
    assert disk is not None and not disk.is_ephemeral
