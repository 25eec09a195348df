"""A server on a model whose files changed, or that it does not know yet: nothing of another model is reused, nobody
waits, and what it tells of that is true."""

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvserve.engine.engine_start
from kvserve.engine.model_files import MEMORY_FILE
from kvserve.sessions.archive_file import FILE_NAME
from tests.models import tiny_model
from tests.serving import CHAT_PATH, AppUnderTest, Chat, chat_body, eventually, serving_app, unstarted_app, whole
from tests.weights import change_byte, digest_held_back, turn_middle

SYSTEM = {"role": "system", "content": "You look at places and say what is there, as far as one can see. " * 8}
FIRST = [SYSTEM, {"role": "user", "content": "Look around."}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_model("qwen3"), copy)
    return copy


def talk(app: AppUnderTest, session: str = "one", num_turns: int = 2) -> list[Chat]:
    """The turns of one conversation."""
    messages, answers = list(FIRST), list[Chat]()
    for turn in range(num_turns):
        answers.append(app.chat(messages, session_id=session, max_tokens=6))
        said = {"role": "assistant", "content": answers[-1].content}
        messages += [said, {"role": "user", "content": f"And then, after {turn}?"}]
    return answers


def go_on(app: AppUnderTest, answers: list[Chat], session: str = "one") -> tuple[Chat, dict[str, Any]]:
    """The next turn of a conversation, and how it is explained."""
    messages = list(FIRST)
    for turn, answer in enumerate(answers):
        messages += [{"role": "assistant", "content": answer.content}]
        messages += [{"role": "user", "content": f"And then, after {turn}?"}]
    response = app.post(CHAT_PATH, chat_body(messages, session_id=session, max_tokens=6))
    assert response.status == 200
    explained = app.get(f"/v1/cache/explain/{response.json['id']}").json
    return whole(response.json), explained


def report(app: AppUnderTest) -> dict[str, Any]:
    return dict(app.get("/v1/cache").json)


