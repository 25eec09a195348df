"""What is on disk of models that nobody asked for since the start is forgotten too: their records and their KV."""

import os
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvserve.app.model_factory
import kvserve.engine.engine_start
from kvserve.app.wiring import RECORDS_PREFIX
from kvserve.canonical.rules import DEFAULT_RULES
from kvserve.engine.model_files import CACHES_FILE
from kvserve.identity.conversations import Conversations
from kvserve.identity.recognise import IdentitySettings
from kvserve.sessions import archive_file
from kvserve.sessions.archive import Archive
from kvserve.sessions.archive_file import FILE_NAME
from tests.laws import sampled_cells
from tests.models import tiny_model
from tests.serving import CHAT_PATH, AppUnderTest, chat_body, eventually, serving_app
from tests.weights import fingerprint_of
from tests.words_held import files_with

GONE, KEPT = "GOOSEBERRY jelly", "RASPBERRY jelly"
SESSION = {GONE: "gone", KEPT: "kept"}
SETTINGS: dict[str, Any] = {"max_kv_size": 2048, "enable_request_logging": False}


def models(folder: Path) -> dict[str, Any]:
    """Settings with a second model, beside the default one."""
    root = folder / "models"
    root.mkdir(exist_ok=True)
    if not (root / "other").exists():
        (root / "other").symlink_to(tiny_model("gemma3"))
    return {**SETTINGS, "model_folders": (str(root),)}


def ask(app: AppUnderTest, word: str, model: str, **fields: Any) -> int:
    """How many tokens of the prompt were cached, and how many there are."""
    body = chat_body(f"{word}. " * 24, max_tokens=2, model=model, session_id=SESSION[word], **fields)
    response = app.post(CHAT_PATH, body)
    assert response.status == 200, response.body
    usage: Any = response.json["usage"]  # type: ignore[index]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def forget(app: AppUnderTest, query: str = "session=gone") -> dict[str, Any]:
    with app.connect() as client:
        response = client.request("DELETE", f"/v1/cache?{query}", None, {"Connection": "close"})
    assert response.status == 200, response.body
    return dict(response.json)


def ids_of(app: AppUnderTest, word: str, model: str) -> bytes:
    return array("I", app.app.resolve_model(model).tokenizer.encode(f" {word}. {word}.")).tobytes()


def test_models_that_were_not_asked_for_since_the_start(tmp_path: Path) -> None:
    """Neither record nor KV of the forgotten one is in any file; the other one's are of use when that model is asked
    again."""
    settings = models(tmp_path)
    with serving_app(tmp_path, **settings) as app:
        for model in ("other", "default"):
            for word in (KEPT, GONE):
                ask(app, word, model)
        ids = {word: ids_of(app, word, "other") for word in (GONE, KEPT)}
    assert len(list((tmp_path / "kv").glob(f"records-*/{FILE_NAME}"))) == 2
    for word in (GONE, KEPT):
        assert len(files_with(tmp_path / "kv", word.encode())) >= 2 and files_with(tmp_path / "kv", ids[word])
    with serving_app(tmp_path, **settings) as app:
        assert len(app.app._pool.known()) == 1
        told = forget(app)
        assert told["is_done"] and told["num_messages"] >= 4 and told["num_sessions"] == 2, told
        assert files_with(tmp_path, GONE.encode(), ids[GONE]) == []
        assert files_with(tmp_path / "kv", ids[KEPT])
        assert forget(app)["num_messages"] == 0
        assert ask(app, KEPT, "other") > 100
        known = app.app.resolve_model("other").conversations
        assert known.totals().num_messages == 2 and known.totals().archive.num_faults == 0


@pytest.mark.long
def test_the_kv_of_a_model_that_left_the_memory(tmp_path: Path) -> None:
    """It was asked in this life of the server, and another one is loaded now."""
    settings = models(tmp_path)
    with serving_app(tmp_path, **settings) as app:
        for word in (KEPT, GONE):
            ask(app, word, "other")
        ids = {word: ids_of(app, word, "other") for word in (GONE, KEPT)}
        ask(app, KEPT, "default")
        assert eventually(lambda: app.health()["status"] == "ok") and files_with(tmp_path, ids[GONE])
        told = forget(app)
        assert told["is_done"] and told["disk_bytes"] > 0
        assert files_with(tmp_path, GONE.encode(), ids[GONE]) == []
        assert ask(app, KEPT, "other") > 100 and ask(app, GONE, "other") < 20


