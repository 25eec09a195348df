"""A client that goes back to any place of a long conversation: at most one stride is computed again, on hybrids too."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.model_free import ModelFree
from benchmarks.recordings import Reply, Request
from benchmarks.reuse_oracle import CONVENTIONS
from kvserve.cache.checkpoints import MAX_STRIDE_TOKENS
from kvserve.core import RequestId
from kvserve.protocols.openai_chat import parse_chat
from kvserve.requests.serve import preview
from tests.agents import TOOL, common_length
from tests.laws import IS_FULL, TWO_KINDS
from tests.models import tiny_model

NUM_CALLS = 40 if IS_FULL else 20
LONG = "One message that is longer than a stride. " * 600
NEW_WORDS = {"role": "user", "content": "No. Go somewhere else."}
SLACK_TOKENS = 16
"""The tail that makes the model answer."""

RESULT = "There are a tree, a lake and a hill behind it. " * 8


def body(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": list(messages), "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}


def prompt_ids(model: ModelFree, sent: Mapping[str, Any]) -> tuple[int, ...]:
    turn = parse_chat(dict(sent), {}, model.served.defaults, RequestId("back")).turn
    return preview(turn, model.served).tokens.ids


@pytest.mark.parametrize("family", TWO_KINDS)
def test_a_return_to_any_place_computes_at_most_a_stride_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty calls (forty in make full) behind a long first message; then the client goes back to many of them with
    other words, and into the long message itself; at last it goes on with the conversation, which lost nothing by it.
    Where layers can be cut nothing is computed again."""
    for limit in ("GLOBAL", "PER_SESSION"):  # how many ends are kept is not what is asked here
        monkeypatch.setenv(f"PROMPT_CACHE_MAX_ENTRIES_{limit}", "1000")
    is_cuttable = CONVENTIONS[family].is_cuttable
    model = ModelFree(tiny_model(family), is_cuttable=is_cuttable)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Look."}, {"role": "user", "content": LONG}]
    for number in range(NUM_CALLS):
        arguments = json.dumps({"place": f"hill {number}", "depth": number})
        model.serve(Request(body(messages), Reply("", "", (("look", arguments),))), number)
        call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"{number}: {RESULT}"})
    model.serve(Request(body(messages), Reply("", "Done.")), NUM_CALLS)
    whole = prompt_ids(model, body(messages))
    lost = []
    returns = [[*messages[:end], NEW_WORDS] for end in range(2, len(messages), 6)]
    returns += [
        [messages[0], {"role": "user", "content": LONG[: len(LONG) * part // 8] + "Enough."}] for part in range(1, 8)
    ]
    for number, changed in enumerate(returns):
        back = body(changed)
        shared = common_length(whole, prompt_ids(model, back))
        lost.append(shared - model.serve(Request(back, Reply("", "Gone.")), 100 + number).num_cached_tokens)
    assert max(lost) <= (0 if is_cuttable else MAX_STRIDE_TOKENS), lost
    assert is_cuttable or max(lost) > MAX_STRIDE_TOKENS / 4, "no return needed a state inside a message"
    again = model.serve(Request(body(messages), Reply("", "Done.")), 200)
    assert again.cause == "nothing lost" and again.num_cached_tokens >= len(whole) - SLACK_TOKENS
