"""Which model drafts for another one: the start refuses one with another tokenizer, and what is no model's folder."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from kvserve.app.catalogue import ModelSource
from kvserve.app.draft_choice import all_weight_file_bytes, draft_folder
from kvserve.config import Settings
from kvserve.engine.model_files import weight_file_bytes
from kvserve.errors import ModelLoadError, SettingError
from kvserve.prompt.tokenizer import load_tokenizer
from kvserve.settings.start_checks import refuse_unusable_draft_model
from tests.models import tiny_model
from tests.serving import serving_app, unstarted_app

MODEL = tiny_model("qwen3")


def settings(**changes: Any) -> Settings:
    defaults: dict[str, Any] = {name: field.default for name, field in Settings.model_fields.items()}
    return Settings.model_construct(**(defaults | changes))


def foreign(folder: Path) -> Path:
    """A copy of the model in whose tokenizer one token has another name."""
    shutil.copytree(MODEL, folder)
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary[last + last] = vocabulary.pop(last)
    content["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    return folder


def test_a_model_of_the_same_tokenizer_drafts() -> None:
    tokenizer, notes = load_tokenizer(MODEL), list[str]()
    source = ModelSource("own", MODEL, is_default=True)
    chosen = settings(draft_model=tiny_model("qwen3", seed=1))
    assert draft_folder(chosen, source, tokenizer, notes.append) == chosen.draft_model
    assert draft_folder(settings(), source, tokenizer, notes.append) is None
    assert not notes
    off = settings(draft_model=MODEL, speculation="off")
    assert draft_folder(off, source, tokenizer, notes.append) is None
    assert notes == ["DRAFT_MODEL does nothing: SPECULATION=off."]
    own = weight_file_bytes(MODEL)
    assert all_weight_file_bytes(settings(), MODEL) == all_weight_file_bytes(off, MODEL) == own
    assert all_weight_file_bytes(settings(draft_model=MODEL), MODEL) == 2 * own


def test_another_tokenizer_is_refused_where_it_was_asked_for(tmp_path: Path) -> None:
    tokenizer, notes = load_tokenizer(MODEL), list[str]()
    wrong = settings(draft_model=foreign(tmp_path / "foreign"))
    with pytest.raises(ModelLoadError, match=r"^DRAFT_MODEL='.+' cannot draft: .+ tokenizer than own: the token '.+'"):
        draft_folder(wrong, ModelSource("own", MODEL, is_default=True), tokenizer, notes.append)
    assert draft_folder(wrong, ModelSource("another", MODEL), tokenizer, notes.append) is None
    assert len(notes) == 1
    assert notes[0].startswith("DRAFT_MODEL does not draft for another: it has another tokenizer")


def test_what_is_no_folder_of_a_model_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    refuse_unusable_draft_model(None)
    refuse_unusable_draft_model(MODEL)
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(SettingError, match="DRAFT_MODEL"):
            refuse_unusable_draft_model(folder)


@pytest.mark.long
def test_a_server_names_the_model_that_drafts(tmp_path: Path) -> None:
    with serving_app(tmp_path, draft_model=MODEL, speculation="auto") as app:
        plain = app.chat("Say something.", max_tokens=24, speculation=False).content
        assert app.chat("Say something.", max_tokens=24).content == plain
        found = app.health()["draft_model"]
        assert found["name"] == MODEL.name
        assert "draft_kv" in app.health()["memory"]["accounts"]
        assert "kvserve_memory_draft_kv_bytes " in app.get("/metrics").body.decode()
    with (
        unstarted_app(tmp_path / "again", draft_model=foreign(tmp_path / "foreign"), speculation="auto") as app,
        pytest.raises(ModelLoadError, match="DRAFT_MODEL"),
    ):
        app.app.start(threading.Event())