def state(app: AppUnderTest) -> str:
    return str(app.health()["weights"]["state"])


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def raise_rope_base(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 2 * config["rope_theta"]}))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: turn_middle(folder / "model.safetensors", "mlp.down_proj.weight"),
        pytest.param(lambda folder: change_byte(folder / "model.safetensors", 400_000), marks=pytest.mark.long),
        lambda folder: edit(folder / "chat_template.jinja", "user", "User"),
        pytest.param(lambda folder: edit(folder / "tokenizer.json", '"version"', ' "version"'), marks=pytest.mark.long),
        pytest.param(lambda folder: (folder / "adapter_config.json").write_text("{}"), marks=pytest.mark.long),
        pytest.param(raise_rope_base, marks=pytest.mark.long),
    ],
    ids=["tensors", "byte", "template", "tokenizer", "file added", "config"],
)
def test_after_a_change_everything_is_as_on_the_first_day(
    folder: Path, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    """Neither KV nor a record of the model before: the same prompts get the answers of a server that knows nothing."""
    with serving_app(tmp_path, model_path=str(folder)) as app:
        before = talk(app)
    with serving_app(tmp_path, model_path=str(folder)) as app:  # the control: unchanged it is warm, and knows its turns
        assert report(app)["num_messages"] > 0 and go_on(app, before)[0].num_cached_tokens > 100  # type: ignore[operator]
    change(folder)
    with serving_app(tmp_path, model_path=str(folder)) as app:
        assert report(app)["num_messages"] == report(app)["disk_bytes"] == 0
        answer, explained = go_on(app, before)
        assert answer.num_cached_tokens == 0 and explained["cause"] == "not seen since the start"
    with serving_app(tmp_path / "new", model_path=str(folder)) as app:
        assert go_on(app, before)[0] == answer


def test_a_model_that_is_not_known_yet_answers_and_remembers(folder: Path, tmp_path: Path) -> None:
    """The first start with it, its digest held back: answers come, turns are reused from RAM, `/health` and the banner
    say what is read. Once it is known all of that goes to the disk: the next start is warm and knows the turns."""
    with (
        digest_held_back() as let_go,
        serving_app(tmp_path, model_path=str(folder), enable_request_logging=False) as app,
    ):
        answers = talk(app)
        assert (answers[0].num_cached_tokens, answers[1].num_cached_tokens > 100) == (0, True)  # type: ignore[operator]
        weights = app.health()["weights"]
        assert (weights["state"], weights["reason"]) == ("reading", "its files are still being read")
        assert weights["num_bytes"] > 500_000 and any("read to know it" in line for line in app.lines())
        assert not list((tmp_path / "kv").rglob("*.*")) and report(app)["num_disk_faults"] == 0
        held = report(app)["num_messages"]
        let_go.set()
        assert eventually(lambda: state(app) == "known" and report(app)["disk"] is not None)
        assert eventually(lambda: report(app)["record_disk_bytes"] > 0)
        assert go_on(app, answers)[1]["cause"] == "nothing lost"
    with serving_app(tmp_path, model_path=str(folder)) as app:
        assert report(app)["num_messages"] > held > 0
        answer, explained = go_on(app, answers)
        assert explained["cause"] == "nothing lost" and answer.num_cached_tokens > 200  # type: ignore[operator]


def test_what_was_kept_before_comes_back_with_the_name(folder: Path, tmp_path: Path) -> None:
    """The same files under other times: until they were read again nothing of before is found, which the explanation
    says; then records and KV are there again. A conversation of that time begins anew in the records, not in KV."""
    with serving_app(tmp_path, model_path=str(folder)) as app:
        before = talk(app)
        num_messages = report(app)["num_messages"]
    (folder / "config.json").touch()
    with digest_held_back() as let_go, serving_app(tmp_path, model_path=str(folder)) as app:
        assert report(app)["num_messages"] == 0
        answer, explained = go_on(app, before)
        assert answer.num_cached_tokens == 0 and explained["cause"] == "weights not known"
        assert "still being read" in explained["summary"] and explained["remedy"]
        assert explained["decided_by"] == "its files are still being read"
        let_go.set()
        assert eventually(lambda: report(app)["num_messages"] >= num_messages)
        assert eventually(lambda: report(app)["disk"] is not None)
        again, explained = go_on(app, before)
        assert again == answer and explained["cause"] == "nothing lost"
        assert again.num_cached_tokens > 100  # type: ignore[operator]


def test_what_is_to_be_forgotten_while_it_is_read_does_not_come_back(folder: Path, tmp_path: Path) -> None:
    """A session's records are forgotten in the file whose model is not known yet, and DELETE of all empties it."""
    said = {"one": "WHISPER", "two": "MURMUR"}
    with serving_app(tmp_path, model_path=str(folder), enable_request_logging=False) as app:
        for session, word in said.items():
            app.chat([SYSTEM, {"role": "user", "content": word}], session_id=session)

    def held(word: str) -> bool:
        return any(word.encode() in path.read_bytes() for path in (tmp_path / "kv").glob("records-*/*"))

    assert held("WHISPER") and held("MURMUR")
    with digest_held_back() as let_go, serving_app(tmp_path, model_path=str(folder)) as app:
        with app.connect() as client:
            client.request("DELETE", "/v1/cache?session=one", None, {"Connection": "close"})
        assert not held("WHISPER") and held("MURMUR")
        app.clear_cache()
        assert not held("MURMUR")
        let_go.set()
        assert eventually(lambda: state(app) == "known")
        assert report(app)["num_messages"] == 0


def test_a_server_ends_while_it_is_read(folder: Path, tmp_path: Path) -> None:
    """`serving_app` checks that no thread is left; the records that have no file leave none."""
    with digest_held_back(), serving_app(tmp_path, model_path=str(folder)) as app:
        talk(app, num_turns=1)
    assert not list((tmp_path / "kv").rglob(FILE_NAME)) and not (tmp_path / "kv" / MEMORY_FILE).exists()


def two_models(folder: Path) -> dict[str, Any]:
    models = folder.parent / "models"
    models.mkdir()
    (models / "other").symlink_to(tiny_model("gemma3"))
    (models / "own").symlink_to(folder)
    return {"model_path": str(models / "own"), "model_folders": (str(models),)}


def ask(app: AppUnderTest, model: str) -> Any:
    response = app.post(CHAT_PATH, chat_body(FIRST, model=model, session_id="one"))
    assert response.status == 200
    return response.json


@pytest.mark.long
def test_a_swap_does_not_wait_for_the_digest(folder: Path, tmp_path: Path) -> None:
    """Its reading ends with the model; when it comes back it is read, and what it remembered meanwhile is written."""
    with digest_held_back() as let_go, serving_app(tmp_path, **two_models(folder)) as app:
        own = app.app.resolve_model(None).name
        ask(app, own)
        assert ask(app, "other")["model"] == "other"
        let_go.set()
        assert eventually(lambda: state(app) == "known")
        ask(app, own)
        assert eventually(lambda: state(app) == "known" and report(app)["record_disk_bytes"] > 0)
        assert report(app)["num_messages"] == 3


def test_a_model_that_changed_while_it_was_away_is_described_anew(folder: Path, tmp_path: Path) -> None:
    """Template and tokenizer were read before: when it comes back its prompts are those of its files now, and its
    records those of the model that it is now."""
    with serving_app(tmp_path, **two_models(folder)) as app:
        own = app.app.resolve_model(None).name
        before = ask(app, own)["usage"]["prompt_tokens"]
        ask(app, "other")
        edit(folder / "chat_template.jinja", "{%", "Think of the sea and of all that lives in it. {%")
        assert ask(app, own)["usage"]["prompt_tokens"] > before
        assert report(app)["num_messages"] == 3
        assert any("described anew" in line for line in app.lines())


@contextlib.contextmanager
def changing_while_it_loads(folder: Path, tmp_path: Path) -> Iterator[AppUnderTest]:
    """A server that has loaded a model of which a file changed meanwhile; afterwards the file is as before."""
    path, see = folder / "generation_config.json", kvserve.engine.engine_start.with_images_tried
    held = path.read_bytes()

    def changing(*arguments: Any) -> Any:
        path.write_text("{} ")
        return see(*arguments)

    with unstarted_app(tmp_path, model_path=str(folder)) as app, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvserve.engine.engine_start, "with_images_tried", changing)
        app.app.start(threading.Event())
        yield app
    path.write_bytes(held)


