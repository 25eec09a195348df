"""What a model says that is divided over two ranks, and what the whole one says to the same tokens: the difference is
noise, and a fault in one rank is thousands of times larger."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

from kvserve.engine.text_load import load_text
from kvserve.settings.model_config import read_config
from tests.engine.ranks.logits_of_a_part import STALE, SWAPPED, said_to
from tests.models import DEEP, tiny_model
from tests.pipelined import BAILING
from tests.ports import free_port
from tests.ranked_servers import NEAR_TIE
from tests.seeded_prompts import seeded_ids

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FAMILIES = ("qwen3", "llama", "gpt_oss", "qwen3_5")
PIPELINES = ("qwen3_next", DEEP + "qwen3_next", BAILING)
"""Of which the last rank has states, and heads that could be swapped in one only."""

NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS, NUM_PROMPTS = 200, 8, 2
VOCABULARY = 500
"""Ids that all of the families have."""

NOISE = NEAR_TIE / 3
"""1.5e-5 was measured, with prompts of 200 tokens."""

FAULT = 1e4 * NEAR_TIE
"""Faults were 2.5 to 8.5."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and an answer that is given, not drawn, of one model; `fault` is planted in the last rank."""

    family: str
    seed: int
    fault: str = "none"

    @property
    def folder(self) -> Path:
        return tiny_model(self.family)

    @property
    def prompt(self) -> list[int]:
        return seeded_ids(self.seed, 0, NUM_PROMPT_TOKENS, VOCABULARY)

    @property
    def answer(self) -> list[int]:
        return seeded_ids(self.seed, 1, NUM_ANSWER_TOKENS, VOCABULARY)

    @property
    def todo(self) -> list[object]:
        return [str(self.folder), self.prompt, self.answer, self.fault]


def said_by_ranks(folder: Path, asked: list[Asked]) -> list[mx.array]:
    """Log-probabilities (answer, vocabulary) of two processes on MLX's ring."""
    hosts, todo, out = (folder / name for name in ("hosts.json", "todo.json", "out.npz"))
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]), "utf-8")
    todo.write_text(json.dumps([each.todo for each in asked]), "utf-8")
    command = [sys.executable, "-m", "tests.engine.ranks.logits_of_a_part", str(todo), str(out)]
    environment = {**os.environ, "MLX_HOSTFILE": str(hosts)}
    ranks = [subprocess.Popen(command, env={**environment, "MLX_RANK": str(rank)}) for rank in range(2)]
    try:
        assert [rank.wait(600) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    found = mx.load(str(out))
    assert isinstance(found, dict)
    return [found[str(number)] for number in range(len(asked))]


def said_by_one(asked: Asked) -> mx.array:
    module, _ = load_text(asked.folder, read_config(asked.folder))
    return said_to(module, asked.prompt, asked.answer)


def difference(one: mx.array, other: mx.array) -> float:
    """The largest one of the distance between the two likeliest tokens of a place: so close they may change places."""
    best = mx.argsort(one, axis=-1)[:, -2:]
    gaps = [mx.diff(mx.take_along_axis(each, best, axis=-1), axis=-1) for each in (one, other)]
    return float(mx.abs(gaps[0] - gaps[1]).max().item())


def test_what_a_divided_model_says_differs_by_noise(tmp_path: Path) -> None:
    """Each family on its prompts; with another head's question, and with KV of another prompt, it is no noise."""
    asked = [Asked(family, seed) for family in (*FAMILIES, *PIPELINES) for seed in range(NUM_PROMPTS)]
    planted = [Asked(family, 0, fault) for family in FAMILIES for fault in (SWAPPED, STALE)]
    planted += [Asked(family, 0, STALE) for family in PIPELINES]
    every = [*asked, *planted]
    for each, found in zip(every, said_by_ranks(tmp_path, every), strict=True):
        off = difference(said_by_one(each), found)
        print(f"{each.family} {each.seed} {each.fault}: {off:.1e}")
        assert off < NOISE if each.fault == "none" else off > FAULT, f"{each}: {off:.2e}"
