"""How many entries there may be counts only where bytes are short: with RAM free, forks and side requests all stay."""

from dataclasses import replace
from itertools import batched
from pathlib import Path

import pytest

from kvserve.engine.engine_settings import DiskSettings
from tests.engine.engines import CACHE, FAMILIES, Result, cached, generate, prompt_of, running_engine, turn
from tests.laws import TWO_KINDS, sampled, sampled_cells

FEW_ENTRIES = replace(CACHE, max_entries=24, max_entries_per_owner=2)
"""The numbers that a server has by default."""

NUM_BRANCHES, NUM_SIDE_REQUESTS, NUM_AT_ONCE = 6, 30, 5
BASE = prompt_of(96)
NUM_NEW = 48
NUM_ANSWER = 4


def tier_of(result: Result) -> str:
    return result.progress[-1].reuse.tier


@sampled_cells(lambda family, on_disk: (family, on_disk) == ("qwen3_5", False))
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("family", sampled(FAMILIES, TWO_KINDS))
def test_six_branches_and_thirty_side_requests_are_served_from_ram(family: str, on_disk: bool, tmp_path: Path) -> None:
    """Each branch of a session goes on from all that it has, prompt and answer, as one branch alone does."""
    disk = DiskSettings(tmp_path, None, 0, 24.0) if on_disk else None
    with running_engine(family, cache=FEW_ENTRIES, disk=disk) as engine:
        said = [[*BASE, *prompt_of(NUM_NEW, 10 + number)] for number in range(NUM_BRANCHES)]
        for number_of_turn in range(3):
            for number, tokens in enumerate(said):
                [answer] = generate(engine, replace(turn(tokens, NUM_ANSWER), owner="session"))
                if number_of_turn:
                    assert (tier_of(answer), cached(answer)) == ("ram", len(tokens) - NUM_NEW)
                new = prompt_of(NUM_NEW, 100 * number_of_turn + number)
                said[number] = [*tokens, *answer.tokens, *new]
            sides = [
                replace(
                    turn(prompt_of(20, 1000 + 100 * number_of_turn + number), 2), owner=f"{number_of_turn}/{number}"
                )
                for number in range(NUM_SIDE_REQUESTS // 2 if number_of_turn < 2 else 0)
            ]
            for some in batched(sides, NUM_AT_ONCE):
                generate(engine, *some)
        assert engine.cache_report().stats.num_evicted_tokens == 0
