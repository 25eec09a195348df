"""Of a sliding window the disk gets what came since the last state: put together it is the window that there was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from kvserve.cache.disk_blob import BlobName, unpack_blob
from kvserve.core import MessageStart
from kvserve.engine import disk_writing
from kvserve.engine.blobs import NotReadable, joined, since
from kvserve.engine.snapshot import StateSnapshot
from kvserve.engine.worker import Engine
from tests.engine.engines import assert_exact, cached, cold, generate, prompt_of, running_engine, turn
from tests.engine.test_disk_cache import disk_of, on, settle
from tests.laws import sampled

WINDOW_TOKENS = 8
FAMILIES = ("gemma3", "gpt_oss")
NEW_TOKENS, NUM_TURNS = 12, 9
"""A turn is a fraction of the tiny models' windows of 64 tokens."""


def window(num_tokens: int) -> Any:
    """A window after so many tokens: a row is its token's place."""
    cache: Any = RotatingKVCache(WINDOW_TOKENS, 0)
    places = mx.arange(max(0, num_tokens - WINDOW_TOKENS), num_tokens, dtype=mx.float32).reshape(1, 1, -1, 1)
    cache.offset, cache.keys, cache.values, cache._idx = num_tokens, places, -places, places.shape[2]
    return cache


def state(num_tokens: int) -> StateSnapshot:
    recurrent: Any = ArraysCache(1)
    recurrent[0] = mx.array([num_tokens])
    return StateSnapshot((window(num_tokens), recurrent, window(num_tokens)), 0)


def seen(each: StateSnapshot) -> list[object]:
    """All that a state says."""
    return [
        (leaf.offset, leaf._idx, leaf.max_size, leaf.keep, leaf.keys.tolist(), leaf.values.tolist())
        if isinstance(leaf, RotatingKVCache)
        else leaf[0].tolist()
        for leaf in each.leaves
    ]


@given(st.integers(1, 30), st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_parts_make_the_window_that_there_was(first: int, steps: list[int]) -> None:
    """Whatever lies between two states, and however many parts follow one another."""
    num_tokens, whole = first, state(first)
    for step in steps:
        num_tokens += step
        now = state(num_tokens)
        part = since(now, step)
        if step >= min(num_tokens, WINDOW_TOKENS):
            assert part is None, "no window has more than that"
            whole = now
            continue
        assert part is not None and [leaf.keys.shape[2] for leaf in (part.leaves[0], part.leaves[2])] == [step, step]
        assert part.num_bytes < joined(whole, part).num_bytes
        whole = joined(whole, part)
        assert seen(whole) == seen(now)


@pytest.mark.parametrize("num_tokens", [11, 13, 30])
def test_a_part_goes_on_from_its_own_base_only(num_tokens: int) -> None:
    """Not from a state that is further back, or further on."""
    part = since(state(15), 3)
    assert part is not None and seen(joined(state(12), part)) == seen(state(15))
    with pytest.raises(NotReadable):
        joined(state(num_tokens), part)
    with pytest.raises(NotReadable):
        joined(StateSnapshot((window(12),), 0), part)


def converse(engine: Engine, num_turns: int) -> list[int]:
    """A conversation of short turns; what it says in the end."""
    ids: list[int] = prompt_of(100)
    for number in range(num_turns):
        request = turn(ids, 4)
        starts = (
            MessageStart(0, is_user=False),
            MessageStart(50, is_user=True),
            MessageStart(len(ids) - 4, is_user=False),
        )
        [answer] = generate(engine, replace(request, message_starts=starts))
        ids = [*ids, *answer.tokens, *prompt_of(NEW_TOKENS - 4, number + 1)]
    return ids


def bases(folder: Path) -> list[str]:
    """What the states on disk go on from."""
    blobs = [unpack_blob(path.read_bytes(), BlobName(path.stem)) for path in folder.rglob("*.safetensors")]
    return [blob.head.base for blob in blobs if blob.head.kind == "checkpoint"]


@pytest.mark.parametrize("family", sampled(FAMILIES, ("gemma3",)))
def test_a_conversation_of_short_turns_is_warm_and_exact_after_a_restart(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last state is read in parts, as many as may be, and leads to the text of a cold row."""
    monkeypatch.setattr(disk_writing, "MAX_CHAIN", 4)
    with running_engine(family, disk=on(tmp_path)) as engine:
        ids = converse(engine, NUM_TURNS)
        settle(engine)
    said = bases(tmp_path)
    assert said.count("") >= 3 and len(said) - said.count("") >= 5, "whole ones now and then, parts between"
    with running_engine(family, disk=on(tmp_path)) as engine:
        longer = [*ids, *prompt_of(20, 50)]
        [warm] = generate(engine, turn(longer, 24))
        assert cached(warm) == len(ids) - (NEW_TOKENS - 4) and disk_of(engine).stats.faults == {}
        assert warm.progress[-1].reuse.tier == "disk"
        assert_exact(warm, cold(engine, longer, 24))


def test_without_its_base_a_part_is_no_state(tmp_path: Path) -> None:
    """The state that others go on from is damaged: they go with it, and the text is that of a cold row."""
    with running_engine("gemma3", disk=on(tmp_path)) as engine:
        ids = converse(engine, 4)
        settle(engine)
    paths = sorted(tmp_path.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    blobs = {path: unpack_blob(path.read_bytes(), BlobName(path.stem)).head for path in paths}
    needed = {head.base for head in blobs.values() if head.base}
    [base] = [path for path, head in blobs.items() if head.name in needed and not head.base]
    base.write_bytes(base.read_bytes()[:-1] + b"?")
    with running_engine("gemma3", disk=on(tmp_path)) as engine:
        [warm] = generate(engine, turn([*ids, *prompt_of(20, 50)], 16))
        assert disk_of(engine).stats.faults == {"damaged": 1}
        assert_exact(warm, cold(engine, [*ids, *prompt_of(20, 50)], 16))
