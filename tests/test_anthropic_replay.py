"""Recorded sessions of Claude Code and of PI over Anthropic's API, through the server's own path without a model."""

import pytest

from benchmarks.frozen import FrozenOracle
from benchmarks.model_free import ModelFree
from benchmarks.open_loop import play, shares
from benchmarks.recordings import MESSAGES, Conversation, Reply, Request, read_recordings, shared_folder
from benchmarks.reuse_oracle import CONVENTIONS
from kvserve.core import RequestId
from kvserve.pipeline import count_tokens
from kvserve.protocols.anthropic_messages import parse_counted
from tests.models import tiny_model

CLIENTS = ("pi-0.87-anthropic", "claude-code-2.1.119", "claude-code-2.1.330")
FAMILIES = ("qwen3", "qwen3_5")
BEST_OF_OTHERS = {("claude-code", "qwen3"): 0.992, ("claude-code", "qwen3_5"): 0.989}
"""What the best server measured beside this one reuses, where that can be reached: the edit of CLAUDE.md costs more."""


def conversation(client: str) -> Conversation:
    shared = shared_folder()
    talks = [talk for talk in read_recordings(shared) if talk.client == client] if shared is not None else []
    if not talks:
        pytest.skip("needs the recordings in shared/ in or beside the repository")
    return talks[0]


def model_of(family: str) -> ModelFree:
    return ModelFree(tiny_model(family), is_cuttable=CONVENTIONS[family].is_cuttable)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("client", CLIENTS)
def test_as_much_is_reused_as_was_possible(client: str, family: str) -> None:
    """Reuse is the oracle's, to a hundredth; the oracle reads the bodies with code of its own."""
    talk = conversation(client)
    share = shares([play(talk, family, model_of(family), FrozenOracle(family, tiny_model(family)))], with_first=False)
    print(f"{client}, {family}: reuse {share.reuse:.4f}, oracle {share.oracle:.4f}, {share.num_prompt_tokens:,} tokens")
    assert share.num_requests == len(talk.requests) - 1 and share.oracle > 0.85
    assert share.is_at_oracle
    if share.oracle >= (best := BEST_OF_OTHERS.get((client.rpartition("-")[0], family), 1.0)):
        assert share.reuse >= best


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_side_requests_and_counts_cost_nothing(family: str) -> None:
    """Titles and other small questions under the same session, and a count before each request: the same reuse."""
    talk = conversation("claude-code-2.1.330")
    runs = []
    for has_company in (False, True):
        model, cached = model_of(family), []
        for number, request in enumerate(talk.requests):
            if has_company:
                body = {key: value for key, value in request.body.items() if key != "max_tokens"}
                counted = count_tokens(
                    parse_counted(body, request.headers, model.served.defaults, RequestId("count")), model.served
                )
                model.serve(_side_request(request, number), 1_000 + number)
            told = model.serve(request, number)
            cached.append((told.num_cached_tokens, told.num_prompt_tokens))
            assert not has_company or counted == told.num_prompt_tokens
        runs.append(cached)
    alone, in_company = runs
    assert all(other[0] >= one[0] and other[1] == one[1] for one, other in zip(alone, in_company, strict=True))


def _side_request(request: Request, number: int) -> Request:
    """A small question of the same client beside its conversation."""
    body = {
        **{key: request.body[key] for key in ("model", "metadata", "max_tokens", "stream")},
        "system": [{"type": "text", "text": "Write a title of at most five words for the conversation."}],
        "messages": [{"role": "user", "content": f"Part {number}: {request.body['messages'][-1]['content']!s:.400}"}],
    }
    return Request(body, Reply(content="A title"), request.headers, MESSAGES)
