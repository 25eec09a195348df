"""Once the ranks are lost every client hears of it, though the engine's thread never comes back; and rank 0 begins to
use its disk once all know what they have loaded."""

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvserve.core import GenerationFailed
from kvserve.core.rank_place import LayerSpan, RankPlace
from kvserve.engine.ranks.all_named import AllNamed
from kvserve.engine.ranks.leading import LeadingRanks
from kvserve.engine.ranks.place import ALONE, Ranks, RanksLost
from kvserve.engine.ranks.rank_link import Progress
from kvserve.engine.ranks.status import FollowerStatus, RanksStatus
from kvserve.engine.worker import CALL_TIMEOUT_SECONDS, Engine
from kvserve.errors import RankLost
from tests.engine.engines import collect, engine_settings, held, prompt_of, request, running_engine
from tests.engine.ranks.pair import PairLink, Turns, pair


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


def test_who_asks_hears_of_a_loss_though_the_engine_stands_still() -> None:
    """From the thread that has noticed, long before it is taken for busy; what the engine says later, nobody hears."""
    lines = list[str]()
    with running_engine(report=lines.append) as engine:
        began_at = time.monotonic()
        with ThreadPoolExecutor(1) as web:
            with held(engine):
                asked = web.submit(engine.cache_report)
                time.sleep(0.2)
                engine.lose("rank 1 has gone")
                with pytest.raises(RankLost, match="rank 1 has gone"):
                    asked.result(CALL_TIMEOUT_SECONDS / 2)
            with pytest.raises(RankLost, match="rank 1 has gone"):
                engine.cache_report()
        engine.stop(20)
        assert engine.has_ended and not lines
        assert time.monotonic() - began_at < CALL_TIMEOUT_SECONDS


def test_what_the_ranks_are_is_told_at_any_moment(tmp_path: Path) -> None:
    """Before they have met, and once they are lost; of an engine that computes alone there is nothing to tell."""
    place, options = RankPlace(0, 2, ""), {"grammar_tokenizer": lambda _: None, "report": print}
    engine = Engine(tmp_path, engine_settings(), place=place, **options)
    assert engine.status.ranks == RanksStatus(2, (), None)
    link = PairLink(0, deque(), deque(), Turns())
    link.told = {"ram_bytes": 1, "disk_bytes": 2, "num_disk_faults": 3}
    engine._start.ranks = LeadingRanks(place, [link], Progress(), lambda ids: ids, lambda: True)
    engine.lose("rank 1 has gone")
    assert engine.status.ranks == RanksStatus(2, (FollowerStatus(1, 1, 2, 3),), "rank 1 has gone")
    assert Engine(tmp_path, engine_settings(), **options).status.ranks is None


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


class Named(Ranks):
    """Two ranks, of which the other one has loaded this."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def gathered(self, name: str, value: str) -> list[str]:
        return [value, self._fingerprint]


@pytest.mark.parametrize(("other", "num_times"), [("f", 1), ("", 0)])
def test_a_disk_that_all_can_use_is_used_before_the_first_request(other: str, num_times: int, tmp_path: Path) -> None:
    """The start asks all what they have loaded: no request comes before a word that is still on its way."""
    engine = Engine(
        tmp_path, engine_settings(), grammar_tokenizer=lambda _: None, report=print, place=RankPlace(0, 2, "")
    )
    start, used = engine._start, list[str]()
    start.ranks, start._fingerprint = Named(other), "f"
    start._all_named.own("f", lambda: used.append("disk"))
    start._share_name()
    assert used == ["disk"] * num_times


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


def test_what_is_on_disk_is_named_by_the_layers_of_a_rank() -> None:
    """Divided in another way the same rank has other layers. Of a part of every layer the name is what it was."""
    ranks, names = Ranks(), set[str]()
    ranks.place = RankPlace(1, 2, "")
    for span in (None, LayerSpan(0, 24, 48), LayerSpan(0, 16, 48), LayerSpan(16, 32, 48)):
        ranks.span = span
        names.update(ranks.salt)
    assert len(names) == 4 and "rank 1 of 2, tensor" in names
