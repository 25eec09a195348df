"""Behind a pass that failed nobody goes on whose collectives would pair with those of another pass: sums that are
shifted raise nothing, and come to wrong text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvserve.core import GenerationFailed
from kvserve.engine.ranks.place import RanksLost
from tests.engine.engines import prompt_of
from tests.engine.ranks.pair import pair
from tests.ports import free_port

PROMPT = prompt_of(40)
SUMS = ["2.0", "20.0", "200.0", "2000.0"]
END_SECONDS = 60.0


@pytest.mark.parametrize("is_level", [True, False])
def test_ranks_that_are_not_level_behind_a_failure_end(is_level: bool) -> None:
    """Both look, and neither computes another pass; where they are level the row fails and that is all."""
    with pair("qwen3", level=lambda: is_level) as both:
        both.leader.passes.planted[1] = RuntimeError("a kernel broke")
        row = both.add(PROMPT, 3)
        if is_level:
            both.run()
        else:
            with pytest.raises(RanksLost, match="out of step behind an error"):
                both.run()
    assert (both.ended == [None]) == is_level
    if is_level:
        assert isinstance([event for batch in row.handle.batches(0) for event in batch][-1], GenerationFailed)
    else:
        assert "out of step behind an error" in str(both.ended[0])


def said(folder: Path, *failing: str) -> list[tuple[int, list[str]]]:
    """The exit code of each rank of a ring, and what it said of its passes."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in failing]), "utf-8")
    command = [sys.executable, "-m", "tests.engine.ranks.passes_of_a_rank"]
    ranks = [
        subprocess.Popen(
            [*command, where],
            env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, where in enumerate(failing)
    ]
    try:
        outputs = [rank.communicate(timeout=END_SECONDS)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, lines) for rank, lines in zip(ranks, outputs, strict=True)]


@pytest.mark.e2e
@pytest.mark.parametrize("failing", [("before", "before"), ("behind", "nowhere"), ("behind", "behind")])
def test_a_failure_at_one_place_of_the_queue_goes_on(failing: tuple[str, str], tmp_path: Path) -> None:
    """Two processes on MLX's ring: what comes behind the failure is right."""
    expected = [SUMS[0], "failed", *SUMS[2:]]
    assert said(tmp_path, *failing) == [(0, expected), (0, expected)]


@pytest.mark.e2e
@pytest.mark.parametrize("failing", [("before", "nowhere"), ("nowhere", "before"), ("nowhere", "behind")])
def test_a_failure_of_one_rank_alone_ends_both(failing: tuple[str, str], tmp_path: Path) -> None:
    """One of them still sits in the sum of that pass, or has no result of it: no sum of another pass comes out."""
    for code, lines in said(tmp_path, *failing):
        assert code == 1, lines
        assert lines[0] == SUMS[0] and lines[-1].startswith("lost: "), lines
        assert set(lines[1:-1]) <= {"failed", SUMS[1]}, lines
