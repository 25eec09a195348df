"""What the dashboard is told of requests together: conversations, and misses by their cost."""

from typing import Any

from kvserve.observe.ended_requests import SIGN, from_json
from kvserve.observe.overview import MAX_CONVERSATIONS, MAX_LAST, conversations, last_requests, losses, timeline
from tests.observe.past import ended

MISS: dict[str, Any] = {
    "cause": "message changed",
    "role": "system",
    "looks_like": "a time",
    "remedy": "Mend it.",
}


def test_turns_of_a_conversation_stand_together() -> None:
    """The newest conversation first, in sums; its turns the oldest first, each with its cause."""
    newest = [
        ended("r4", ended_at=9.0, conversation="b", words="Good morning"),
        ended("r3", ended_at=8.0, seconds_saved=2.0, client="claude-cli/2.1"),
        ended("r2", ended_at=7.0, num_lost_tokens=300, summary="It moved.", **MISS),
        ended("r1", ended_at=6.0, num_cached_tokens=0, words="What is this?"),
    ]
    second, first = conversations(newest, 10.0)
    assert (first["id"], first["num_turns"], first["num_prompt_tokens"], first["num_cached_tokens"]) == (
        *("talk", 3),
        *(3_000, 1_800),
    )
    assert (first["words"], first["client"], first["idle_seconds"]) == ("What is this?", "claude-cli/2.1", 2.0)
    assert (first["num_misses"], first["seconds_saved"], second["id"]) == (1, 2.0, "b")
    assert (first["num_prefilled_tokens"], second["words"]) == (300, "Good morning")
    [restarted] = conversations([newest[1], ended("r0", ended_at=5.0)], 10.0)
    assert restarted["words"] == ""
    [restarted] = conversations([ended("r2", words="What is this?"), ended("r1")], 10.0)
    assert restarted["words"] == "What is this?", "those before a restart are gone"
    turns = timeline(newest, "talk")
    assert [(turn["request_id"], turn["is_miss"]) for turn in turns] == [("r1", False), ("r2", True), ("r3", False)]
    assert (turns[1]["summary"], turns[1]["remedy"]) == ("It moved.", "Mend it.")
    assert timeline(newest, "nobody's") == []


def test_misses_that_are_equal_count_together_and_cheap_ones_are_folded() -> None:
    """The dearest first, whatever came last; a cause that is no miss costs nothing."""
    newest = [
        ended("r1", num_lost_tokens=60, cause="evicted", seconds_lost=0.1),
        *(ended(f"t{n}", num_lost_tokens=700, seconds_lost=1.5, client="pi/0.87", **MISS) for n in range(3)),
        ended("r2", num_lost_tokens=500, cause="tools changed", role="tools"),
        ended("r3", cause="nothing lost"),
        ended("r4", num_lost_tokens=0, cause="message changed"),
    ]
    told: Any = losses(newest)
    assert [(group["cause"], group["num_requests"], group["num_tokens"]) for group in told["groups"]] == [
        ("message changed", 3, 2_100),
        ("tools changed", 1, 500),
    ]
    assert told["groups"][0] | {"seconds": 4.5, "newest": "t0", "clients": ["pi/0.87"]} == told["groups"][0]
    assert [group["cause"] for group in told["rest"]] == ["evicted"]
    assert (told["num_tokens"], told["seconds"]) == (2_660, 4.6)
    assert losses([]) == {"num_tokens": 0, "seconds": 0, "groups": [], "rest": []}


def test_what_is_told_is_bounded_and_names_nobody() -> None:
    """A hundred requests, no principal, no words."""
    many = [ended(f"r{n}", conversation=f"c{n}", principal="0123.-", words="SECRET") for n in range(300)]
    assert len(last_requests(many)) == MAX_LAST and len(conversations(many, 2.0)) == MAX_CONVERSATIONS
    assert "SECRET" not in str(last_requests(many)) and "0123" not in str((last_requests(many), timeline(many, "c1")))


def test_a_tool_is_named_as_long_as_it_is_known() -> None:
    """Its name is a client's word: it is in memory, not in what is kept."""
    told = {
        "summary": f"Others from tool {SIGN}, character 5 on.",
        "remedy": f"The tool {SIGN} has an id.",
    }
    row = ended("r1", num_lost_tokens=9, cause="tools changed", role="tools", tool="read_secret", **told)
    [turn] = timeline([row], "talk")
    assert (turn["summary"], turn["remedy"]) == (
        "Others from tool read_secret, character 5 on.",
        "The tool read_secret has an id.",
    )
    assert "read_secret" not in row.as_json() and SIGN not in str(losses([from_json(row.as_json())]))
    [kept] = timeline([from_json(row.as_json())], "talk")
    assert kept["remedy"] == "One tool has an id."
