"""Partitions of the KV on real tiny models: by no way does one tenant's KV reach another one's request."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvserve.cache.node import Node
from kvserve.cache.trie import Trie
from kvserve.core import GenerationRequest, ImageFacts, ImageInput, TokenSequence
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.vision_tower import Features, Tower
from kvserve.engine.waiting_for_prefix import WaitingForPrefix
from kvserve.engine.warming import WarmJob, WarmSettings
from kvserve.engine.worker import Engine
from tests.engine.engines import MESSAGE_TOKENS, cached, generate, prompt_of, running_engine, turn
from tests.integrity import check_integrity
from tests.laws import IS_FULL, sampled

BASE = prompt_of(148)
AT_ONCE = WarmSettings(grace_seconds=0)
NUM_AHEAD = 96
WAIT_SECONDS = 60.0
ONE, OTHER = "key.user", "key.another"
WAYS = frozenset({"ram", "live row", "disk", "warmed"})
"""How a request may come by what it did not compute."""


def asked(partition: str, tokens: list[int] = BASE) -> GenerationRequest:
    return replace(turn(tokens, 4), partition=partition)


def warm(engine: Engine, partition: str, tokens: list[int]) -> None:
    job = WarmJob(TokenSequence(tuple(tokens[:NUM_AHEAD])), "prewarm", partition=partition)
    result = engine.warm(job).wait(WAIT_SECONDS)
    assert result is not None and result.state == "done", result


def found(engine: Engine, request: GenerationRequest) -> int:
    [result] = generate(engine, request)
    return cached(result)


def ways(family: str, folder: Path, one: str, other: str) -> set[str]:
    """By which ways a request of `other` is served with what a request of `one` has, each with a prompt of its own."""
    disk = DiskSettings(folder, max_bytes=None, min_free_bytes=0, ttl_hours=24)
    prompts = {way: prompt_of(148, seed) for seed, way in enumerate(sorted(WAYS))}
    open_ways = set[str]()
    with running_engine(family, disk=disk, warming=AT_ONCE) as engine:
        found(engine, asked(one, prompts["ram"]))
        if found(engine, asked(other, prompts["ram"])):
            open_ways.add("ram")
        results = generate(engine, *(asked(each, prompts["live row"]) for each in (one, other)))
        if any(map(cached, results)):
            open_ways.add("live row")
        warm(engine, one, prompts["warmed"])
        if found(engine, asked(other, prompts["warmed"])):
            open_ways.add("warmed")
        found(engine, asked(one, prompts["disk"]))
    with running_engine(family, disk=disk) as engine:
        assert cached(generate(engine, asked(one, prompts["disk"]))[0]), "its own is there"
        engine._ask(lambda scheduler: check_integrity(scheduler.cache._tree))
    with running_engine(family, disk=disk) as engine:
        if found(engine, asked(other, prompts["disk"])):
            open_ways.add("disk")
    return open_ways


@pytest.mark.parametrize("family", sampled(("qwen3", "qwen3_5", "gemma3"), ("qwen3_5",)))
def test_no_way_leads_from_one_tenant_to_another(family: str, tmp_path: Path) -> None:
    """Nor from a tenant to nobody, or back; one finds its own by every way, also after a restart, and so do all where
    tenants are not apart."""
    assert ways(family, tmp_path / "apart", ONE, OTHER) == set()
    assert ways(family, tmp_path / "same", ONE, ONE) == WAYS
    if IS_FULL:
        assert ways(family, tmp_path / "nobody", "", OTHER) == set()
        assert ways(family, tmp_path / "off", "", "") == WAYS


def test_one_root_for_all_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: names of blocks alone keep nobody apart, for a prefix is found by its tokens too."""
    real = Trie.root

    def shared(self: Trie, _partition: str) -> Node:
        return real(self, "")

    monkeypatch.setattr(Trie, "root", shared)
    assert {"ram", "warmed"} <= ways("qwen3", tmp_path, ONE, OTHER)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine(warming=AT_ONCE) as engine:
        yield engine


def test_nobody_waits_for_another_tenants_prefill(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """To wait would give nothing, and take as long as the other one's prompt takes."""
    waits: list[tuple[str, bool]] = []
    real = WaitingForPrefix._wait_for

    def noted(self: WaitingForPrefix, row: Any, prefills: Any) -> Any:
        answer = real(self, row, prefills)
        waits.append((row.request.partition, answer is not None))
        return answer

    monkeypatch.setattr(WaitingForPrefix, "_wait_for", noted)
    generate(engine, asked(ONE), asked(OTHER))
    assert {partition for partition, has_waited in waits if has_waited} == set()
    generate(engine, asked(ONE, prompt_of(148, 7)), asked(ONE, prompt_of(148, 7)))
    assert {partition for partition, has_waited in waits if has_waited} == {ONE}


def test_what_was_warmed_is_used_by_its_own_tenant(engine: Engine) -> None:
    """Another one that has computed the same itself is not told that it was warmed."""
    prompt = prompt_of(148, 8)
    found(engine, asked(OTHER, prompt))
    warm(engine, ONE, prompt)
    [theirs] = generate(engine, asked(OTHER, prompt))
    [own] = generate(engine, asked(ONE, prompt))
    assert (theirs.progress[-1].reuse.tier, own.progress[-1].reuse.tier) == ("ram", "warmed")


def test_a_partition_that_holds_nothing_is_forgotten(engine: Engine) -> None:
    """Tenants who ask once are many."""
    engine.clear_cache()
    for number in range(5):
        found(engine, replace(asked(f"key.{number}"), ttl_seconds=0))
    found(engine, asked(ONE))
    engine._ask(lambda scheduler: scheduler.sweep())
    assert engine._ask(lambda scheduler: scheduler.cache._tree.partitions()) == [ONE]


def test_where_a_conversation_is_kept_is_told_in_whichever_partition(engine: Engine) -> None:
    """An agent's status asks for a conversation, not for a tenant."""
    engine.clear_cache()
    [result] = generate(engine, asked(ONE))
    said = TokenSequence((*BASE, *result.tokens))
    assert engine.kept_tokens(said)[0] >= len(BASE)
    engine.discard(said, lambda _: False)
    assert engine.kept_tokens(said)[0] == MESSAGE_TOKENS, "the end of system and tools stays"


def test_the_tower_looks_anew_for_another_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it made of an image tells by its speed that somebody has shown it before."""
    monkeypatch.setattr(Tower, "look", lambda *_: Features(rows=_Nothing(), deepstack=()))  # type: ignore[arg-type]
    tower = Tower(None, 0, 1.0)
    image = ImageInput(ImageFacts("digest", (1, 2)), dict)
    for partition, num_calls in ((ONE, 1), (ONE, 1), (OTHER, 2), (ONE, 2)):
        tower.features(image, partition)
        assert tower.num_calls == num_calls


class _Nothing:
    nbytes = 1
