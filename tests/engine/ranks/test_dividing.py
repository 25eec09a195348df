"""A model that is divided by its layers is the whole one, handed on; one that cannot be divided is refused."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvserve.core.rank_place import LayerSpan, RankPlace
from kvserve.engine.kv_buffers import held_arrays
from kvserve.engine.kv_size import KvSize, largest
from kvserve.engine.model import load
from kvserve.engine.quantised import KvSettings
from kvserve.engine.ranks import pipeline_probe
from kvserve.engine.ranks.dividing import keep_part
from kvserve.engine.ranks.loading import with_other_parts
from kvserve.engine.ranks.pipeline_probe import refuse_broken, refuse_quantised
from kvserve.engine.ranks.place import Ranks
from kvserve.engine.text_load import load_text
from kvserve.errors import ModelLoadError
from kvserve.settings.model_config import read_config
from tests.engine.engines import prompt_of
from tests.laws import sampled
from tests.models import DEEP, tiny_model
from tests.pipelined import BAILING

SIZE = 2


class Group:
    """One rank of MLX's group."""

    def __init__(self, rank: int, size: int = SIZE) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def part(family: str, rank: int, size: int = SIZE) -> tuple[Any, LayerSpan | None]:
    folder = tiny_model(family)
    module, config = load_text(folder, read_config(folder), is_lazy=True)
    return module, keep_part(module, config, size, Group(rank, size))


def handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in one process: what the last one sends is what the first one, which computes next, receives."""
    sent: list[mx.array] = []

    def send(array: mx.array, _to: int) -> mx.array:
        sent.append(array)
        return array

    monkeypatch.setattr(mx.distributed, "send", send)
    monkeypatch.setattr(mx.distributed, "recv_like", lambda _like, _by: sent.pop())
    monkeypatch.setattr(mx.distributed, "all_gather", lambda array: array)


def arrays_of(caches: list[Any]) -> list[mx.array]:
    return held_arrays([cache.state for cache in caches])


@pytest.mark.parametrize("family", sampled(("qwen3_next", DEEP + "qwen3_next", BAILING), ("qwen3_next", BAILING)))
def test_the_parts_of_a_pipeline_are_the_whole(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and all that is kept, to the bit; in another order they are not."""
    folder = tiny_model(family)
    whole, _ = load_text(folder, read_config(folder))
    (first, of_first), (last, of_last) = part(family, 1), part(family, 0)
    assert of_first is not None and of_last is not None
    assert (of_first.start, of_first.end, of_last.end) == (0, of_last.start, of_last.num_layers)
    handed_on(monkeypatch)
    caches = {id(module): make_prompt_cache(module) for module in (whole, first, last)}
    for ids in (prompt_of(20), [7]):
        expected, wrong, found = (module(mx.array([ids]), cache=caches[id(module)]) for module in (whole, first, last))
        assert mx.array_equal(found, expected).item()
        assert not mx.array_equal(wrong, expected).item()
    kept = [*arrays_of(caches[id(first)]), *arrays_of(caches[id(last)])]
    expected_kept = arrays_of(caches[id(whole)])
    assert len(kept) == len(expected_kept)
    assert all(mx.array_equal(own, other).item() for own, other in zip(kept, expected_kept, strict=True))


@pytest.mark.parametrize(
    ("family", "size", "why"),
    [
        ("gemma3", 2, "neither shard"),
        ("qwen3_next", 3, "it has 2 layers"),
        ("qwen3", 3, "num_attention_heads is 4"),
        (BAILING, 3, "ValueError"),
    ],
)
def test_what_cannot_be_divided_says_why(family: str, size: int, why: str) -> None:
    """No way of mlx-lm's, fewer layers than ranks, heads that do not come out even, and what mlx-lm itself refuses."""
    with pytest.raises(ModelLoadError, match=f"cannot be divided over {size} ranks.*{why}"):
        part(family, 0, size)


class Others(Ranks):
    """One of two, of which the other one says the same but for what is `planted`."""

    def __init__(self, **planted: Callable[[Any], Any]) -> None:
        self._planted = planted

    def gathered(self, name: str, value: Any) -> list[Any]:
        return [value, self._planted.get(name, lambda own: own)(value)]


