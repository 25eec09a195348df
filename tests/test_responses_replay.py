"""A recorded session of Codex through the server's own path without a model: as much is reused as was possible."""

import pytest

from benchmarks.frozen import FrozenOracle
from benchmarks.model_free import ModelFree
from benchmarks.open_loop import play, shares
from benchmarks.recordings import read_recordings, shared_folder
from benchmarks.reuse_oracle import CONVENTIONS
from tests.models import tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_codex_reuses_what_is_possible(family: str) -> None:
    """Reuse is the oracle's, to a hundredth; the oracle reads the bodies with code of its own."""
    shared = shared_folder()
    talks = [talk for talk in read_recordings(shared) if talk.client == "codex"] if shared is not None else []
    if not talks:
        pytest.skip("needs the recordings in shared/ in or beside the repository")
    folder = tiny_model(family)
    model = ModelFree(folder, is_cuttable=CONVENTIONS[family].is_cuttable)
    share = shares([play(talks[0], family, model, FrozenOracle(family, folder))], with_first=False)
    print(f"{family}: reuse {share.reuse:.4f}, oracle {share.oracle:.4f}, {share.num_prompt_tokens:,} prompt tokens")
    assert share.num_requests == 10 and share.oracle > 0.9
    assert share.is_at_oracle