def test_a_model_that_keeps_no_kv_forgets_that_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no disk of its own, and the folder is there all the same."""
    settings = models(tmp_path)
    with serving_app(tmp_path, **settings) as app:
        for word in (KEPT, GONE):
            ask(app, word, "other")
        ids = {word: ids_of(app, word, "other") for word in (GONE, KEPT)}
    (tmp_path / "kv" / CACHES_FILE).unlink()  # what was found of it before
    real = kvserve.engine.engine_start.check_caches
    monkeypatch.setattr(
        kvserve.engine.engine_start, "check_caches", lambda model: replace(real(model), can_keep=False, notes=())
    )
    with serving_app(tmp_path, **settings) as app:
        assert app.get("/v1/cache").json["disk"] is None
        assert forget(app)["is_done"]
        assert files_with(tmp_path, GONE.encode(), ids[GONE]) == []
        assert files_with(tmp_path / "kv", ids[KEPT])


def test_records_that_another_server_has_open_are_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and what is there stays; once that one has ended they are forgotten."""
    monkeypatch.setattr(archive_file, "LOCK_WAIT_SECONDS", 0.05)
    settings = models(tmp_path)
    with serving_app(tmp_path, **settings) as app:
        ask(app, GONE, "other")
        place = tmp_path / "kv"
    [folder] = [path.parent for path in place.glob(f"records-*/{FILE_NAME}") if GONE.encode() in path.read_bytes()]
    others = Conversations(IdentitySettings(DEFAULT_RULES), Archive(folder, max_bytes=1 << 30, report=pytest.fail))
    with serving_app(tmp_path, **settings) as app:
        assert not forget(app)["is_done"]
        assert "another server has it open" in app.screen.getvalue()
        others.close()
        assert forget(app)["is_done"]
        assert files_with(tmp_path, GONE.encode()) == []


@sampled_cells(lambda refused: refused == "read")
@pytest.mark.parametrize("refused", ["read", "dated"])
def test_records_that_may_not_be_had_are_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The others' are forgotten all the same, and it is said which they are. `dated`: a file that can be written and is
    another user's."""
    settings = models(tmp_path)
    with serving_app(tmp_path, **settings) as app:
        for model in ("other", "default"):
            ask(app, GONE, model)
    [place] = {each.parent for each in files_with(tmp_path / "kv", GONE.encode()) if each.name == FILE_NAME} - {
        own_records(tmp_path)
    }

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(place))

    with serving_app(tmp_path, **settings) as app:
        with monkeypatch.context() as patch:
            patch.setattr(*((kvserve.app.model_factory, "unused") if refused == "read" else (os, "utime")), refuse)
            told = forget(app)
        held = [each for each in files_with(tmp_path, GONE.encode()) if each.name.startswith(FILE_NAME)]
        if refused == "read":
            assert not told["is_done"] and {each.parent for each in held} == {place}
            assert "Permission denied" in app.screen.getvalue()
            assert forget(app)["is_done"]
        else:
            assert told["is_done"] and held == []
        assert files_with(tmp_path, GONE.encode()) == []


def own_records(folder: Path) -> Path:
    """Where the default model's records are."""
    return folder / "kv" / f"{RECORDS_PREFIX}{fingerprint_of(tiny_model('qwen3'))[:32]}"


def test_to_be_looked_through_is_no_use_of_records(tmp_path: Path) -> None:
    """A model's records leave when nobody has used them for so long, however often somebody is forgotten."""
    settings = models(tmp_path)
    with serving_app(tmp_path, **settings) as app:
        ask(app, KEPT, "other")
    files = list((tmp_path / "kv").glob(f"records-*/{FILE_NAME}"))
    an_hour_ago = time.time() - 3600
    for file in files:
        os.utime(file, (an_hour_ago, an_hour_ago))
    with serving_app(tmp_path, **settings) as app:
        assert forget(app)["is_done"]
        assert min(file.stat().st_mtime for file in files) == pytest.approx(an_hour_ago, abs=2)
