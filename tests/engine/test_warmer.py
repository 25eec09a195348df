"""KV that is computed ahead of requests, on real tiny models: exact, in nobody's way, within its budget, counted."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvserve.core import GenerationDone, GenerationRequest, MessageStart, TokenSequence
from kvserve.engine.engine_settings import DiskSettings
from kvserve.engine.prefill import Prefill
from kvserve.engine.rows import RequestHandle
from kvserve.engine.snapshot import CacheLayout
from kvserve.engine.warmer import MAX_JOBS, Warmer
from kvserve.engine.warming import Warming, WarmJob, WarmKind, WarmReport, WarmResult, WarmSettings
from kvserve.engine.worker import Engine
from tests.engine.engines import (
    CACHE,
    MESSAGE_TOKENS,
    Result,
    assert_exact,
    cached,
    cold,
    collect,
    generate,
    live_extra_bytes,
    prompt_of,
    request,
    running_engine,
    turn,
)
from tests.engine.odd_caches import RefusesCopies, use_cache
from tests.integrity import check_integrity
from tests.laws import TWO_KINDS, sampled, sampled_cells

FAMILIES = ("qwen3", "qwen3_5", "gemma3")
"""Every layer can be cut; recurrent layers; sliding windows."""

AT_ONCE = WarmSettings(grace_seconds=0)
BASE = prompt_of(292)
NUM_AHEAD = 5 * MESSAGE_TOKENS
WAIT_SECONDS = 60.0


def job(num_tokens: int = NUM_AHEAD, tokens: list[int] = BASE, **changes: Any) -> WarmJob:
    """The first tokens of a prompt that `turn` makes, ahead of it."""
    starts = tuple(
        MessageStart(offset, is_user=index % 2 == 1)
        for index, offset in enumerate(range(0, num_tokens, MESSAGE_TOKENS))
    )
    values: dict[str, Any] = {"tokens": TokenSequence(tuple(tokens[:num_tokens])), "kind": "next_turn"}
    return WarmJob(**(values | {"message_starts": starts} | changes))


def ended(warming: Warming) -> WarmResult:
    result = warming.wait(WAIT_SECONDS)
    assert result is not None, "the job did not end"
    return result


def report_of(engine: Engine) -> WarmReport:
    report = engine.cache_report().warming
    assert report is not None
    return report


def tier_of(result: Result) -> str:
    return result.progress[-1].reuse.tier


@pytest.fixture(scope="module", params=sampled(FAMILIES, ("qwen3_5",)))
def shared_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with running_engine(request.param, warming=AT_ONCE) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared_dense_engine() -> Iterator[Engine]:
    with running_engine(warming=AT_ONCE) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """An engine of each family that has forgotten everything."""
    with _left_clean(shared_engine):
        yield shared_engine


@pytest.fixture
def dense(shared_dense_engine: Engine) -> Iterator[Engine]:
    """One whose layers can all be cut, where the family makes no difference."""
    with _left_clean(shared_dense_engine):
        yield shared_dense_engine


@contextmanager
def _left_clean(engine: Engine) -> Iterator[None]:
    """Nothing is known before; the tree is whole and nobody stands on it afterwards."""
    engine.clear_cache()
    yield
    engine._ask(lambda scheduler: check_integrity(scheduler.cache._tree))
    assert engine.cache_report().stats.num_leases == 0


# --- what it gives ----------------------------------------------------------------------------------------------------


def test_what_was_warmed_is_not_computed_again_and_exact(engine: Engine) -> None:
    """The request that begins with a warmed prefix starts behind it and is answered as by a cold server."""
    expected = cold(engine, BASE, 16)
    result = ended(engine.warm(job()))
    assert (result.state, result.num_cached_tokens, result.num_computed_tokens) == ("done", 0, NUM_AHEAD)
    [warm] = generate(engine, turn(BASE, 16))
    assert cached(warm) == NUM_AHEAD
    assert_exact(warm, expected)


def test_wrong_kv_ahead_would_show(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what was warmed, restored one token too far, is answered otherwise than by a cold server."""
    expected = cold(engine, BASE, 16)
    ended(engine.warm(job()))
    real = CacheLayout.restore

    def shifted(self: CacheLayout, *arguments: Any) -> list[Any]:
        caches = real(self, *arguments)
        for cache in caches:
            if hasattr(cache, "offset"):
                cache.offset += 1
        return caches

    monkeypatch.setattr(CacheLayout, "restore", shifted)
    [warm] = generate(engine, turn(BASE, 16))
    assert cached(warm) == NUM_AHEAD
    assert warm.tokens != expected


