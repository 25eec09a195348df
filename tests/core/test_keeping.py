"""Who is meant by a wish to forget, and that a request which is meant leaves nothing from then on."""

import gc
import threading
from dataclasses import replace

import pytest

from kvserve.core import RequestId, SamplingParams, Turn
from kvserve.core.keeping import Keeping, Scope, UnderWay

EVERYBODY = (("ann", "one"), ("ann", "two"), ("ben", "one"), ("", "one"), ("ann", None), ("", None))


@pytest.mark.parametrize(
    ("scope", "covered"),
    [
        (Scope(session="one"), {("ann", "one"), ("ben", "one"), ("", "one")}),
        (Scope(principal="ann"), {("ann", "one"), ("ann", "two"), ("ann", None)}),
        (Scope(principal=""), {("", "one"), ("", None)}),
        (Scope("one", "ann"), {("ann", "one")}),
        (Scope("three"), set()),
        (Scope(), set(EVERYBODY)),
    ],
)
def test_whom_a_scope_covers(scope: Scope, covered: set[tuple[str, str | None]]) -> None:
    """Whoever is both; a name that is not given stands for any. Only those of them may not keep anything any more."""
    assert {whose for whose in EVERYBODY if scope.covers(*whose)} == covered
    under_way, keepings = UnderWay(), {whose: Keeping() for whose in EVERYBODY}
    for (principal, session), keeping in keepings.items():
        under_way.begin(keeping, principal, session)
    with under_way.forgetting(scope):
        for whose, keeping in keepings.items():
            assert may_keep(keeping) is (whose not in covered)


def may_keep(keeping: Keeping) -> bool:
    with keeping as is_allowed:
        return is_allowed


def test_who_comes_while_its_owner_is_forgotten_may_keep_nothing() -> None:
    """Until the end of it, however many forget the same one at once; who comes later may."""
    under_way = UnderWay()

    def comes(principal: str = "ann") -> bool:
        keeping = Keeping()
        under_way.begin(keeping, principal, "one")
        return may_keep(keeping)

    with under_way.forgetting(Scope(principal="ann")):
        with under_way.forgetting(Scope(principal="ann")), under_way.forgetting(Scope("two")):
            assert not comes() and comes("ben")
        assert not comes()
        late = Keeping()
        under_way.begin(late, "ann", None)
    assert comes() and not may_keep(late)
    with pytest.raises(OSError, match="broken"), under_way.forgetting(Scope("one")):
        raise OSError("broken")
    assert comes()


def test_who_forgets_waits_for_what_is_being_kept() -> None:
    """It is all there when forgetting goes on, and what asks within the block is told the same."""
    keeping, under_way = Keeping(), UnderWay()
    under_way.begin(keeping, "ann", None)

    def forget() -> None:
        with under_way.forgetting(Scope(principal="ann")):
            pass

    forgetting = threading.Thread(target=forget)
    with keeping as may_keep:
        forgetting.start()
        forgetting.join(0.1)
        assert forgetting.is_alive() and may_keep
        with keeping as again:
            assert again
    forgetting.join(60)
    with keeping as may_keep:
        assert not may_keep


def test_a_turn_has_one_keeping_however_it_is_rewritten_and_is_under_way_while_it_is_held() -> None:
    """Nothing is left of a request that nobody holds any more."""
    turn = Turn(RequestId("a"), "chat", None, SamplingParams())
    other = replace(turn, max_tokens=3)
    assert other.keeping is turn.keeping and Turn(RequestId("a"), "chat", None, SamplingParams()) == turn
    under_way = UnderWay()
    under_way.begin(turn.keeping, "", None)
    del turn
    gc.collect()
    assert len(under_way._whose) == 1
    del other
    gc.collect()
    assert len(under_way._whose) == 0
