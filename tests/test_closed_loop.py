"""The server's own answers, echoed the way clients echo them: what the model read and wrote is not prefilled again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents import STYLES, TELLING, THINKS, Conversation, EchoStyle, common_length, send
from tests.laws import THREE_KINDS, TWO_KINDS, sampled, sampled_cells
from tests.serving import AppUnderTest, serving_app, writing

SYSTEM = {"role": "system", "content": "You look at places and say what is there. " * 2}
FAMILIES = ("qwen3", "qwen3_5", "gemma3", "glm4_moe_lite")
EVERY_RUN = THREE_KINDS
"""Latent caches can be cut like plain ones."""
SETTINGS = {"prompt_cache_max_entries_global": 1000, "prompt_cache_max_entries_per_session": 100, "max_kv_size": 32768}


@pytest.fixture(scope="module", params=sampled(FAMILIES, EVERY_RUN))
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp(str(request.param)), str(request.param), **SETTINGS) as app:
        app.family = str(request.param)  # type: ignore[attr-defined]
        yield app


def start(app: AppUnderTest, style: EchoStyle, *, thinking: bool) -> Conversation:
    """A conversation of its own: its first words are nobody else's."""
    family: str = app.family  # type: ignore[attr-defined]
    name = f"{style.name} {thinking}"
    user = {"role": "user", "content": f"Look around for {name}."}
    return Conversation(app, family, style, thinking and family in THINKS, [dict(SYSTEM), user])


def go_on(talk: Conversation, turn: int) -> None:
    """One turn: two of three are calls with their results, the third ends with the user's next words. The first answer
    is long enough to show of all that they were given to who sends it back."""
    calls = talk.family in ("qwen3", "qwen3_5", "glm4_moe_lite") and turn % 3 != 2
    talk.ask(
        f"Number {turn} is a < b.",
        f"It is {turn},\n so there is more to be seen on it than I thought. {TELLING if turn == 0 else ''}",
        f"hill {turn}" if calls else None,
    )
    if calls:
        talk.answer_calls(f"a tree {turn}")
    else:
        talk.say(f"And then, after {turn}?")


def reusable(talk: Conversation, turn: int) -> int:
    """Tokens of a request that were in the one before, its answer included: what nobody needs to compute again.

    Read off the prompts alone. The stop token is one of them where the template goes on with it.
    """
    before, now = talk.turns[turn - 1], talk.turns[turn]
    shared = common_length(before.prompt_ids, now.prompt_ids)
    return before.num_tokens if shared == len(before.prompt_ids) else shared


def is_in_every_run(app: str, style: EchoStyle, thinking: bool) -> bool:
    """Thinking that is put back, where layers hold states and where they can be cut."""
    return thinking and style.name == "stripped" and app in TWO_KINDS


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "plain"])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
@sampled_cells(is_in_every_run)
def test_every_turn_starts_where_the_last_one_ended(app: AppUnderTest, style: EchoStyle, thinking: bool) -> None:
    """Prompt and completion of the turn before are reused, but for what the template itself writes differently."""
    talk = start(app, style, thinking=thinking)
    if thinking and not talk.thinking:
        pytest.skip("the family does not think")
    for turn in range(4):
        go_on(talk, turn)
    for turn in range(1, 4):
        asked = talk.turns[turn]
        # A carrier that is gone takes the answer to it along; a template may drop what it thought before.
        assert asked.num_cached_tokens >= reusable(talk, turn) - 8, (turn, asked.explanation)
        assert asked.explanation["exact_key_rejected_by_model_lcp"] == 0
        if asked.explanation["cause"] == "nothing lost" and not style.carries:
            before = talk.turns[turn - 1]
            assert asked.num_cached_tokens >= before.num_tokens - 8, (turn, asked.explanation)
            assert asked.explanation["source"] == f"request {before.explanation['request_id']}"
    causes = {asked.explanation["cause"] for asked in talk.turns[1:]}
    allowed = {"nothing lost"} | ({"volatile value"} if style.carries else set())
    if talk.thinking and talk.family == "qwen3":  # its template drops old thinking after a user's words, always
        allowed.add("thinking dropped")
    assert causes <= allowed, causes