def test_only_what_is_missing_is_computed(engine: Engine) -> None:
    """A job for what is known computes nothing, one for more computes the rest."""
    generate(engine, turn(BASE[: 2 * MESSAGE_TOKENS + 4], 1))
    longer = ended(engine.warm(job()))
    again = ended(engine.warm(job()))
    assert longer.num_cached_tokens >= 2 * MESSAGE_TOKENS
    assert longer.num_cached_tokens + longer.num_computed_tokens == NUM_AHEAD
    assert (again.state, again.num_cached_tokens, again.num_computed_tokens) == ("done", NUM_AHEAD, 0)


def test_the_end_of_a_prefix_is_a_place_to_start_from(engine: Engine) -> None:
    """Also where no message begins: any request that goes on with something else starts there."""
    ended(engine.warm(job(NUM_AHEAD - 11, message_starts=())))
    [warm] = generate(engine, turn([*BASE[: NUM_AHEAD - 11], *prompt_of(40, 3)], 1))
    assert cached(warm) == NUM_AHEAD - 11


# --- in nobody's way --------------------------------------------------------------------------------------------------


@contextmanager
def watched_chunks(on_chunk: Callable[[str, int], None]) -> Iterator[None]:
    """Every chunk of a prefill is told, on the engine's thread: of which request, and how many there were before."""
    real, numbers = Prefill.step, iter(range(10**6))

    def step(self: Prefill, *arguments: Any) -> int:
        on_chunk(self.row.request.request_id, next(numbers))
        return real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefill, "step", step)
        yield


@sampled_cells(lambda family: family == "qwen3")
@pytest.mark.parametrize("family", sampled(FAMILIES, TWO_KINDS))
def test_a_request_waits_for_one_chunk_at_most(family: str) -> None:
    """It comes while a chunk is computed: the next one is its own, and the job goes on when it has its answer."""
    chunks: list[str] = []
    submitted: list[RequestHandle] = []
    tokens, other = prompt_of(532), prompt_of(100, 5)
    with running_engine(family, warming=AT_ONCE, prefill_step_size=64) as engine:
        expected = cold(engine, other, 8)

        def on_chunk(name: str, _number: int) -> None:
            chunks.append(name)
            if len(chunks) == 3:
                submitted.append(engine.submit(turn(other, 8)))

        with watched_chunks(on_chunk):
            result = ended(engine.warm(job(528, tokens)))
            answer = collect(submitted[0])
        assert set(chunks[:3]) == {"warming-next_turn"}, "it was being computed when the request came"
        assert chunks[3] == "test", "no further chunk of it was computed before the request's"
        last = max(index for index, name in enumerate(chunks) if name == "test")
        assert set(chunks[3 : last + 1]) == {"test"}, "nor while it had no answer"
        assert_exact(answer, expected)
        assert (result.state, result.num_computed_tokens) == ("done", 528), "nothing was computed twice"
        [warm] = generate(engine, turn(tokens, 8))
        assert cached(warm) == 528
        assert_exact(warm, cold(engine, tokens, 8))
        assert engine.cache_report().stats.num_leases == 0


def test_a_request_finds_what_was_computed_of_its_own_beginning() -> None:
    """The request that a job was for comes while it is computed: it starts from there."""
    submitted: list[RequestHandle] = []
    tokens = prompt_of(800)

    def on_chunk(_name: str, number: int) -> None:
        if number == 4:
            submitted.append(engine.submit(turn(tokens, 4)))

    with running_engine(warming=AT_ONCE, prefill_step_size=128) as engine:
        with watched_chunks(on_chunk):
            result = ended(engine.warm(job(768, tokens)))
        answer = collect(submitted[0])
        assert tier_of(answer) == "warmed"
        assert 0 < cached(answer) < 700
        assert (result.state, result.num_computed_tokens) == ("done", cached(answer)), "the rest was there by then"


