"""A conversation goes on after a restart as if there had been none: the model reads what it would have read."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvserve.config import DiskMode
from kvserve.sessions.archive_file import FILE_NAME
from tests.agents import STYLES, TELLING, Conversation, EchoStyle
from tests.laws import IS_FULL, sampled
from tests.serving import AppUnderTest, serving_app

SYSTEM = {"role": "system", "content": "You look at places and say what is there. " * 2}
STRIPPED = next(style for style in STYLES if style.name == "stripped")
NUM_TURNS = 3 if IS_FULL else 2


@contextmanager
def server(folder: Path, family: str, **settings: Any) -> Iterator[AppUnderTest]:
    with serving_app(folder, family, enable_request_logging=False, **settings) as app:
        yield app


def conversation(app: AppUnderTest, family: str, style: EchoStyle, **fields: Any) -> Conversation:
    """Of a client whose messages come back whole nothing but its answers say whose it is; a carrier that is gone makes
    another conversation of it, which after a restart only the name of its session joins."""
    user = {"role": "user", "content": "Look around."}
    session = {"session_id": "one"} if style.carries else {}
    return Conversation(app, family, style, True, [dict(SYSTEM), user], {**session, **fields})


def go_on(talk: Conversation, turn: int, *, shows: bool = True) -> None:
    """A call and its result, or the user's next words, by turns. The first answer is long enough to show of all that
    they were given to who sends it back; who only says something needs none such."""
    calls = talk.family != "gemma3" and turn % 2 == 0
    talk.ask(
        f"Number {turn} is a < b.",
        f"It is {turn},\n so, as far as one can see. {TELLING if shows and turn == 0 else ''}",
        f"hill {turn}" if calls else None,
    )
    if calls:
        talk.answer_calls(f"a tree {turn}")
    else:
        talk.say(f"And then, after {turn}?")


def archives(folder: Path) -> list[Path]:
    return sorted((folder / "kv").glob(f"*/{FILE_NAME}"))


@pytest.mark.parametrize(
    ("family", "style"),
    [
        ("qwen3_5", STRIPPED),
        pytest.param("qwen3", STRIPPED, marks=pytest.mark.long),
        pytest.param("gemma3", STYLES[3], marks=pytest.mark.long),
        pytest.param("glm4_moe_lite", STYLES[1], marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_next_prompt_is_the_one_without_a_restart(tmp_path: Path, family: str, style: EchoStyle) -> None:
    """Some turns, a restart, one more: the model reads the very tokens that an uninterrupted server has it read, its
    own turns among them as it wrote them, it computes no more of them, and the explanation knows the request before."""
    with server(tmp_path / "whole", family) as app:
        whole = conversation(app, family, style)
        for turn in range(NUM_TURNS + 1):
            go_on(whole, turn)
    with server(tmp_path / "cut", family) as app:
        talk = conversation(app, family, style)
        for turn in range(NUM_TURNS):
            go_on(talk, turn)
        before = app.get("/v1/cache").json
    with server(tmp_path / "cut", family) as app:
        talk.app = app
        after = app.get("/v1/cache").json
        for name in ("num_messages", "num_sessions", "num_branches", "num_healing_entries", "record_bytes"):
            assert after[name] == before[name] > 0, name
        go_on(talk, NUM_TURNS)
    assert talk.turns[NUM_TURNS].num_cached_tokens == whole.turns[NUM_TURNS].num_cached_tokens
    assert talk.turns[NUM_TURNS].prompt_ids == whole.turns[NUM_TURNS].prompt_ids
    assert talk.turns[NUM_TURNS].explanation["before"] is not None
    assert talk.turns[NUM_TURNS].explanation["exact_key_rejected_by_model_lcp"] == 0


@pytest.mark.long
def test_without_records_the_next_prompt_is_another_one(tmp_path: Path) -> None:
    """The control: the same restart with nothing kept loses the thinking that the client strips."""
    with server(tmp_path / "with", "qwen3_5") as app:
        talk = conversation(app, "qwen3_5", STRIPPED)
        go_on(talk, 0)
    shutil.copytree(tmp_path / "with", tmp_path / "without")
    [file] = archives(tmp_path / "without")
    file.unlink()
    prompts = []
    for name in ("with", "without"):
        with server(tmp_path / name, "qwen3_5") as app:
            again = conversation(app, "qwen3_5", STRIPPED)
            again.messages = [dict(message) for message in talk.messages]
            go_on(again, 1)
            prompts.append(again.turns[0].prompt_ids)
    assert prompts[0] != prompts[1] and len(prompts[0]) > len(prompts[1])


def test_a_cleared_cache_stays_empty(tmp_path: Path) -> None:
    """DELETE /v1/cache empties the disk too, at once: no word is left in the file, and the next start knows nothing."""
    with server(tmp_path, "qwen3") as app:
        talk = conversation(app, "qwen3", STRIPPED)
        go_on(talk, 0, shows=False)
        [file] = archives(tmp_path)
        app.served.conversations.flush()
        assert app.get("/v1/cache").json["record_disk_bytes"] > 0
        app.clear_cache()
        held = b"".join(path.read_bytes() for path in file.parent.iterdir())
        assert b"Look around" not in held and app.get("/v1/cache").json["num_messages"] == 0
    with server(tmp_path, "qwen3") as app:
        report = app.get("/v1/cache").json
        assert (report["num_messages"], report["num_sessions"], report["num_healing_entries"]) == (0, 0, 0)


def test_a_request_with_ttl_0_leaves_nothing_behind(tmp_path: Path) -> None:
    """Nothing that it said or was told is in any file of the records; what others said is."""
    with server(tmp_path, "qwen3") as app:
        secret = conversation(app, "qwen3", STRIPPED, ttl=0)
        secret.messages[1]["content"] = "WHISPER"
        go_on(secret, 0, shows=False)
        go_on(conversation(app, "qwen3", STRIPPED), 0, shows=False)
        app.served.conversations.flush()
        [file] = archives(tmp_path)
        held = b"".join(path.read_bytes() for path in file.parent.iterdir())
        assert b"WHISPER" not in held and b"Look around" in held


def test_a_broken_file_is_begun_anew(tmp_path: Path) -> None:
    """Said on the screen, counted in the report; the server answers, and keeps records again."""
    with server(tmp_path, "qwen3") as app:
        go_on(conversation(app, "qwen3", STRIPPED), 0, shows=False)
    [file] = archives(tmp_path)
    held = bytearray(file.read_bytes())
    held[len(held) // 2 :] = bytes(len(held) - len(held) // 2)
    file.write_bytes(held)
    with server(tmp_path, "qwen3") as app:
        assert "begin anew" in app.screen.getvalue()
        assert app.get("/v1/cache").json["num_record_faults"] == 1
        go_on(conversation(app, "qwen3", STRIPPED), 0, shows=False)
    with server(tmp_path, "qwen3") as app:
        report = app.get("/v1/cache").json
        assert report["num_messages"] > 0 and report["num_record_faults"] == 0


@pytest.mark.parametrize("disk_cache", sampled(("off", "ephemeral"), {"ephemeral"}))
def test_without_a_disk_cache_nothing_is_written(tmp_path: Path, disk_cache: DiskMode) -> None:
    """`--no-disk-cache` and `--ephemeral-cache` leave no file of records, also while the server runs."""
    with serving_app(tmp_path, "qwen3", disk_cache=disk_cache) as app:
        go_on(conversation(app, "qwen3", STRIPPED), 0, shows=False)
        assert app.get("/v1/cache").json["num_messages"] > 0
        assert archives(tmp_path) == [] and not list(tmp_path.rglob("*.sqlite"))
