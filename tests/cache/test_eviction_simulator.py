"""The simulator counts what a plain comparison of prompts counts, and tells good scores from bad ones."""

import json
from pathlib import Path

import pytest

from benchmarks.checkpoint_budget import QWEN_27B
from benchmarks.eviction_scores import SCORES
from benchmarks.eviction_simulator import DENSE, Conversation, interleave, read_conversations, simulate
from kvserve.cache.eviction import Ageing


@pytest.fixture
def conversations(tmp_path: Path) -> list[Conversation]:
    """Nine recorded-looking tool loops on three system prompts; one has an image."""
    for number in range(9):
        pool = [{"role": "system", "content": f"You are agent {number % 3}. " + "Be careful. " * 40}]
        pool += [
            {"role": role, "content": f"{number} {turn} {role} says " + f"thing {turn} " * 30}
            for turn in range(12)
            for role in ("user", "assistant")
        ]
        if number == 4:
            url = {"url": "data:image/png;base64,AAAA"}
            pool[3] = {"role": "user", "content": [{"type": "image_url", "image_url": url}, {"text": "What is it?"}]}
        requests = [
            {"messages": list(range(2 * turn + 2)), "reply": 2 * turn + 2, "gap_s": 3.0 + turn} for turn in range(12)
        ]
        record = {"tools": [], "pool": pool, "requests": requests}
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(record) + "\n", "utf-8")
    return read_conversations(tmp_path)


def test_without_a_limit_reuse_is_that_of_a_plain_comparison(conversations: list[Conversation]) -> None:
    """Each prompt reuses its longest common prefix with any prompt or answer before it."""
    seen: list[tuple[int, ...]] = []
    num_reused = num_tokens = 0
    for _now, _owner, request in interleave(conversations, 3, 0):
        ids = request.prompt.ids
        common = (next((n for n, (a, b) in enumerate(zip(ids, s, strict=False)) if a != b), len(s)) for s in seen)
        num_reused += min(max(common, default=0), len(ids) - 1)
        num_tokens += len(ids)
        seen.append(request.whole.ids)
    assert simulate(conversations, SCORES["value"], DENSE, num_users=3, max_bytes=2**60) == num_reused / num_tokens


@pytest.mark.parametrize("sizes", [DENSE, QWEN_27B])
def test_the_negative_control_is_worse(conversations: list[Conversation], sizes: object) -> None:
    """Under pressure what was used last must not leave first; a simulator that showed no difference would be of no
    use."""
    max_bytes = 3 * 2500 * QWEN_27B.kv_bytes_per_token + (QWEN_27B.checkpoint_bytes * 12 if sizes is QWEN_27B else 0)
    scores = {"value": SCORES["value"], "lru": SCORES["lru"], "mru": lambda candidate: Ageing(1.0, -candidate.used_at)}
    reuse = {
        name: simulate(conversations, score, sizes, num_users=3, max_bytes=max_bytes)  # type: ignore[arg-type]
        for name, score in scores.items()
    }
    assert reuse["mru"] < min(reuse["value"], reuse["lru"])