def test_it_begins_when_the_engine_has_been_idle_for_a_while() -> None:
    """A client that goes on at once meets no chunk of ours."""
    with running_engine(warming=WarmSettings(grace_seconds=3600)) as engine:
        generate(engine, request(prompt_of(20), 1))
        warming = engine.warm(job())
        generate(engine, *(request(prompt_of(20, seed), 1) for seed in range(5)))
        assert warming.result is None
        assert report_of(engine).num_waiting == 1
    assert ended(warming).reason == "shutdown"


def test_nothing_is_left_behind_at_the_end() -> None:
    """An engine that stops while it warms keeps what was computed, frees the rest and tells whoever waits."""
    with running_engine(warming=AT_ONCE, prefill_step_size=64) as engine:
        cache = engine._ask(lambda scheduler: scheduler.cache)
        stopping: list[int] = []

        def on_chunk(_name: str, number: int) -> None:
            if number == 3:
                engine._stopping.set()
                engine._inbox.put(None)
                stopping.append(number)

        with watched_chunks(on_chunk):
            results = [
                ended(warming)
                for warming in (engine.warm(job(3000, prompt_of(3100))), engine.warm(job(kind="learned")))
            ]
    assert stopping == [3]
    assert [result.state for result in results] == ["dropped", "dropped"]
    assert cache.report().stats.num_leases == 0
    assert ended(engine.warm(job())).reason == "not ready"


# --- its budget, and its end ------------------------------------------------------------------------------------------


def test_it_computes_no_more_than_it_may(engine: Engine) -> None:
    """A job ends with its tokens; what it has computed serves all the same."""
    result = ended(engine.warm(job(max_tokens=100)))
    assert (result.state, result.reason, result.num_computed_tokens) == ("dropped", "budget", 100)
    [warm] = generate(engine, turn(BASE, 8))
    assert cached(warm) == 100
    assert_exact(warm, cold(engine, BASE, 8))


@pytest.mark.parametrize(("kind", "expected"), [("next_turn", 64), ("learned", 64), ("prewarm", NUM_AHEAD)])
def test_the_settings_bind_what_no_client_asked_for(kind: str, expected: int) -> None:
    """A client's own wish is computed whole."""
    with running_engine(warming=replace(AT_ONCE, max_tokens=64)) as engine:
        assert ended(engine.warm(job(kind=kind))).num_computed_tokens == expected


def test_without_a_share_of_the_time_only_clients_are_served() -> None:
    """A share of nothing switches off what no client asked for."""
    with running_engine(warming=replace(AT_ONCE, time_share=0)) as engine:
        results = [ended(engine.warm(job(kind=kind))) for kind in ("next_turn", "learned", "prewarm")]
        assert [(result.state, result.reason) for result in results] == [("dropped", "budget")] * 2 + [("done", "")]


