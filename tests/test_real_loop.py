"""The real server over HTTP reuses of each request what the path without a model says, token for token.

No tolerance: both sides prefill, keep and look up the same tokens, and the real one only adds arrays to them.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.led_server import led_server
from benchmarks.model_free import ModelFree, Script, Told
from benchmarks.real_loop import Pair, Paired, num_differing, pair_up, row_of, table
from benchmarks.recordings import RECORDED_CLIENTS, Conversation, Reply, Request, read_recordings, shared_folder
from benchmarks.reuse_oracle import CONVENTIONS, RECORDED_FAMILIES
from tests.agents import CARRIER, TOOL
from tests.laws import IS_FULL, sampled
from tests.models import tiny_model
from tests.starts import remembered_starts

SYSTEM = {"role": "system", "content": "You look at places and say what is there. " * 4}
CLIENT = RECORDED_CLIENTS[0]
"""Of a recorded client the answers are written whole."""


def agent_session() -> Conversation:
    """A tool loop with a carrier in every request, then a client that leaves, asks again, and goes back and edits."""
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "Look at the hill."}]
    requests: list[Request] = []

    def ask(reply: Reply | None, *, carries: bool = True) -> None:
        sent = [*messages, *([CARRIER] if carries else [])]
        requests.append(Request({"model": "any", "messages": sent, "tools": [TOOL], "max_tokens": 4_096}, reply))

    for number in range(4):
        arguments = json.dumps({"place": f"hill {number}", "depth": number})
        ask(Reply(f"Where is {number}?", f"I look, {number}.", (("look", arguments),)))
        call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}
        messages.append({"role": "assistant", "content": f"I look, {number}.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"a tree {number} " * 8})
    ask(None)
    ask(Reply("", "Trees."), carries=False)
    messages[:] = [*messages[:4], {"role": "user", "content": "Look at the lake instead. " * 10}]
    ask(Reply("", "Water."), carries=False)
    return Conversation(CLIENT, "agent", tuple(requests))


def led(family: str, folder: Path, talk: Conversation) -> Paired:
    model = tiny_model(family)
    with remembered_starts(), led_server(model, folder) as server:
        return pair_up(talk, family, server, ModelFree(model, is_cuttable=CONVENTIONS[family].is_cuttable))


def check(played: Paired) -> None:
    assert [pair.real for pair in played.pairs] == [
        Told(p.free.num_prompt_tokens, p.free.num_cached_tokens, None) for p in played.pairs
    ]
    assert played.sums_agree
    assert num_differing([played]) == 0
    row = row_of(played)
    assert row.num_cached_tokens > 0.5 * row.num_prompt_tokens, "nothing was compared"


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    sampled(RECORDED_FAMILIES, ("qwen3_5", "gemma3")),
)
def test_a_session_reuses_over_http_what_it_does_without_a_model(family: str, tmp_path: Path) -> None:
    """Thinking, calls, a message that is gone from the next request, a client that leaves, an edited history."""
    check(led(family, tmp_path, agent_session()))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    sampled(RECORDED_FAMILIES, ("qwen3_5",)),
)
def test_a_recorded_session_does_too(family: str, tmp_path: Path) -> None:
    """The first requests of a recording, with their answers as the model's own. Where a template drops old thinking,
    the newest answer is computed again."""
    shared = shared_folder()
    if shared is None:
        pytest.skip("there are no recordings here")
    talk = next(talk for talk in read_recordings(shared) if talk.client == CLIENT)
    played = led(family, tmp_path, Conversation(talk.client, talk.name, talk.requests[: 5 if IS_FULL else 3]))
    check(played)
    for before, now in pairwise(played.pairs):
        assert now.real.num_cached_tokens >= 0.85 * before.real.num_prompt_tokens


def pair(real: tuple[int, int], free: tuple[int, int], *, is_first: bool = False) -> Pair:
    return Pair(Told(*real, None), Told(*free, None), is_first)


def test_a_difference_is_counted_and_told() -> None:
    """One token more or less, in a prompt or in what was known of it, and sums that are not those of the answers."""
    same, longer = pair((100, 50), (100, 50)), pair((101, 50), (100, 50))
    less = pair((100, 49), (100, 50))
    first = pair((100, 0), (100, 0), is_first=True)
    assert num_differing([Paired("c", "n", "f", (first, same), 200, 50)]) == 0
    assert num_differing([Paired("c", "n", "f", (first, longer, less), 301, 99)]) == 2
    wrong_sums = Paired("c", "n", "f", (first, same), 200, 49)
    assert num_differing([wrong_sums]) == 1
    *_, line, of_all = table([row_of(wrong_sums)])
    assert line == "| c | n | f | 2 | 100 | 100 | 0.5000 | 0.5000 | 1 |"
    assert of_all == "| **all** | 1 conversations | f | 2 | 100 | 100 | 0.5000 | 0.5000 | 1 |"


def test_a_script_is_cut_with_its_stop_token_counted() -> None:
    """As a limit on tokens does it."""
    script = Script((1, 2, 3), 9)
    assert script.cut(None).tokens == script.cut(4).tokens == (1, 2, 3, 9)
    assert script.cut(3).tokens == (1, 2, 3)
    assert script.cut(1) == Script((1,), None)