@pytest.mark.long
@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "plain"])
def test_a_long_tool_loop_reuses_every_turn(app: AppUnderTest, thinking: bool) -> None:
    """Forty calls in a row, stripped of their thinking by the client: each turn starts where the last one ended."""
    talk = start(app, EchoStyle(f"loop {thinking}", None, own_ids=True, compact=True), thinking=thinking)
    if thinking and not talk.thinking:
        pytest.skip("the family does not think")
    for turn in range(40):
        talk.ask("Next.", f"I go on to the next hill. {TELLING}", f"h{turn}")
        talk.answer_calls(f"tree {turn}")
    assert [asked.body["choices"][0]["finish_reason"] for asked in talk.turns] == ["tool_calls"] * 40
    lost = [before.num_tokens - now.num_cached_tokens for before, now in zip(talk.turns, talk.turns[1:], strict=False)]
    assert max(lost) <= 8, lost
    assert {asked.explanation["cause"] for asked in talk.turns[1:]} == {"nothing lost"}


@pytest.mark.long
@pytest.mark.parametrize("app", sampled(FAMILIES, ("qwen3_5",)), indirect=True)
def test_without_replay_the_same_conversation_loses(app: AppUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with nothing put back, stripped thinking costs the turns that had some."""
    talk = start(app, EchoStyle("control", None, own_ids=True, compact=True), thinking=True)
    if not talk.thinking:
        pytest.skip("the family does not think")
    talk.fields = {"cache_mode": "prefix"}
    for turn in range(3):
        go_on(talk, turn)
    assert any(talk.turns[turn].num_cached_tokens < talk.turns[turn - 1].num_tokens - 8 for turn in (1, 2))


def test_an_answer_that_a_stop_string_ended_is_said_again(tmp_path: Path) -> None:
    """The string and what the model wrote behind it are no part of the answer: its echo has the tokens before them."""
    with serving_app(tmp_path, "qwen3", **SETTINGS) as app:
        app.family = "qwen3"  # type: ignore[attr-defined]
        talk = start(app, STYLES[0], thinking=False)
        talk.fields = {"session_id": "one"}
        asked = talk.ask("", "It is a hill.STOP or a tree", stop=["STOP"])
        assert asked.body["choices"][0]["message"]["content"] == "It is a hill."
        talk.say("And then?")
        assert talk.ask("", "A tree.").explanation["cause"] == "nothing lost"
        [file] = [file for day in (tmp_path / "logs").iterdir() for file in day.iterdir()]
        assert "num_replayed_turns=1" in file.read_text("utf-8").splitlines()[1]


@pytest.mark.parametrize("family", sampled(TWO_KINDS, ("qwen3_5",)))
def test_an_answer_with_another_stop_token_than_the_templates_is_reused(family: str, tmp_path: Path) -> None:
    """The next prompt has the template's own: a recurrent state is kept from before the one that the model wrote."""
    with serving_app(tmp_path, family, **SETTINGS) as app:
        app.family = family  # type: ignore[attr-defined]
        talk = start(app, STYLES[0], thinking=family == "qwen3_5")
        thought = "Hm.\n</think>\n\n" if talk.thinking else ""
        with writing(app, f"{thought}It is a hill. {TELLING}<|endoftext|>", ends=False) as script:
            asked = send(app, talk.request(**script))
        assert asked.body["choices"][0]["finish_reason"] == "stop"
        talk.messages.append(talk.style.echo(asked.body["choices"][0]["message"], 0))
        talk.say("And then?")
        assert talk.ask("Hm.", "A tree.").num_cached_tokens >= asked.num_tokens - 2


def test_the_loop_leaves_its_folder_clean(tmp_path: Path) -> None:
    """A session without an id is traced under a hash, with what was known of it."""
    with serving_app(tmp_path, "qwen3", **SETTINGS) as app:
        app.family = "qwen3"  # type: ignore[attr-defined]
        talk = start(app, STYLES[2], thinking=True)
        for turn in range(2):
            go_on(talk, turn)
        [day] = list((tmp_path / "logs").iterdir())
        [file] = list(day.iterdir())
        lines = file.read_text("utf-8").splitlines()
    assert len(lines) == 2
    assert "stable_prefix_msg_count=3" in lines[1] and "canonical_prompt=" in lines[1], lines[1][:400]
