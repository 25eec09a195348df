"""The server's own answers, echoed as clients of Anthropic's API and of Responses do: nothing is prefilled again."""

from collections.abc import Iterator

import pytest

from tests.agents import TELLING
from tests.laws import TWO_KINDS, sampled, sampled_cells
from tests.serving import AppUnderTest, serving_app
from tests.wire_agents import ANTHROPIC_WIRES, RESPONSES_WIRES, Talk, Wire

SETTINGS = {"prompt_cache_max_entries_global": 1000, "prompt_cache_max_entries_per_session": 100, "max_kv_size": 32768}
WIRES = (*ANTHROPIC_WIRES, *RESPONSES_WIRES)
NUM_TURNS = 4
"""Two calls, an answer, and what follows a person's words."""
TOLERANCE = 8
"""Tokens at the end of a turn that a template may write otherwise, such as the end of an answer."""


@pytest.fixture(scope="module", params=TWO_KINDS)
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp(str(request.param)), str(request.param), **SETTINGS) as app:
        app.family = str(request.param)  # type: ignore[attr-defined]
        yield app


def start(app: AppUnderTest, wire: Wire, name: str, *, thinking: bool) -> Talk:
    """A conversation of its own: its first words are nobody else's."""
    talk = Talk(app, app.family, wire, thinking, [])  # type: ignore[attr-defined]
    talk.say(f"Look around for {name}, {wire.name}, {thinking}.")
    return talk


def go_on(talk: Talk, turn: int) -> None:
    """One turn: two of three are calls with their results, the third ends with the user's next words. The first answer
    is long enough to show of all that they were given to who sends it back."""
    calls = turn % 3 != 2
    talk.ask(
        f"Number {turn} is a < b.",
        f"It is {turn},\n so é, as far as one can see. {TELLING if turn == 0 else ''}",
        f"hill {turn}" if calls else None,
    )
    if calls:
        talk.answer_calls(f"a tree {turn}")
    else:
        talk.say(f"And then, after {turn}?")


def lost(talk: Talk) -> list[int]:
    """Per turn after the first, tokens of the turn before it that were prefilled again."""
    return [before.num_tokens - now.num_cached_tokens for before, now in zip(talk.turns, talk.turns[1:], strict=False)]


on_recurrent_states = pytest.mark.parametrize("app", sampled(TWO_KINDS, ("qwen3_5",)), indirect=True)
"""What comes back of an answer does not depend on the kind of layers."""


def is_in_every_run(app: str, wire: Wire, thinking: bool) -> bool:
    """With a model that goes on thinking, a wire that sends all back."""
    return thinking and app == "qwen3_5" and wire.name == "Claude Code"


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "plain"])
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
@sampled_cells(is_in_every_run)
def test_every_turn_starts_where_the_last_one_ended(app: AppUnderTest, wire: Wire, thinking: bool) -> None:
    """Prompt and completion of the turn before are reused, but for what the template itself writes differently."""
    talk = start(app, wire, "all", thinking=thinking)
    for turn in range(NUM_TURNS):
        go_on(talk, turn)
    drops_old_thinking = thinking and talk.family == "qwen3"  # after a user's words, whatever is asked for
    for turn in range(1, NUM_TURNS):
        asked = talk.turns[turn]
        assert asked.num_cached_tokens >= talk.reusable(turn) - TOLERANCE, (turn, asked.explanation)
        assert asked.explanation["exact_key_rejected_by_model_lcp"] == 0
        if not (drops_old_thinking and turn % 3 == 0):
            assert lost(talk)[turn - 1] <= TOLERANCE, (turn, lost(talk), asked.explanation)
    causes = {asked.explanation["cause"] for asked in talk.turns[1:]}
    assert causes <= {"nothing lost"} | ({"thinking dropped"} if drops_old_thinking else set()), causes


@pytest.mark.long
@on_recurrent_states
@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire.loses_thinking], ids=lambda wire: wire.name)
def test_without_replay_stripped_thinking_costs(app: AppUnderTest, wire: Wire) -> None:
    """The control: with nothing put back, the turns that had thinking are prefilled again."""
    talk = start(app, wire, "control", thinking=True)
    talk.extra = {"cache_mode": "prefix"}
    for turn in range(3):
        go_on(talk, turn)
    assert max(lost(talk)) > TOLERANCE


@pytest.mark.long
@on_recurrent_states
@pytest.mark.parametrize("wire", [ANTHROPIC_WIRES[0], RESPONSES_WIRES[0]], ids=lambda wire: wire.name)
def test_an_edited_answer_is_seen_and_costs(app: AppUnderTest, wire: Wire) -> None:
    """The other control: what a client changed of an answer reaches the model, and what follows it is prefilled."""
    talk = start(app, wire, "edit", thinking=False)
    go_on(talk, 0)
    text = str(talk.history[1])
    assert "It is 0" in text
    talk.history = _edited(talk.history)
    go_on(talk, 1)
    seen = app.served.tokenizer.decode(talk.turns[1].prompt_ids)
    assert "It was 0" in seen and "It is 0" not in seen
    assert lost(talk)[0] > TOLERANCE


def _edited(value: object) -> list[dict[str, object]]:
    """The history with one word of the answer changed."""

    def edit(part: object) -> object:
        if isinstance(part, dict):
            return {name: edit(inner) for name, inner in part.items()}
        if isinstance(part, list):
            return [edit(inner) for inner in part]
        return part.replace("It is 0", "It was 0") if isinstance(part, str) else part

    edited = edit(value)
    assert isinstance(edited, list)
    return edited