SPAN, OTHER = LayerSpan(1, 2, 2), [0, 1]


@pytest.mark.parametrize(("span", "is_told"), [(SPAN, True), (None, False)])
def test_a_part_learns_of_the_others(span: LayerSpan | None, is_told: bool) -> None:
    """States of layers that it has not, where layers are whole; of the sizes the largest, of each number."""
    model = load(tiny_model("qwen3"), 131072)
    sizes = {**asdict(model.sizes), "fixed": model.sizes.fixed + 7, "per_token": 0}
    other = {"has_states": True, "weights": model.weight_bytes + 5, "sizes": sizes}
    ranks = Others(parts=lambda _: other)
    ranks.place, ranks.span = RankPlace(0, 2, "127.0.0.1"), span
    found = with_other_parts(ranks, model)
    assert found.has_states_elsewhere is is_told
    assert found.weight_bytes == model.weight_bytes + 5
    assert (found.sizes.fixed, found.sizes.per_token) == (model.sizes.fixed + 7, model.sizes.per_token)


def probe(module: Any, **planted: Callable[[Any], Any]) -> None:
    """What rank 0 of two, which has the second of two layers, finds out."""
    refuse_broken(Others(**{"layers": lambda _: OTHER, **planted}), module, SPAN)


def test_a_pipeline_that_does_not_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that nobody has, caches of other layers than its own, logits that are not the same everywhere."""
    module, span = part("qwen3_next", 0)
    assert span == SPAN
    monkeypatch.setattr(mx.distributed, "recv_like", lambda like, _by: like)
    monkeypatch.setattr(mx.distributed, "all_gather", lambda array: array)
    probe(module)
    with pytest.raises(ModelLoadError, match=r"the layers \[\(1, 2\), \(1, 2\)\] of 2"):
        probe(module, layers=lambda own: own)
    for other in (lambda own: own[::-1], lambda own: [math.nan for _ in own]):
        with pytest.raises(ModelLoadError, match="unlike logits"):
            probe(module, logits=other)
    with pytest.raises(ModelLoadError, match="Rank 1 cannot load its part: it broke"):
        probe(module, loaded=lambda _: "it broke")
    monkeypatch.setattr(pipeline_probe, "make_prompt_cache", lambda _: [KVCache(), KVCache()])
    with pytest.raises(ModelLoadError, match="it makes 2 caches for layers 1 to 2 of 2"):
        probe(module)


def test_caches_of_another_kind_are_refused() -> None:
    """The look at them takes passes that a rank without them would not be in."""
    folder = tiny_model("gemma3")
    module, _ = load_text(folder, read_config(folder), is_lazy=True)
    with pytest.raises(ModelLoadError, match="it keeps RotatingKVCache"):
        probe(module)


def test_quantised_kv_is_refused() -> None:
    refuse_quantised(KvSettings())
    with pytest.raises(ModelLoadError, match="KV_BITS=4 cannot be used where layers are divided"):
        refuse_quantised(KvSettings(bits=4))


SIZES = st.builds(
    KvSize,
    fixed=st.integers(0, 2**20),
    per_token=st.floats(2**8, 2**12),
    slot_tokens=st.integers(0, 256),
    copy_share=st.floats(0, 1),
    memo_per_token=st.floats(0, 2**8),
)


@given(sizes=st.lists(SIZES, min_size=1, max_size=3), num_tokens=st.integers(0, 10**6))
def test_no_part_takes_more_than_the_largest(sizes: list[KvSize], num_tokens: int) -> None:
    """Live, on its way, and kept; of one part it is that one."""
    most = largest(sizes)
    for each in sizes:
        assert most.live(num_tokens) >= each.live(num_tokens)
        assert most.peak(num_tokens) >= each.peak(num_tokens)
        assert most.copied(1000) >= each.copied(1000)
        assert most.kept(0, num_tokens) >= each.kept(0, num_tokens) * (1 - 1e-9)
    assert largest(sizes[:1]).live(num_tokens) == sizes[0].live(num_tokens)
