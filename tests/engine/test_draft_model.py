"""A model that drafts for another one: the text stays what it is, what the draft model has computed is kept, restored
and forgotten with the target's, and one that guesses badly is left."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvserve.core import Drafted, GenerationDone, GenerationRequest
from kvserve.engine import draft_support
from kvserve.engine.draft_costs import DraftCosts
from kvserve.engine.draft_model import DraftModel, refuse_unfit
from kvserve.engine.draft_nouns import DraftSettings
from kvserve.engine.engine_settings import DiskSettings, DraftStatus
from kvserve.engine.model import load
from kvserve.engine.pinned import PinnedPrefix
from kvserve.engine.prefix_cache import PrefixCache
from kvserve.engine.return_point import ReturnPoint, why_no_return
from kvserve.engine.self_check import check_caches
from kvserve.engine.warming import WarmSettings
from kvserve.engine.worker import Engine
from kvserve.errors import ModelLoadError
from tests.engine.drafts import Silent, drafted, drafted_engine
from tests.engine.engines import (
    Result,
    collect,
    do_all_idle_work,
    engine_settings,
    generate,
    prompt_of,
    request,
)
from tests.laws import IS_FULL, sampled
from tests.models import tiny_model

NUM_TOKENS = 40 if IS_FULL else 24
NUM_LEFT = 100 if IS_FULL else 64
"""Within these a model that guesses badly is left."""

PROMPT = prompt_of(60)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}
KINDS = ("llama", "qwen3_5", "gemma3")
"""Layers that are cut, recurrent states and windows, which are put back."""


def drafts_of(result: Result) -> Drafted:
    """What became of the draft model's tokens."""
    assert isinstance(result.end, GenerationDone)
    return result.end.drafting.by_source.get("draft model", Drafted())


def status(engine: Engine) -> DraftStatus:
    found = engine.status.draft_model
    assert found is not None
    return found


def ask(engine: Engine, wanted: GenerationRequest) -> Result:
    return collect(engine.submit(wanted))


