"""Why was a raw prompt computed again? Causes planted in prompts without messages, with a real server and over HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.laws import sampled
from tests.models import tiny_model
from tests.serving import COMPLETION_PATH, AppUnderTest, encode_request, eventually, serving_app, slow_prefill

TEXT = " ".join(f"Place {number} is looked at, and what is there is said in few words." for number in range(20))
SETTINGS: dict[str, Any] = {
    "prompt_cache_max_entries_global": 1000,
    "prompt_cache_max_entries_per_session": 100,
    "max_kv_size": 32768,
}

SESSION = {"session_id": "raw"}
"""Without a session nobody knows whose an earlier prompt was."""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A dense model that reads slowly."""
    with serving_app(tmp_path_factory.mktemp("raw"), "qwen3", prefill_step_size=16, **SETTINGS) as app:
        yield app


def ask(app: AppUnderTest, prompt: str, *, key: str = "", **fields: Any) -> tuple[str, dict[str, Any]]:
    """What the model wrote, and the explanation of the request."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body: Any = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **SESSION, **fields}
    response = app.post(COMPLETION_PATH, body, headers)
    assert response.status == 200, response.body
    body = response.json
    told = app.get(f"/v1/cache/explain/{body['id']}", headers)
    assert told.status == 200
    return body["choices"][0]["text"], dict(told.json)


def test_a_changed_character(app: AppUnderTest) -> None:
    """The place is the character of the text; message there is none. Line, sentence and remedy say it too."""
    app.clear_cache()
    ask(app, TEXT)
    place = TEXT.index("Place 7") + len("Place ")
    _, told = ask(app, TEXT[:place] + "X" + TEXT[place + 1 :])
    assert told["cause"] == "prompt changed", told
    difference = told["first_difference"]
    assert (difference["message_index"], difference["role"], difference["char"]) == (None, "prompt", place)
    assert "Place 7" in difference["before"] and "Place X" in difference["after"]
    assert 0 < told["cached_tokens"] <= told["num_shared_tokens"] < told["num_prompt_tokens"] / 2
    assert f"character {place}" in told["summary"] and "Put what changes behind" in told["remedy"]
    assert f"why: prompt changed (character {place})" in app.line_of(told["request_id"])
    misses: Any = app.app.observability.dashboard()["misses"]
    assert "Place" not in str(misses), "no text of it on the page"


def test_what_goes_on_lost_nothing(app: AppUnderTest) -> None:
    """The same again, and the same with its answer and more behind it."""
    app.clear_cache()
    said, first = ask(app, TEXT)
    assert (first["cause"], first["tier"], first["first_difference"]) == ("new prompt", "nothing", None)
    _, again = ask(app, TEXT)
    assert (again["cause"], again["before"]) == ("nothing lost", first["request_id"])
    assert again["cached_tokens"] == again["num_prompt_tokens"] - 1
    _, more = ask(app, f"{TEXT}{said}\nAnd then? {'More of it. ' * 20}")
    assert (more["cause"], more["first_difference"]) == ("nothing lost", None), more
    assert more["cached_tokens"] >= again["num_prompt_tokens"] - 8


def test_another_question_behind_a_known_beginning_is_new(app: AppUnderTest) -> None:
    """Nothing is said to be lost: no text that was there before was read again."""
    app.clear_cache()
    ask(app, f"{TEXT}\nQuestion: what is in place 3, and who has seen it there last?\nAnswer:")
    _, told = ask(app, f"{TEXT}\n{'Task: count all places that are empty. ' * 8}\nAnswer:")
    assert (told["cause"], told["first_difference"], told["remedy"]) == ("new prompt", None, None), told
    assert told["cached_tokens"] > 100
    assert "why:" not in app.line_of(told["request_id"])


def test_another_session_is_not_compared_with(app: AppUnderTest) -> None:
    """Nobody is shown what stood in another session's prompt."""
    app.clear_cache()
    ask(app, TEXT, session_id="one")
    _, told = ask(app, TEXT.replace("Place 7", "Place X"), session_id="two")
    assert (told["cause"], told["first_difference"], told["before"]) == ("new prompt", None, None)


@pytest.mark.long
def test_an_abort(app: AppUnderTest) -> None:
    """The client left in the middle of the prefill: what it had computed is reused."""
    app.clear_cache()
    prompt, before = f"{TEXT} {'And so on, place by place. ' * 60}", app.num_forward_calls
    with slow_prefill():
        with app.connect() as client:
            client.send(
                encode_request("POST", COMPLETION_PATH, {"prompt": prompt, "max_tokens": 4, "stream": True, **SESSION})
            )
            assert eventually(lambda: app.num_forward_calls > before + 5)
        assert eventually(app.is_idle)
    assert eventually(lambda: any("cancelled" in line for line in app.lines()))
    _, told = ask(app, prompt)
    assert told["cause"] == "aborted", told
    assert 0 < told["cached_tokens"] < told["num_shared_tokens"]