def test_a_model_that_changes_while_it_loads_is_served_from_ram(folder: Path, tmp_path: Path) -> None:
    """No record and no KV of it on disk, in none of the files of before either; what they hold stays."""
    with serving_app(tmp_path, model_path=str(folder)) as app:
        before = talk(app)
        num_messages = report(app)["num_messages"]
    with changing_while_it_loads(folder, tmp_path) as app:
        assert state(app) == "unknown" and report(app)["num_messages"] == 0
        answer, explained = go_on(app, before)
        assert answer.num_cached_tokens == 0 and explained["cause"] == "weights not known"
        assert "generation_config.json changed" in explained["decided_by"]
    with serving_app(tmp_path, model_path=str(folder)) as app:
        assert report(app)["num_messages"] == num_messages
        assert go_on(app, before)[1]["cause"] == "nothing lost"


def test_a_cache_that_is_emptied_by_a_model_without_a_name_is_empty(folder: Path, tmp_path: Path) -> None:
    """What may be its own is on disk under a name that nobody knows: nothing of it comes back."""
    with serving_app(tmp_path, model_path=str(folder)) as app:
        talk(app)
    with changing_while_it_loads(folder, tmp_path) as app:
        app.clear_cache()
    with serving_app(tmp_path, model_path=str(folder)) as app:
        assert report(app)["num_messages"] == report(app)["disk_bytes"] == 0
