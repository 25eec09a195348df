"""Once the ranks are lost every client hears of it, though the engine's thread never comes back; and rank 0 begins to
use its disk once all know what they have loaded."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvserve.core import GenerationFailed
from kvserve.engine.ranks.all_named import AllNamed
from kvserve.engine.ranks.place import ALONE, RanksLost
from kvserve.engine.worker import CALL_TIMEOUT_SECONDS
from kvserve.errors import RankLost
from tests.engine.engines import collect, held, prompt_of, request, running_engine
from tests.engine.ranks.pair import pair


def test_open_requests_end_while_the_engine_stands_still() -> None:
    """From the thread that has noticed; a second reason changes nothing, and nobody is let in any more."""
    with running_engine() as engine, held(engine):
        handles = [engine.submit(request(prompt_of(20, seed), 4)) for seed in range(2)]
        engine.lose("rank 1 has gone")
        engine.lose("rank 2 has gone")
        for handle in handles:
            end = collect(handle).end
            assert isinstance(end, GenerationFailed)
            assert isinstance(end.error, RankLost)
            assert "rank 1 has gone" in str(end.error)
        with pytest.raises(RankLost, match="rank 1 has gone"):
            engine.submit(request(prompt_of(20), 4))


def test_an_event_behind_the_last_one_is_dropped() -> None:
    """The engine's thread may come back, and go on with a row whose client has gone."""
    with running_engine() as engine:
        with held(engine):
            handle = engine.submit(request(prompt_of(20), 4))
            engine.lose("rank 1 has gone")
        engine.stop(20)
        [batch] = list(handle.batches(0))
        assert isinstance(batch[-1], GenerationFailed)


def test_who_asks_the_engine_hears_of_a_loss() -> None:
    """At once, where the question itself meets it and where it is met before the question is."""

    def lost(_: object) -> None:
        raise RanksLost("rank 1 has gone")

    with running_engine() as engine:
        began_at = time.monotonic()
        with ThreadPoolExecutor(2) as web:
            with held(engine):
                asked = [web.submit(engine._ask, question) for question in (lost, id)]
                time.sleep(0.2)  # both wait in the inbox
            for each in asked:
                with pytest.raises(RankLost, match="rank 1 has gone"):
                    each.result()
        assert time.monotonic() - began_at < CALL_TIMEOUT_SECONDS / 2


def test_the_disk_is_used_once_all_ranks_are_named() -> None:
    """In whichever order they come to know, and once."""
    done, wrong = list[int](), list[str]()
    named = AllNamed(3, wrong.append)
    named.note(2, "f")
    named.own("f", lambda: done.append(1))
    assert not done
    named.note(1, "f")
    named.note(1, "f")
    assert (done, wrong) == ([1], [])


def test_other_weights_on_a_rank_are_no_part_of_the_model() -> None:
    done, wrong = list[int](), list[str]()
    named = AllNamed(2, wrong.append)
    named.own("f", lambda: done.append(1))
    named.note(1, "g")
    assert not done
    assert wrong == ["rank 1 has loaded other weights than rank 0"]


def test_each_rank_has_a_name_of_its_own_on_disk() -> None:
    """Its part of the KV is of no use to another one, whose folder may be the same. Alone the name is what it was."""
    with pair("qwen3") as both:
        own, other = both.leader.ranks.salt, both.follower.ranks.salt
    assert own and other and own != other
    assert not ALONE.salt
