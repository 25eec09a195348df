"""A recorded session of Codex through the server's own path without a model: as much is reused as was possible."""

import pytest

from benchmarks.frozen import FrozenOracle
from benchmarks.open_loop import play, pooled, row_of
from benchmarks.recordings import Conversation, read_recordings, shared_folder
from tests.laws import TWO_KINDS, sampled, sampled_cells
from tests.models import tiny_model
from tests.recorded_company import is_no_worse, lead, model_of


def conversation() -> Conversation:
    shared = shared_folder()
    talks = [talk for talk in read_recordings(shared) if talk.client == "codex"] if shared is not None else []
    if not talks:
        pytest.skip("needs the recordings in shared/ in or beside the repository")
    return talks[0]


@pytest.mark.long
@sampled_cells(lambda family, **_: family == "qwen3_5")
@pytest.mark.slow
@pytest.mark.parametrize("family", TWO_KINDS)
def test_codex_reuses_what_is_possible(family: str) -> None:
    """Reuse is the oracle's, to a hundredth; the oracle reads the bodies with code of its own."""
    oracle = FrozenOracle(family, tiny_model(family))
    share = pooled([row_of(play(conversation(), family, model_of(family), oracle))], with_first=False)
    print(f"{family}: reuse {share.reuse:.4f}, oracle {share.oracle:.4f}, {share.num_prompt_tokens:,} prompt tokens")
    assert share.num_requests == 10 and share.oracle > 0.9
    assert share.is_at_oracle


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("family", sampled(TWO_KINDS, ("qwen3_5",)))
def test_side_requests_cost_nothing(family: str) -> None:
    """Titles and other small questions under the same session and key: the same reuse."""
    talk = conversation()
    assert is_no_worse(lead(talk, family, in_company=False), lead(talk, family, in_company=True))
