"""Fields that move although nothing was said, as clients were recorded to send them, over HTTP to a real tiny model."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.agents import TELLING, Asked, Conversation, EchoStyle
from tests.laws import TWO_KINDS, sampled, sampled_cells
from tests.serving import AppUnderTest, serving_app

PAIRS = Path(__file__).parent / "canonical" / "pairs"
SLACK_TOKENS = 8
"""What may be lost at the end of what is known: the tail behind which the answer began."""

FREE = ("cch", "billing_header", "total_tokens", "message_id", "inbound_context", "conversation_info", "run_statistics")
"""Rules whose fields cost nothing when they move, or when the client leaves them out and brings them again."""


@pytest.fixture(scope="module", params=TWO_KINDS)
def app(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppUnderTest]:
    """A dense model and a hybrid one."""
    with serving_app(tmp_path_factory.mktemp("served"), str(request.param)) as app:
        app.family = str(request.param)  # type: ignore[attr-defined]
        yield app


def lead(app: AppUnderTest, name: str, num_turns: int = 3, **fields: Any) -> list[Asked]:
    """Turns of one conversation that begins with the recorded form, the other one, the first one again."""
    pair = json.loads((PAIRS / f"{name}.json").read_text("utf-8"))
    app.clear_cache()
    talk = Conversation(app, app.family, EchoStyle("kept"), False, [], fields)  # type: ignore[attr-defined]
    rest: list[dict[str, Any]] = [{"role": "user", "content": "Look at the hill and say what is there. " * 2}]
    for number, form in enumerate(("seen", "sent", "seen")[:num_turns]):
        talk.messages[:] = [*pair[form], *rest]
        talk.ask("", f"It is hill {number}. {TELLING if number == 0 else ''}")
        talk.say(f"And hill {number}?")
        rest = talk.messages[len(pair[form]) :]
    return talk.turns


@pytest.mark.parametrize("name", FREE)
@sampled_cells(lambda app, name: app == "qwen3_5" and name == "cch")
def test_a_field_that_moves_costs_nothing(app: AppUnderTest, name: str) -> None:
    """Prompt and answer of the turn before are reused whole, by the rule that is made for it; nothing is rejected."""
    turns = lead(app, name)
    for before, now in pairwise(turns):
        assert now.num_cached_tokens >= before.num_tokens - SLACK_TOKENS, now.explanation
        assert now.explanation["cause"] == "nothing lost"
        assert now.explanation["exact_key_rejected_by_model_lcp"] == 0
    assert name in turns[1].explanation["rules"]


@pytest.mark.parametrize("name", FREE)
@sampled_cells(lambda app, name: (app, name) == ("qwen3", "cch"))
def test_without_a_memory_it_costs_the_conversation(app: AppUnderTest, name: str) -> None:
    """The control: rendered as sent, all that stands behind the field is computed again."""
    first, second = lead(app, name, 2, cache_mode="prefix")
    assert second.num_cached_tokens < first.num_tokens - 4 * SLACK_TOKENS


@pytest.mark.long
@pytest.mark.parametrize("app", sampled(TWO_KINDS, ("qwen3_5",)), indirect=True)
def test_a_clock_in_history_is_read_anew_and_named(app: AppUnderTest) -> None:
    """The time means something: the model gets the new one, and the explanation names the rule and the place."""
    first, second, _ = lead(app, "current_time")
    text = app.served.tokenizer.decode(second.prompt_ids)
    assert "09:14:40" in text and "09:14:02" not in text
    assert second.num_cached_tokens < first.num_tokens / 2
    assert second.explanation["cause"] == "volatile value" and "current_time" in second.explanation["rules"]
    assert second.explanation["first_difference"]["message_index"] == 0
    assert second.explanation["exact_key_rejected_by_model_lcp"] == 0
