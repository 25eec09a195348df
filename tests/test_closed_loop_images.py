"""The loops of `test_closed_loop.py` and its neighbour on a vision checkpoint: as text, behind a picture, and with a
screenshot in every result. What the model read and wrote is not prefilled again, and no picture is looked at twice."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.agents import STYLES, TELLING, Conversation, EchoStyle
from tests.engine.visions import data_url, picture
from tests.serving import AppUnderTest, serving_app
from tests.test_closed_loop import SETTINGS, go_on, reusable, start
from tests.test_closed_loop_protocols import WIRES, lost
from tests.test_closed_loop_protocols import go_on as go_on_talking
from tests.test_closed_loop_protocols import start as start_talking
from tests.wire_agents import Talk, Wire

TOLERANCE = 8
NUM_TURNS = 5
SHOWN = ("nothing", "a picture first", "screenshots")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    with serving_app(tmp_path_factory.mktemp("seeing"), "qwen3_5_vl", **SETTINGS) as app:
        app.family = "qwen3_5"  # type: ignore[attr-defined]  # its text model's words for calls and thinking
        yield app


pytestmark = pytest.mark.long
"""By default `test_closed_loop.py` says it of text, `test_http_images.py` of the pictures of a next turn."""


def shows(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(picture(number, 96, 64))}}


def report(app: AppUnderTest) -> tuple[int, int]:
    """Pictures that the tower looked at, and images that were cut."""
    body: Any = app.get("/v1/cache").json
    return body["num_tower_calls"], body["counters"]["vlm_retreat"]


def with_picture(message: dict[str, Any], number: int) -> None:
    """Put a picture of its own beside the text of a message or a result."""
    message["content"] = [{"type": "text", "text": message["content"]}, shows(number)]


def lead(app: AppUnderTest, style: EchoStyle, shown: str, *, thinking: bool, first_picture: int) -> Conversation:
    """A conversation of some turns that sees `shown`."""
    talk = start(app, style, thinking=thinking)
    talk.messages[1]["content"] += f" You see {shown}."
    if shown == "a picture first":
        with_picture(talk.messages[1], first_picture)
    for turn in range(NUM_TURNS):
        go_on(talk, turn)
        if shown == "screenshots" and talk.messages[-1]["role"] == "tool":
            with_picture(talk.messages[-1], first_picture + turn)
    return talk


@pytest.mark.parametrize(
    ("style", "shown", "thinking"),
    [
        pytest.param(
            style,
            shown,
            thinking,
            id=f"{style.name}-{shown}-{'thinking' if thinking else 'plain'}",
        )
        for style in STYLES
        for shown in SHOWN
        for thinking in (True, False)
    ],
)
def test_every_turn_starts_where_the_last_one_ended(
    app: AppUnderTest, style: EchoStyle, shown: str, thinking: bool
) -> None:
    """However the client echoes: prompt and completion of the turn before are reused, its pictures too."""
    app.clear_cache()
    num_calls, num_retreats = report(app)
    talk = lead(app, style, shown, thinking=thinking, first_picture=100)
    for turn in range(1, NUM_TURNS):
        asked = talk.turns[turn]
        assert asked.num_cached_tokens >= reusable(talk, turn) - TOLERANCE, (turn, asked.explanation)
        assert asked.explanation["exact_key_rejected_by_model_lcp"] == 0
        if asked.explanation["cause"] == "nothing lost" and not style.carries:
            assert asked.num_cached_tokens >= talk.turns[turn - 1].num_tokens - TOLERANCE, (turn, asked.explanation)
    causes = {asked.explanation["cause"] for asked in talk.turns[1:]}
    assert causes <= {"nothing lost"} | ({"volatile value"} if style.carries else set()), causes
    num_shown = {"nothing": 0, "a picture first": 1, "screenshots": 3}[shown]
    assert report(app) == (num_calls + num_shown, num_retreats)


def test_another_screenshot_in_the_history_is_seen(app: AppUnderTest) -> None:
    """The control: of a client that changes a picture of the history, all that follows it is prefilled again, and the
    tower looks at the new one."""
    app.clear_cache()
    talk = lead(app, STYLES[0], "screenshots", thinking=True, first_picture=200)
    num_calls, _ = report(app)
    place = next(i for i, message in enumerate(talk.messages) if message["role"] == "tool")
    talk.messages[place]["content"][1] = shows(300)
    before, now = talk.turns[-1], talk.ask("Hm.", "A tree.")
    spans = app.served.tokenizer.decode(before.prompt_ids).split("<|vision_start|>")[0]
    assert now.num_cached_tokens <= len(app.served.tokenizer.encode(spans)) + 1
    assert report(app) == (num_calls + 2, 0), "the changed one, and the newest result's"


def talk_shows(talk: Talk, wire: Wire, number: int) -> None:
    """Put a picture into the newest message or result, as the protocol writes it."""
    url = data_url(picture(number, 96, 64))
    base64 = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    part = {"type": "image", "source": base64} if wire.is_anthropic else {"type": "input_image", "image_url": url}
    newest = talk.history[-1]
    if newest.get("type") == "function_call_output":
        newest["output"] = [{"type": "input_text", "text": newest["output"]}, part]
    elif newest["content"][0]["type"] == "tool_result":
        result = newest["content"][0]
        result["content"] = [{"type": "text", "text": result["content"]}, part]
    else:
        newest["content"].append(part)


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
def test_every_turn_starts_where_the_last_one_ended_in_other_protocols(app: AppUnderTest, wire: Wire) -> None:
    """A picture in the first message, and one in every result."""
    app.clear_cache()
    num_calls, num_retreats = report(app)
    talk = start_talking(app, wire, "pictures", thinking=True)
    talk_shows(talk, wire, 400)
    for turn in range(NUM_TURNS):
        go_on_talking(talk, turn)
        if turn % 3 != 2:
            talk_shows(talk, wire, 401 + turn)
    for turn in range(1, NUM_TURNS):
        asked = talk.turns[turn]
        assert asked.num_cached_tokens >= talk.reusable(turn) - TOLERANCE, (turn, asked.explanation)
        assert asked.explanation["exact_key_rejected_by_model_lcp"] == 0
    assert max(lost(talk)) <= TOLERANCE, lost(talk)
    assert {asked.explanation["cause"] for asked in talk.turns[1:]} == {"nothing lost"}
    assert report(app) == (num_calls + 4, num_retreats)


@pytest.mark.parametrize("shown", SHOWN[:2])
def test_a_long_tool_loop_reuses_every_turn(app: AppUnderTest, shown: str) -> None:
    """Forty calls in a row, stripped of their thinking by the client, with and without a picture before them."""
    app.clear_cache()
    num_calls, num_retreats = report(app)
    talk = start(app, EchoStyle(f"loop {shown}", None, own_ids=True, compact=True), thinking=True)
    if shown == "a picture first":
        with_picture(talk.messages[1], 500)
    for turn in range(40):
        talk.ask("Next.", f"Go on to the next branch. {TELLING}", f"h{turn}")
        talk.answer_calls(f"tree {turn}")
    again = [before.num_tokens - now.num_cached_tokens for before, now in zip(talk.turns, talk.turns[1:], strict=False)]
    assert max(again) <= TOLERANCE, again
    assert {asked.explanation["cause"] for asked in talk.turns[1:]} == {"nothing lost"}
    assert report(app) == (num_calls + (shown == "a picture first"), num_retreats)