@pytest.mark.long
def test_an_evicted_prompt(tmp_path: Path) -> None:
    """Another prompt took its place in a cache that has room for one."""
    with serving_app(tmp_path, "qwen3", disk_cache="off", **SETTINGS) as app:
        ask(app, TEXT)
        num_bytes = app.get("/v1/cache").json["ram_bytes"]
    settings = {**SETTINGS, "prompt_cache_max_bytes": int(1.2 * num_bytes)}
    with serving_app(tmp_path, "qwen3", disk_cache="off", **settings) as app:
        _, first = ask(app, TEXT)
        ask(app, f"Something else. {TEXT}", max_tokens=1)
        num_tokens = first["num_prompt_tokens"]
        assert eventually(lambda: app.get("/v1/cache").json["num_evicted_tokens"] > num_tokens / 2)
        _, told = ask(app, TEXT)
        assert (told["cause"], told["before"]) == ("evicted", first["request_id"]), told
        assert "PROMPT_CACHE_MAX_BYTES" in told["remedy"]


@pytest.mark.long
def test_another_model(tmp_path: Path) -> None:
    """It has been read, by a model whose KV means nothing to this one; that one is named."""
    folders = tmp_path / "models"
    folders.mkdir()
    (folders / "small").symlink_to(tiny_model("llama"))
    with serving_app(tmp_path, "qwen3", model_folders=(str(folders),), **SETTINGS) as app:
        ask(app, TEXT)
        _, told = ask(app, f"{TEXT} And more of it.", model="small")
        assert (told["cause"], told["decided_by"]) == ("other model", app.served.name), told
        _, told = ask(app, "Something else altogether. " * 20, model="small")
        assert (told["cause"], told["decided_by"]) == ("new prompt", None)
        _, told = ask(app, f"{TEXT[:1100]}{' Another question.' * 50}")
        assert (told["cause"], told["decided_by"]) == ("new prompt", None), "it had read the beginning itself"
        assert told["cached_tokens"] > 64, told


def test_another_model_that_somebody_else_asked(tmp_path: Path) -> None:
    """What another key, user or session asked of it is not told, nor what nobody knows whose it was, nor what was
    forgotten. The first one is the control."""
    folders = tmp_path / "models"
    folders.mkdir()
    (folders / "small").symlink_to(tiny_model("llama"))
    everybody: list[dict[str, Any]] = [SESSION, {"key": "one"}, {"user": "otto"}, {"session_id": "two"}]
    text = TEXT[:500]
    everybody += [{"session_id": None}, {"session_id": "forgotten"}]
    with serving_app(tmp_path, "qwen3", model_folders=(str(folders),), **SETTINGS) as app:
        first = app.served.name
        for number, other in enumerate(everybody):  # this model reads each for the first time
            ask(app, f"{number}. {text}", **(other if None in other.values() or "forgotten" in other.values() else {}))
        with app.connect() as client:
            assert client.request("DELETE", "/v1/cache?session=forgotten", None, {"Connection": "close"}).status == 200
        for number, other in enumerate(everybody):
            _, told = ask(app, f"{number}. {text} And more of it.", model="small", **other)
            expected = ("other model", first) if other == SESSION else ("new prompt", None)
            assert (told["cause"], told["decided_by"]) == expected, other


@pytest.mark.parametrize("family", sampled(["qwen3_5", "gemma3"], ("qwen3_5",)))
def test_a_model_whose_states_are_kept_at_some_places_only(tmp_path: Path, family: str) -> None:
    """A raw prompt has one at its end, so what goes on behind it loses nothing. Where prompts part within it there is
    none, and what is computed again is not called reused; a change is one all the same."""
    with serving_app(tmp_path, family, **SETTINGS) as app:
        said, _ = ask(app, TEXT)
        longer = f"{TEXT}{said} {'And more of it. ' * 30}"
        num_tokens = len(app.served.tokenizer.encode(TEXT))
        other = f"{TEXT}\n{'Count all places that are empty. ' * 20}"
        for prompt, cause in ((TEXT, "nothing lost"), (longer, "nothing lost"), (other, "new prompt")):
            _, told = ask(app, prompt)
            assert (told["cause"], told["cached_tokens"] >= num_tokens - 1) == (cause, True), told
        half = TEXT[: TEXT.index("Place 10")]
        _, told = ask(app, half + "Nothing else is looked at. " * 3)
        assert (told["cause"], told["num_shared_tokens"] > 64, told["cached_tokens"]) == ("new prompt", True, 0), told
        _, told = ask(app, TEXT.replace("Place 7", "Place X"))
        assert (told["cause"], told["first_difference"]["char"]) == ("prompt changed", TEXT.index("7")), told


def test_a_prompt_in_other_tokens(app: AppUnderTest) -> None:
    """First as a token for every character, then as text: the same words, and nothing of them can be reused."""
    app.clear_cache()
    tokenizer = app.served.tokenizer
    text = TEXT[:400]
    spelt = [token for char in text for token in tokenizer.encode(char)]
    assert tokenizer.decode(spelt) == text and len(spelt) > 2 * len(tokenizer.encode(text))
    response = app.post(COMPLETION_PATH, {"prompt": spelt, "max_tokens": 2, "temperature": 0, **SESSION})
    assert response.status == 200
    _, told = ask(app, text)
    assert told["cause"] == "tokenised differently", told
    assert told["first_difference"]["role"] == "prompt" and told["first_difference"]["char"] < 16
