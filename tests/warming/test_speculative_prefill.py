"""Next-turn warming over HTTP: what a session's next request begins with is computed before it comes."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvserve.engine.warming import Warming, WarmJob
from kvserve.engine.worker import Engine
from kvserve.warming.next_turn_predictor import MIN_NEW_TOKENS, NextTurnPredictor
from kvserve.warming.speculative_prefill import SpeculativePrefill
from tests import agents
from tests.agents import STYLES, TELLING, Asked, Conversation, EchoStyle
from tests.laws import IS_FULL, sampled, sampled_cells
from tests.serving import CHAT_PATH, AppUnderTest, Chat, chat_body, encode_request, eventually, serving_app

SYSTEM = {"role": "system", "content": "You look at places and say what is there. " * 2}
KEPT, CARRIED = STYLES[0], STYLES[3]
SETTINGS: Mapping[str, Any] = {
    "prompt_cache_max_entries_global": 1000,
    "prompt_cache_max_entries_per_session": 100,
    "max_kv_size": 32768,
    "preserve_thinking": False,
    "warm_max_time_share": 1.0,
}
"""Templates that could keep old thinking are not asked to, and the engine's share of time is no part of these tests."""

THOUGHT, SAID = "Where is it, then? " * 3, f"It is over there. {TELLING}"
NUM_TURNS = 4 if IS_FULL else 3
FAMILIES = ("qwen3", "qwen3_5")
"""Layers that can be cut anywhere, and states that cannot."""

ONE_FAMILY = pytest.mark.parametrize("app", ["qwen3_5"], indirect=True)
CUTTABLE = pytest.mark.parametrize("app", ["qwen3"], indirect=True)


@pytest.fixture(scope="module")
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    folder = tmp_path_factory.mktemp(str(request.param))
    with serving_app(folder, str(request.param), warm_next_turn=True, **SETTINGS) as app:
        app.family = str(request.param)  # type: ignore[attr-defined]
        yield app


def warming(app: AppUnderTest) -> Mapping[str, Any]:
    """What GET /v1/cache says of it."""
    return dict(app.get("/v1/cache").json["warming"])


def guesser(app: AppUnderTest) -> SpeculativePrefill:
    found = app.app._next_turns
    assert found is not None
    return found


def settle(app: AppUnderTest) -> None:
    """Wait until every turn is over, which is a moment after its last byte, and all that was guessed is computed."""

    def is_through() -> bool:
        guesses = guesser(app)
        return not guesses._running and guesses.num_pending == 0 and warming(app)["num_jobs_waiting"] == 0

    assert eventually(is_through, 60), warming(app)


def start(app: AppUnderTest, style: EchoStyle, about: str) -> Conversation:
    family: str = app.family  # type: ignore[attr-defined]
    user = {"role": "user", "content": f"Look around for {about}."}
    return Conversation(app, family, style, True, [dict(SYSTEM), user])


def said(turn: int) -> str:
    """The first answer shows of all that they were given to who sends it back."""
    return f"{turn}: {SAID}" if turn == 0 else f"{turn}: It is over there, behind the other one, as far as one can see."


def num_new_tokens(app: AppUnderTest, asked: Asked, text: str) -> int:
    """Tokens of a prompt from the newest words on: these words, what the client puts behind them, and the tail."""
    ids, prompt = tuple(app.served.tokenizer.encode(text)), asked.prompt_ids
    starts = [start for start in range(len(prompt)) if prompt[start : start + len(ids)] == ids]
    return len(prompt) - starts[-1]


def lead(talk: Conversation, *, pauses: bool) -> list[int]:
    """A tool loop, then a person's words: per request, the tokens that were computed although they were not new."""
    app, extra, text = talk.app, [], ""
    for turn in range(NUM_TURNS):
        calls = turn < NUM_TURNS - 2
        asked = talk.ask(f"{turn}: {THOUGHT}", said(turn), f"hill {turn}" if calls else None)
        if turn:
            num_prefilled = len(asked.prompt_ids) - asked.num_cached_tokens
            extra.append(num_prefilled - num_new_tokens(app, asked, text))
        text = f"A tree, number {turn}." if calls else f"And then, after {turn}?"
        if calls:
            talk.answer_calls(text)
        else:
            talk.say(text)
        if pauses:
            settle(app)
    return extra


