"""One rank of a ring, as a process of its own: a few passes that are one sum each, one of which may fail here. It says
what each came to, a line each. Ends with 1 once the ranks are lost."""

import os
import sys

import mlx.core as mx

from kvserve.engine.ranks import rank_link
from kvserve.engine.ranks.following import FollowingRanks
from kvserve.engine.ranks.group import join
from kvserve.engine.ranks.place import RanksLost
from kvserve.engine.ranks.rank_link import Ears
from kvserve.settings.rank_env import rank_place

NUM_PASSES, FAILING_PASS, PASS_SECONDS = 4, 1, 3.0
NUM_VALUES = 1000


def _say(words: object) -> None:
    print(words, flush=True)


def _lost(reason: str) -> None:
    _say(f"lost: {reason}")
    os._exit(1)  # the thread that computes may never come back


def main(failing: str) -> None:
    """`failing`: where the second pass fails here: "before" its sum, "behind" it, or nowhere."""
    rank_link.LONGEST_PASS_SECONDS, rank_link.PASS_FACTOR = PASS_SECONDS, 1.0
    place = rank_place(os.environ)
    assert place is not None
    ranks = join(place, Ears(_lost))
    group = mx.distributed.init()

    def one_pass(number: int) -> float:
        if number == FAILING_PASS and failing == "before":
            raise MemoryError("planted")
        total = mx.distributed.all_sum(mx.full((NUM_VALUES,), 10.0**number), group=group)
        mx.eval(total)
        if number == FAILING_PASS and failing == "behind":
            raise MemoryError("planted")
        return float(total[0].item())

    for number in range(NUM_PASSES):
        try:
            _say(ranks.together(lambda number=number: one_pass(number)))
        except MemoryError:
            _say("failed")
        except RanksLost as lost:
            _lost(str(lost))
    ranks.tell("end")
    if isinstance(ranks, FollowingRanks):
        ranks.link.expect("end")
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1])
