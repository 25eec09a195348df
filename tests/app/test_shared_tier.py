"""Where no shared cache is named there is none; where one is, its start waits for nobody, and what it hears is kept."""

import ast
import threading
from pathlib import Path

import pytest

import kvserve.remote.redis_link
from kvserve.app.shared_tier import shared_cache
from kvserve.config import Settings
from tests.ports import free_port
from tests.remote.shared_engines import wait_until


def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None) -> Settings:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STATE_DIR", str(tmp_path / "state"))
    if url is not None:
        monkeypatch.setenv("REMOTE_CACHE_URL", url)
    return Settings()


def test_without_a_url_nothing_of_it_is_loaded_or_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread; the one file that imports redis does so once a connection is made."""
    assert shared_cache(settings(tmp_path, monkeypatch, None), "on", print) is None
    given = settings(tmp_path, monkeypatch, "redis://127.0.0.1:1/0")
    assert shared_cache(given, "off", print) is shared_cache(given, "ephemeral", print) is None
    source = Path(kvserve.remote.redis_link.__file__).read_text("utf-8")
    tops = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert tops and not [node for node in tops if "redis." in f"{ast.unparse(node)}.".removeprefix("from kvserve")]


def test_a_server_that_is_not_there_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins at once, is down soon, says so once and without the password, and ends at once."""
    before, lines = threading.active_count(), list[str]()
    given = settings(tmp_path, monkeypatch, f"redis://:a-secret@127.0.0.1:{free_port()}/0")
    cache = shared_cache(given, "on", lines.append)
    assert cache is not None and cache.server.state == "connecting"
    cache.start(lambda _: True)
    try:
        wait_until(lambda: cache.server.state == "down")
        assert threading.active_count() == before + 2
        assert len(lines) == 1 and "cannot be reached" in lines[0] and "secret" not in lines[0]
    finally:
        cache.close()
    assert threading.active_count() == before


def test_where_it_has_heard_to_outlives_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One place for each server and folder; a file that is broken is none."""
    given = settings(tmp_path, monkeypatch, "redis://host")
    first, again = shared_cache(given, "on", print), shared_cache(given, "on", print)
    other = shared_cache(settings(tmp_path, monkeypatch, "redis://other"), "on", print)
    assert first is not None and again is not None and other is not None
    assert first._remembered() is None
    first._remember("17-3")
    assert again._remembered() == "17-3" and other._remembered() is None
    [file] = (tmp_path / "state").iterdir()
    file.write_bytes(b"\xff")
    assert first._remembered() is None