@pytest.fixture(scope="module", params=sampled(KINDS, ("llama", "qwen3_5")))
def twins(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine whose model drafts for itself."""
    with drafted_engine(request.param) as engine:
        yield engine


def test_the_same_weights_are_right_every_time_and_change_nothing(twins: Engine) -> None:
    plain = ask(twins, request(PROMPT, 40))
    found = ask(twins, drafted(PROMPT, 40))
    assert found.tokens == plain.tokens
    assert drafts_of(found).num_tokens == drafts_of(found).num_accepted > 10
    assert drafts_of(plain) == Drafted()


def test_what_is_not_drawn_is_taken_back(twins: Engine) -> None:
    plain = ask(twins, request(PROMPT, NUM_TOKENS, **SAMPLED))
    found = ask(twins, drafted(PROMPT, NUM_TOKENS, **SAMPLED))
    assert found.tokens == plain.tokens
    assert 0 < drafts_of(found).num_accepted < drafts_of(found).num_tokens


def test_a_next_turn_begins_with_what_was_computed_of_the_last(twins: Engine) -> None:
    first = ask(twins, drafted(prompt_of(90, 1), NUM_TOKENS))
    before, prompt = status(twins), [*prompt_of(90, 1), *first.tokens, *prompt_of(8, 2)]
    ask(twins, drafted(prompt, 4))
    after = status(twins)
    assert after.num_cached_tokens - before.num_cached_tokens > 90
    assert after.num_computed_tokens - before.num_computed_tokens < NUM_TOKENS + 16


def test_a_row_whose_tokens_were_not_taken_back_is_guessed_worse(
    twins: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the text stays right, so that only acceptance tells. Nothing of it is kept."""
    wanted = replace(drafted(prompt_of(60, 3), NUM_TOKENS, **SAMPLED), ttl_seconds=0)
    honest = ask(twins, wanted)
    monkeypatch.setattr(ReturnPoint, "go_back", lambda point, caches, num_ahead: None)
    faulty = ask(twins, replace(wanted, drafter=Silent()))
    assert faulty.tokens == honest.tokens
    assert drafts_of(faulty).num_accepted < drafts_of(honest).num_accepted


def test_a_model_that_guesses_badly_is_soon_left() -> None:
    with drafted_engine("llama", tiny_model("llama", seed=1)) as engine:
        plain = ask(engine, request(PROMPT, NUM_LEFT))
        found = ask(engine, drafted(PROMPT, NUM_LEFT))
        assert found.tokens == plain.tokens
        assert drafts_of(found).num_accepted < drafts_of(found).num_tokens // 4
        assert not status(engine).is_used
        asked = status(engine).num_computed_tokens
        assert drafts_of(ask(engine, drafted(prompt_of(200, 5), 8))) == Drafted()
        assert status(engine).num_computed_tokens == asked, "no prompt is computed for a model that was left"


def test_a_long_prompt_is_computed_a_chunk_a_question_and_the_rest_when_nobody_waits() -> None:
    prompt = prompt_of(400, 6)
    with drafted_engine("llama", prefill_step_size=32, warming=WarmSettings(grace_seconds=0.0)) as engine:
        found = ask(engine, drafted(prompt, 6))
        assert drafts_of(found) == Drafted(), "the target went on meanwhile"
        assert 32 <= status(engine).num_computed_tokens < 300
        do_all_idle_work(engine)
        before = status(engine)
        ask(engine, drafted([*prompt, *found.tokens, 300, 301], 8))
        after = status(engine)
    assert after.num_cached_tokens - before.num_cached_tokens >= 400
    assert after.num_computed_tokens - before.num_computed_tokens < 32


def test_what_it_rested_through_is_computed_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the next turn, or one behind a restart, finds all of the answer."""
    prompt, num_asked = prompt_of(60, 6), 0

    def rests(_: DraftCosts) -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked > 2

    monkeypatch.setattr(DraftCosts, "rests", rests)
    with drafted_engine("llama", warming=WarmSettings(grace_seconds=0.0)) as engine:
        found = ask(engine, drafted(prompt, NUM_TOKENS))
        do_all_idle_work(engine)
        num_asked, before = 0, status(engine)
        ask(engine, drafted([*prompt, *found.tokens, 300, 301], 8))
        after = status(engine)
    assert after.num_cached_tokens - before.num_cached_tokens >= len(prompt) + NUM_TOKENS - 1


def test_rows_beside_one_another_are_written_as_alone(twins: Engine) -> None:
    wanted = [drafted(prompt_of(50, seed), NUM_TOKENS, **SAMPLED) for seed in range(2)]
    together = generate(twins, *wanted)
    alone = [ask(twins, replace(each, drafter=None)) for each in wanted]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    cancelled = twins.submit(drafted(prompt_of(50, 4), 4000))
    next(cancelled.batches(60))
    cancelled.cancel()
    collect(cancelled)
    assert ask(twins, replace(wanted[0], drafter=Silent())).tokens == alone[0].tokens
    assert twins._ask(lambda _: _draft_model(twins)._live_bytes()) == 0


def _draft_model(engine: Engine) -> DraftModel:
    found = engine._scheduler.draft_model if engine._scheduler is not None else None
    assert found is not None
    return found


def _flush(engine: Engine) -> bool:
    disk = _draft_model(engine).cache._disk
    return engine._ask(lambda _: disk is not None and disk.tier.flush(60))


def test_a_restart_begins_warm_and_who_is_forgotten_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes from the disk is waited for here: a row of a tiny model is over before."""
    is_restoring = PrefixCache.is_restoring

    def restored(cache: PrefixCache, pinned: PinnedPrefix) -> bool:
        while is_restoring(cache, pinned):
            cache.await_disk()
        return False

    monkeypatch.setattr(PrefixCache, "is_restoring", restored)
    disk = DiskSettings(tmp_path, None, 0, 24.0)
    wanted = replace(drafted(prompt_of(150, 7), 24), owner="key.one/session")
    with drafted_engine("llama", disk=disk) as engine:
        first = ask(engine, wanted)
    with drafted_engine("llama", disk=disk) as engine:
        longer = replace(drafted([*prompt_of(150, 7), *first.tokens, 300, 301], 8), owner="key.one/session")
        ask(engine, longer)
        assert status(engine).num_cached_tokens >= 150
        assert status(engine).num_computed_tokens < 32
        assert _flush(engine)
        assert status(engine).disk_bytes > 0
        engine.forget(lambda owner: owner == "key.one/session")
        assert (status(engine).ram_bytes, status(engine).disk_bytes) == (0, 0)
        engine.clear_cache()
    assert not list(tmp_path.glob("*/*.safetensors"))


def test_what_leaves_nothing_of_the_target_leaves_nothing_of_the_draft_model(twins: Engine) -> None:
    engine = twins
    engine.clear_cache()
    assert status(engine).ram_bytes == 0
    ask(engine, replace(drafted(prompt_of(80, 8), 12), ttl_seconds=0))
    assert status(engine).ram_bytes == 0


def test_memory_is_shared_and_told(twins: Engine) -> None:
    ask(twins, drafted(PROMPT, 12))
    memory, plan = twins.status.memory, twins._settings.memory_plan(twins.wait_until_ready())
    assert memory is not None and plan.draft is not None
    held = memory.accounts["draft_kv"]
    assert 0 < held.num_bytes < (held.max_bytes or 0) == plan.draft.total_bytes
    assert abs(plan.draft.kv_bytes - plan.kv_bytes) < 16, "the same weights hold as many tokens"
    alone = twins._settings.memory_plan(
        replace(twins.wait_until_ready(), draft=None, weight_bytes=twins.wait_until_ready().all_weight_bytes)
    )
    assert abs(plan.total_bytes - alone.total_bytes) < 16, "no more than without it"


@pytest.mark.parametrize("family", sampled(KINDS, ("gemma3",)))
def test_caches_that_do_not_come_back_are_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny_model(family), 131072)
    assert why_no_return(model) is None
    fit = replace(model, cache_support=check_caches(model) if IS_FULL else model.cache_support)
    refuse_unfit(fit, "small")
    monkeypatch.setattr(ReturnPoint, "go_back", lambda point, caches, num_ahead: None)
    with pytest.raises(ModelLoadError, match=r"DRAFT_MODEL='small' cannot draft: behind tokens that were taken back"):
        refuse_unfit(fit, "small")
    with pytest.raises(ModelLoadError, match="cannot be kept"):
        refuse_unfit(replace(fit, cache_support=replace(fit.cache_support, can_keep=False)), "small")


def test_a_draft_model_that_no_draft_pays_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its passes would save nothing: it takes no memory, which the start says, and answers come as without it."""
    lines: list[str] = []
    monkeypatch.setattr(draft_support, "pays", lambda _: False)
    folder, drafts = tiny_model("llama"), DraftSettings(is_on=True)
    engine = Engine(
        folder,
        engine_settings(draft_folder=folder, drafts=drafts),
        grammar_tokenizer=lambda _: None,
        report=pytest.fail,
        note=lines.append,
    )
    engine.start()
    try:
        plan = engine._settings.memory_plan(engine.wait_until_ready(60))
        assert (engine.can_draft, engine.status.draft_model, plan.draft, plan.draft_bytes) == (False, None, None, 0)
        assert len(ask(engine, request(PROMPT, 4)).tokens) == 4
    finally:
        engine.stop(60)
    assert [line.partition(":")[0] for line in lines] == [
        "Nothing is drafted",
        "DRAFT_MODEL is not used and takes no memory",
    ]