def test_a_job_that_fails_is_not_tried_again(dense: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails alone: one attempt, nothing held, and the next request and the next job are served."""
    attempts: list[str] = []

    def broken(self: Prefill, *_arguments: Any) -> int:
        attempts.append(self.row.request.request_id)
        raise MemoryError("no room for this chunk")

    with monkeypatch.context() as patch:
        patch.setattr(Prefill, "step", broken)
        result = ended(dense.warm(job()))
        before = report_of(dense)
        assert (result.state, result.reason) == ("failed", "MemoryError: no room for this chunk")
        assert before.num_waiting == 0
        dense.cache_report()
    assert attempts == ["warming-next_turn"]
    assert dense.cache_report().stats.num_leases == 0
    assert cached(generate(dense, turn(BASE))[0]) == 0
    assert ended(dense.warm(job(tokens=prompt_of(300, 9)))).state == "done"


def test_a_job_that_cannot_be_put_down_has_failed(dense: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that comes meanwhile has nothing to do with it, and it does not wait for another attempt."""
    put_down = Warmer._put_down

    def broken(self: Warmer, active: Any) -> None:
        put_down(self, active)
        raise KeyError("a")

    def interrupted(scheduler: Any) -> tuple[Warming, int]:
        scheduler.warmer.add(warming := Warming(job()))
        while not scheduler.warmer.live_bytes():
            assert scheduler.warmer.step()
        with monkeypatch.context() as patch:
            patch.setattr(Warmer, "_put_down", broken)
            scheduler.warmer.pause()
        return warming, scheduler.warmer.report().num_waiting

    warming, num_waiting = dense._ask(interrupted)
    result = ended(warming)
    assert (result.state, result.reason, num_waiting) == ("failed", "KeyError: 'a'", 0)


def test_a_job_that_nobody_wants_any_more_ends(dense: Engine) -> None:
    """Cancelled, or replaced by a later one for the same next request."""
    stopped = dense.warm(job(kind="learned"))
    stopped.cancel()
    assert ended(stopped).state in ("dropped", "done")

    def block(scheduler: Any) -> tuple[Warming, Warming]:
        first, second = Warming(job(key="session")), Warming(job(NUM_AHEAD - MESSAGE_TOKENS, key="session"))
        scheduler.warmer.add(first)
        scheduler.warmer.add(second)
        return first, second

    first, second = dense._ask(block)
    assert (ended(first).state, ended(first).reason) == ("dropped", "replaced")
    assert ended(second).state == "done"


def test_clients_come_first_and_then_the_newest_session(dense: Engine) -> None:
    """Of jobs that wait together a client's own goes first, then the session that was heard of last."""
    order: list[str] = []

    def add(scheduler: Any) -> list[Warming]:
        wanted = [("learned", "a"), ("next_turn", "b"), ("next_turn", "c"), ("prewarm", "d")]
        jobs = [
            Warming(job(tokens=prompt_of(300, seed), kind=kind, key=key)) for seed, (kind, key) in enumerate(wanted)
        ]
        for each in jobs:
            each.end = lambda result, each=each, end=each.end: (order.append(each.job.key), end(result))  # type: ignore[method-assign]
            scheduler.warmer.add(each)
        return jobs

    for warming in dense._ask(add):
        assert ended(warming).state == "done"
    assert order == ["d", "c", "b", "a"]


def test_jobs_that_wait_are_bounded(dense: Engine) -> None:
    """The oldest of what the server has learned goes first; nothing computes for those that are cancelled."""

    def flood(scheduler: Any) -> list[Warming]:
        wanted: list[WarmKind] = ["next_turn", "learned", "learned", *(["prewarm"] * (MAX_JOBS - 2))]
        jobs = [Warming(job(tokens=prompt_of(300, seed), kind=kind)) for seed, kind in enumerate(wanted)]
        for each in jobs:
            scheduler.warmer.add(each)
            each.cancel()
        return jobs

    reasons = [ended(warming).reason for warming in dense._ask(flood)]
    assert reasons == ["cancelled", "full", *["cancelled"] * (MAX_JOBS - 1)]
    assert dense.cache_report().stats.num_stored_tokens == 0


def test_a_job_of_no_tokens_that_exist_fails_alone(dense: Engine) -> None:
    """Ids that no model has: told to whoever asked, and everything else goes on."""
    running = dense.submit(turn(BASE, 8))
    wrong = dense.warm(job(tokens=[-1] * 300, key="session"))
    assert ended(wrong).state == "failed"
    assert len(collect(running).tokens) == 8


def test_what_can_never_be_computed_is_refused() -> None:
    """Longer than the context, or empty: told at once."""
    with running_engine(warming=AT_ONCE, max_kv_size=200) as engine:
        assert ended(engine.warm(job())).reason == "too long"
        assert ended(engine.warm(job(0))).reason == "empty"


def test_without_kept_kv_nothing_is_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose caches cannot be kept would compute for nobody."""
    use_cache(monkeypatch, RefusesCopies)
    with running_engine(warming=AT_ONCE) as engine:
        assert not engine.wait_until_ready().cache_support.can_keep
        result = ended(engine.warm(job()))
        assert (result.state, result.reason) == ("dropped", "no cache")


GUESSES: tuple[WarmKind, ...] = ("next_turn", "learned")


def in_ram(engine: Engine, tokens: list[int]) -> int:
    return engine.kept_tokens(TokenSequence(tuple(tokens)))[0]


def num_left(engine: Engine) -> tuple[int, int]:
    """Tokens and states that have left RAM so far."""
    stats = engine.cache_report().stats
    return stats.num_evicted_tokens, stats.num_evicted_checkpoints


@contextmanager
def nearly_full(family: str, folder: Path | None, num_sessions: float) -> Iterator[tuple[Engine, int]]:
    """An engine with RAM for so many sessions like the one in it, which has had a turn, and how much RAM has of that.
    Where there is a disk, it has what the guesses are of."""
    with running_engine(family) as engine:
        generate(engine, turn(BASE, 4))
        num_bytes, extra_bytes = engine.cache_report().stats.ram_bytes, live_extra_bytes(engine, 300)
    small = replace(CACHE, max_bytes=int(num_sessions * num_bytes) + extra_bytes)
    disk = DiskSettings(folder, None, 0, 24.0) if folder is not None else None
    with running_engine(family, warming=AT_ONCE, cache=small, disk=disk) as engine:
        if folder is not None:
            generate(engine, *(turn(prompt_of(292, seed), 4) for seed in range(1, 5)))
            engine._ask(lambda scheduler: scheduler.cache.make_room(small.max_bytes))
            assert engine.cache_report().stats.num_nodes == 0
        generate(engine, turn(BASE, 4))
        num_tokens = in_ram(engine, BASE)
        assert num_tokens >= NUM_AHEAD
        yield engine, num_tokens


@sampled_cells(lambda family, on_disk: on_disk == (family == "qwen3"))
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("family", sampled(FAMILIES, TWO_KINDS))
def test_a_guess_takes_free_ram_only(family: str, on_disk: bool, tmp_path: Path) -> None:
    """There is no room beside a session that is in use: guesses are dropped, and it keeps all of its prefix in RAM,
    whether they were to be computed or read from the disk."""
    with nearly_full(family, tmp_path if on_disk else None, 1.5) as (engine, num_tokens):
        before = num_left(engine)
        for seed in range(1, 5):
            for kind in GUESSES:
                result = ended(engine.warm(job(tokens=prompt_of(292, seed), kind=kind)))
                assert (result.state, result.reason, result.num_computed_tokens) == ("dropped", "no room", 0)
                assert in_ram(engine, BASE) == num_tokens
        assert num_left(engine) == before
        [next_turn] = generate(engine, turn(BASE, 8))
        assert tier_of(next_turn) == "ram" and cached(next_turn) >= NUM_AHEAD


@pytest.mark.parametrize("num_sessions", [3, 3.5, 4, 4.5])
@pytest.mark.parametrize("family", FAMILIES)
@sampled_cells(lambda family, num_sessions: (family, num_sessions) == ("qwen3_5", 3.5))
def test_a_guess_that_fits_is_computed_and_takes_nothing(family: str, num_sessions: float) -> None:
    """With room for a few, the first ones are computed, whole, and those for which there is none are not begun."""
    with nearly_full(family, None, num_sessions) as (engine, num_tokens):
        before = num_left(engine)
        results = [ended(engine.warm(job(tokens=prompt_of(292, seed)))) for seed in range(1, 9)]
        done = [result for result in results if result.state == "done"]
        assert 0 < len(done) < len(results)
        assert {(each.reason, each.num_computed_tokens) for each in results} == {("", NUM_AHEAD), ("no room", 0)}
        assert report_of(engine).tokens.num_warmed_tokens == len(done) * NUM_AHEAD
        assert in_ram(engine, BASE) == num_tokens and num_left(engine) == before


@pytest.mark.parametrize("family", sampled(FAMILIES, ("qwen3",)))
def test_what_a_client_asks_for_makes_room_as_a_request_does(family: str) -> None:
    """Negative control of the two above: the same as a client's own wishes takes the place of the session."""
    with nearly_full(family, None, 1.5) as (engine, num_tokens):
        for seed in range(1, 5):
            assert ended(engine.warm(job(tokens=prompt_of(292, seed), kind="prewarm"))).state == "done"
        assert in_ram(engine, BASE) < num_tokens


# --- what is told -----------------------------------------------------------------------------------------------------


def test_what_came_of_it_is_counted(dense: Engine) -> None:
    """Warmed tokens are used once, by the first request that starts from them, or wasted; the prompt's own counts say
    nothing of them."""
    before = report_of(dense).tokens
    prefilled = dense.cache_report().totals.num_prefill_tokens
    ended(dense.warm(job()))
    assert dense.cache_report().totals.num_prefill_tokens == prefilled
    [first] = generate(dense, turn(BASE, 1))
    [second] = generate(dense, turn(BASE, 1))
    assert (tier_of(first), tier_of(second)) == ("warmed", "ram")
    ended(dense.warm(job(tokens=prompt_of(300, 8))))
    tokens = report_of(dense).tokens
    assert tokens.num_warmed_tokens - before.num_warmed_tokens == 2 * NUM_AHEAD
    assert tokens.num_used_tokens - before.num_used_tokens == NUM_AHEAD
    assert (tokens.num_wasted_tokens - before.num_wasted_tokens, tokens.num_unused_tokens) == (0, NUM_AHEAD)
    dense.clear_cache()
    tokens = report_of(dense).tokens
    assert (tokens.num_wasted_tokens - before.num_wasted_tokens, tokens.num_unused_tokens) == (NUM_AHEAD, 0)


def test_no_checkpoint_is_missed_by_a_job(engine: Engine) -> None:
    """A job that parts from what is known inside a message is no request that missed anything."""
    generate(engine, turn(BASE, 1))
    before = engine.cache_report().num_hybrid_trim_misses
    ended(engine.warm(job(tokens=[*BASE[:100], *prompt_of(200, 4)])))
    assert engine.cache_report().num_hybrid_trim_misses == before


def test_what_left_the_cache_unused_was_in_vain() -> None:
    """KV that others push out of RAM counts as wasted, and nothing counts twice."""
    with running_engine(warming=AT_ONCE) as engine:
        ended(engine.warm(job()))
        num_bytes, extra_bytes = engine.cache_report().stats.ram_bytes, live_extra_bytes(engine, 300)
    small = replace(CACHE, max_bytes=int(2.5 * num_bytes) + extra_bytes)
    with running_engine(warming=AT_ONCE, cache=small) as engine:
        ended(engine.warm(job()))
        for seed in range(1, 5):
            generate(engine, turn(prompt_of(292, seed), 4))
        tokens = report_of(engine).tokens
        assert (tokens.num_warmed_tokens, tokens.num_used_tokens) == (NUM_AHEAD, 0)
        assert tokens.num_wasted_tokens == NUM_AHEAD


def test_what_the_disk_has_is_read_instead_of_computed(tmp_path: Path) -> None:
    """After a restart a job brings its prefix back from the disk, and the request after it waits for nothing."""
    disk = DiskSettings(tmp_path, max_bytes=None, min_free_bytes=0, ttl_hours=24.0)
    with running_engine("qwen3_5", warming=AT_ONCE, disk=disk) as engine:
        expected = cold(engine, BASE, 8)
        ended(engine.warm(job()))
    with running_engine("qwen3_5", warming=AT_ONCE, disk=disk) as engine:
        result = ended(engine.warm(job(kind="learned")))
        assert (result.state, result.num_cached_tokens, result.num_computed_tokens) == ("done", NUM_AHEAD, 0)
        [warm] = generate(engine, turn(BASE, 8))
        assert (cached(warm), tier_of(warm)) == (NUM_AHEAD, "ram")
        assert_exact(warm, expected)
        disk_report = engine.cache_report().disk
        assert disk_report is not None
        assert disk_report.num_restores == 1


def test_a_flood_of_requests_leaves_jobs_waiting(dense: Engine) -> None:
    """Jobs and requests mixed from several threads: every request has its answer, every job its end."""
    jobs = [dense.warm(job(tokens=prompt_of(300, seed), kind="learned")) for seed in range(6)]
    results = generate(dense, *(_small(seed) for seed in range(12)))
    assert all(isinstance(result.end, GenerationDone) for result in results)
    assert {ended(each).state for each in jobs} == {"done"}


def _small(seed: int) -> GenerationRequest:
    return request(prompt_of(40, 50 + seed), 3)


def test_an_idle_engine_with_a_spent_budget_sleeps() -> None:
    """Nothing is due before the account is filled again: the engine does not spin for it."""
    with running_engine(warming=replace(AT_ONCE, time_share=1e-9)) as engine:
        warming = engine.warm(job())
        deadline = time.monotonic() + WAIT_SECONDS
        while not report_of(engine).seconds:
            assert time.monotonic() < deadline
        assert engine._ask(lambda scheduler: (scheduler.do_idle_work(), scheduler.seconds_to_rest(30.0))) == (False, 30)
        assert warming.result is None
        assert engine.cache_report().stats.num_leases == 0
