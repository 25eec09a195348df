"""Recorded bodies with the ids that this server gave: calls and results, however a client spells an id."""

from benchmarks.given_ids import GivenIds


def test_calls_and_results_have_the_ids_that_were_given() -> None:
    """Also where a client took out all but letters and digits; text that looks like an id stays."""
    ids = GivenIds()
    assert not ids
    ids.give(["call_001_0", "call_001_1"], ["given0", "given1"])
    body = {
        "messages": [
            {"role": "assistant", "content": "call_001_0", "tool_calls": [{"id": "call_001_0", "type": "function"}]},
            {
                "role": "tool",
                "tool_call_id": "call0010",
                "content": [{"type": "tool_result", "tool_use_id": "call0011"}],
            },
            {"role": "tool", "tool_call_id": "call_002_0"},
        ]
    }
    assert ids and ids.in_body(body) == {
        "messages": [
            {"role": "assistant", "content": "call_001_0", "tool_calls": [{"id": "given0", "type": "function"}]},
            {"role": "tool", "tool_call_id": "given0", "content": [{"type": "tool_result", "tool_use_id": "given1"}]},
            {"role": "tool", "tool_call_id": "call_002_0"},
        ]
    }


def test_what_is_not_one_calls_id_stays_as_it_was_recorded() -> None:
    """An id that two calls had, none at all, and one that was recorded where the server wrote no call."""
    ids = GivenIds()
    ids.give(["c", "", "last"], ["given0", "given1"])
    ids.give(["c"], ["given2"])
    body = [{"id": name} for name in ("c", "", "last")]
    assert ids.in_body(body) == body