@pytest.mark.parametrize("app", FAMILIES, indirect=True)
@pytest.mark.parametrize("style", [KEPT, CARRIED], ids=lambda style: style.name)
@sampled_cells(lambda app, style: app == "qwen3_5" and style.name == "carried")
def test_after_a_pause_only_what_is_new_is_prefilled(app: AppUnderTest, style: EchoStyle) -> None:
    """Where the template drops old thinking, and where every request ends with a message that the next one lacks."""
    before = warming(app)
    talk = start(app, style, f"what is {style.name}")
    extra = lead(talk, pauses=True)
    # Where only the end of the answer and a header are missing there is no job.
    assert max(extra) <= MIN_NEW_TOKENS, extra
    assert extra[-1] == 0, "a person's words follow dropped thinking"
    after = warming(app)
    assert after["num_used_tokens"] > before["num_used_tokens"]
    assert after["num_jobs_failed"] == 0 and after["num_wasted_tokens"] == before["num_wasted_tokens"]


@pytest.mark.long
@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3_5",)))
def test_without_warming_the_same_turns_prefill_more(family: str, tmp_path: Path) -> None:
    """The control: thinking that was dropped and answers behind a carrier are read again on the request's own time."""
    with serving_app(tmp_path, family, **SETTINGS) as app:
        app.family = family  # type: ignore[attr-defined]
        for style in (KEPT, CARRIED):
            extra = lead(start(app, style, f"what is {style.name}"), pauses=False)
            assert extra[-1] > 3 * MIN_NEW_TOKENS, extra
        assert warming(app)["num_jobs_done"] == 0


