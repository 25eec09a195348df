"""Recorded sessions of Claude Code and of PI over Anthropic's API, through the server's own path without a model."""

import pytest

from benchmarks.frozen import FrozenOracle
from benchmarks.open_loop import FLOORS, play, pooled, row_of
from benchmarks.paused_loop import BEST_OF_OTHERS
from benchmarks.recordings import Conversation, read_recordings, shared_folder, unthinking
from tests.laws import TWO_KINDS, sampled, sampled_cells
from tests.models import tiny_model
from tests.recorded_company import is_no_worse, lead, model_of

CLIENTS = ("pi-0.87-anthropic", "claude-code-2.1.119", "claude-code-2.1.330")
SMALL, OLDER, NEWER = CLIENTS
SEARCH = "claude-code-2.1.330-toolsearch"


def is_in_every_run(client: str, family: str) -> bool:
    """Each kind of layers once, and the longer session where states are recurrent."""
    return (client, family) in ((SMALL, "qwen3"), (OLDER, "qwen3_5"))


def conversation(client: str) -> Conversation:
    shared = shared_folder()
    talks = [talk for talk in read_recordings(shared) if talk.client == client] if shared is not None else []
    if not talks:
        pytest.skip("needs the recordings in shared/ in or beside the repository")
    return talks[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", TWO_KINDS)
@pytest.mark.parametrize("client", CLIENTS)
@sampled_cells(is_in_every_run)
def test_as_much_is_reused_as_was_possible(client: str, family: str) -> None:
    """Reuse is the oracle's, to a hundredth; the oracle reads the bodies with code of its own."""
    talk = conversation(client)
    played = play(talk, family, model_of(family), FrozenOracle(family, tiny_model(family)))
    share = pooled([row_of(played)], with_first=False)
    print(f"{client}, {family}: reuse {share.reuse:.4f}, oracle {share.oracle:.4f}, {share.num_prompt_tokens:,} tokens")
    assert share.num_requests == len(talk.requests) - 1 and share.oracle > 0.85
    assert share.is_at_oracle
    if client.startswith("claude-code") and share.oracle >= BEST_OF_OTHERS[family]:
        assert share.reuse >= BEST_OF_OTHERS[family]


@pytest.mark.parametrize("family", sampled(TWO_KINDS, ("qwen3_5",)))
def test_a_tool_search_is_above_its_floor(family: str) -> None:
    """From the second request on, in the open loop; in the closed one `test_closed_loop_recorded.py` says the same."""
    played = play(conversation(SEARCH), family, model_of(family), FrozenOracle(family, tiny_model(family)))
    share = pooled([row_of(played)], with_first=False)
    print(f"{SEARCH}, {family}: reuse {share.reuse:.4f}, oracle {share.oracle:.4f}, {share.num_prompt_tokens:,} tokens")
    [floor] = [floor for _, clients, floor in FLOORS if clients == (SEARCH,)]
    assert share.reuse >= floor == 0.98 and share.is_at_oracle


@pytest.mark.parametrize("family", TWO_KINDS)
@pytest.mark.parametrize("client", CLIENTS[1:])
@sampled_cells(lambda client, family: (client, family) == (NEWER, "qwen3_5"))
def test_without_thinking_in_prompts_it_is_the_best_of_others(client: str, family: str) -> None:
    """A dense model's template takes old thinking away, which costs; servers that never show it reach more, and so does
    this one on the same sessions without thinking."""
    model, oracle = model_of(family), FrozenOracle(family, tiny_model(family))
    share = pooled([row_of(play(unthinking(conversation(client)), family, model, oracle))], with_first=False)
    print(f"{client} without thinking, {family}: reuse {share.reuse:.4f}, oracle {share.oracle:.4f}")
    assert share.reuse >= BEST_OF_OTHERS[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", TWO_KINDS)
@pytest.mark.parametrize("client", CLIENTS)
@sampled_cells(lambda client, family: (client, family) == (NEWER, "qwen3_5"))
def test_side_requests_and_counts_cost_nothing(client: str, family: str) -> None:
    """Titles and other small questions under the same session, and a count before each request: the same reuse."""
    talk = conversation(client)
    assert is_no_worse(lead(talk, family, in_company=False), lead(talk, family, in_company=True))