@ONE_FAMILY
def test_a_carrier_that_no_rule_knows_is_right_from_the_second_time_on(
    app: AppUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first guess of a client is wrong, the next one is right; another session of the client begins with that."""
    style = EchoStyle("noted", None, carries=True)
    tool = {**agents.TOOL, "function": {**agents.TOOL["function"], "description": f"Look, {app.served.name}."}}
    monkeypatch.setattr(agents, "TOOL", tool)  # a client of its own
    monkeypatch.setattr(agents, "CARRIER", {"role": "user", "content": "Context of this request only: it rains."})
    for number in range(2):
        talk = start(app, style, f"a note {number}")
        extra, text = [], ""
        num_turns = 3 if IS_FULL or number == 0 else 2
        for turn in range(num_turns):
            asked = talk.ask(f"{turn}: {THOUGHT}", said(turn))
            if turn:
                num_prefilled = len(asked.prompt_ids) - asked.num_cached_tokens
                extra.append(num_prefilled - num_new_tokens(app, asked, text))
            text = f"And then, after {turn}?"
            talk.say(text)
            settle(app)
        assert extra[1:] == [0] * (num_turns - 2)
        assert (extra[0] > MIN_NEW_TOKENS) == (number == 0), extra


def ways_to_go_on(app: AppUnderTest, *, pauses: bool) -> list[Chat]:
    """What is answered to a client that goes on as expected, and then goes back and edits. In this order: whoever was
    seen to edit is not guessed before it was seen to do otherwise, and when that is seen depends on pauses."""
    answers = []
    for about in ("expected", "edited"):
        talk = start(app, KEPT, about)
        talk.ask(THOUGHT, SAID)
        if pauses:
            settle(app)
        if about == "edited":
            talk.messages[1] = {"role": "user", "content": "Look around for something else entirely."}
        talk.say("And then?")
        answers.append(app.chat(talk.messages, tools=[agents.TOOL], max_tokens=12))
    return answers


@ONE_FAMILY
def test_a_wrong_guess_changes_no_answer(app: AppUnderTest, tmp_path: Path) -> None:
    """Greedy answers are those of a server that guesses nothing, whether what was computed ahead is used or not."""
    before = warming(app)
    guessed = ways_to_go_on(app, pauses=True)
    after = warming(app)
    assert after["num_jobs_done"] == before["num_jobs_done"] + 2
    used, warmed = (after[name] - before[name] for name in ("num_used_tokens", "num_warmed_tokens"))
    assert 0 < used < warmed
    with serving_app(tmp_path, app.family, **SETTINGS) as plain:  # type: ignore[attr-defined]
        plain.family = app.family  # type: ignore[attr-defined]
        assert ways_to_go_on(plain, pauses=False) == guessed


@CUTTABLE
@sampled_cells(lambda fields, **_: "ttl" in fields)
@pytest.mark.parametrize("fields", [{"cache_mode": "prefix"}, {"ttl": 0}], ids=["cache mode prefix", "ttl 0"])
def test_what_is_not_to_be_kept_is_not_guessed(app: AppUnderTest, fields: Mapping[str, Any]) -> None:
    """Nothing of such a session is computed ahead."""
    before = warming(app)
    talk = start(app, KEPT, f"something else {fields}")
    for turn in range(2):
        talk.ask(THOUGHT, f"{turn}: {SAID}", **fields)
        talk.say("And then?")
        settle(app)
    assert warming(app) == before


@CUTTABLE
def test_a_client_that_leaves_is_not_guessed(app: AppUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an answer is not what the next request will have."""
    asked: list[WarmJob] = []
    monkeypatch.setattr(Engine, "warm", lambda _, job: asked.append(job) or Warming(job))
    body = chat_body("Look around for long.", stream=True, max_tokens=4_000)
    with app.connect() as client:
        client.send(encode_request("POST", CHAT_PATH, body))
        client.read_head()
        while b"content" not in client.read_chunk():
            pass
    assert eventually(app.is_idle)
    settle(app)
    assert not asked


@CUTTABLE
def test_no_answer_waits_for_a_guess(app: AppUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is being made, requests are answered; one that fails is told and is not the last."""
    begun, may_end = threading.Event(), threading.Event()

    def stuck(*_: object) -> None:
        begun.set()
        may_end.wait(60)
        raise ValueError("no idea")

    with monkeypatch.context() as patch:
        patch.setattr(NextTurnPredictor, "job_after", stuck)
        app.chat("Look there.")
        assert begun.wait(60)
        app.chat("And there.")
        may_end.set()
        settle(app)
    assert any("could not be guessed: ValueError: no idea" in line for line in app.lines())
    before = warming(app)["num_jobs_done"]
    talk = start(app, KEPT, "the rest")
    talk.ask(THOUGHT, SAID)
    settle(app)
    assert warming(app)["num_jobs_done"] == before + 1


@CUTTABLE
def test_a_job_ends_when_its_request_has_come(app: AppUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was still waiting to be computed for it is wanted no more; jobs of one conversation share their name, and
    those of another one that goes on from the same turn do not."""
    asked: list[Warming] = []

    def warm(_: Engine, job: WarmJob) -> Warming:
        asked.append(Warming(job))
        return asked[-1]

    monkeypatch.setattr(Engine, "warm", warm)
    talk = start(app, KEPT, "two ways")
    for turn in range(2):
        talk.ask(f"{turn}: {THOUGHT}", f"{turn}: {SAID}")
        if turn == 0:
            fork = Conversation(app, talk.family, KEPT, True, [*talk.messages])
        talk.say("And then?")
        assert eventually(lambda: guesser(app).num_pending == 0)
    fork.say("Or there?")
    fork.ask(THOUGHT, SAID)
    assert eventually(lambda: guesser(app).num_pending == 0)
    assert [each.is_cancelled for each in asked] == [True, False, False]
    assert asked[0].job.key == asked[1].job.key != asked[2].job.key
