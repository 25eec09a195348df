"""Every token that was computed ahead is used, in vain, or neither yet: never two of them."""

from hypothesis import given
from hypothesis import strategies as st

from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.token_run import pack
from kvserve.cache.warmed import MAX_RUNS, WarmedTokens, WarmedTotals
from kvserve.core import ImageSpan, TokenSequence

HASHER = BlockHasher(16, "test")


class Warmed(WarmedTokens):
    """The counts, in terms of token sequences."""

    def __init__(self, depth: int = 10**6) -> None:
        self.depth = depth
        super().__init__(lambda _tokens, _partition: self.depth)

    def warm(self, tokens: TokenSequence, start: int, end: int, key: str | None = None) -> None:
        run = pack(tokens)
        self.add(tokens, run, HASHER.start().extended(run), start, end, key)

    def request(self, tokens: TokenSequence, num_tokens: int) -> int:
        run = pack(tokens)
        return self.use(run, HASHER.start().extended(run), num_tokens)

    def instead(self, key: str, tokens: TokenSequence) -> None:
        run = pack(tokens)
        self.replace(key, run, HASHER.start().extended(run))


def sequence(length: int, seed: int = 0) -> TokenSequence:
    return TokenSequence(tuple(seed * 10_000 + index for index in range(length)))


BASE = sequence(100)


def test_a_token_is_used_once() -> None:
    """By the first request that starts from it; what lies before it was not warmed."""
    warmed = Warmed()
    warmed.warm(BASE, 30, 90)
    assert warmed.request(BASE, 20) == 0
    assert warmed.request(BASE, 55) == 25
    assert warmed.request(BASE, 55) == 0
    assert warmed.request(BASE, 95) == 35
    assert warmed.totals() == WarmedTotals(60, 60, 0)


def test_only_what_is_the_same_is_used() -> None:
    """A request that parts from it in the middle of a block uses it up to there; one of other tokens not at all."""
    warmed = Warmed()
    warmed.warm(BASE, 0, 90)
    assert warmed.request(sequence(100, 1), 90) == 0
    assert warmed.request(TokenSequence((*BASE.ids[:53], *sequence(40, 2).ids)), 90) == 53
    assert warmed.totals().num_unused_tokens == 37


def test_two_pictures_of_one_size_are_two() -> None:
    """Equal ids that stand for another image are no use of it."""
    one, other = (TokenSequence(BASE.ids, (ImageSpan(40, 60, digest),)) for digest in "ab")
    warmed = Warmed()
    warmed.warm(one, 0, 90)
    assert warmed.request(other, 90) == 40


def test_what_comes_instead_makes_the_rest_vain() -> None:
    """What both begin with is still wanted; other keys are not touched."""
    warmed = Warmed()
    warmed.warm(BASE, 0, 90, "one")
    warmed.warm(sequence(100, 3), 0, 50, "other")
    warmed.instead("one", TokenSequence((*BASE.ids[:70], *sequence(40, 2).ids)))
    assert warmed.totals() == WarmedTotals(140, 0, 20)
    assert warmed.request(BASE, 90) == 70


def test_what_left_is_in_vain() -> None:
    """Once: what is still there of it is not."""
    warmed = Warmed()
    warmed.warm(BASE, 10, 90)
    warmed.look()
    assert warmed.totals().num_wasted_tokens == 0
    warmed.depth = 40
    warmed.look()
    warmed.look()
    assert warmed.totals() == WarmedTotals(80, 0, 50)
    warmed.clear()
    assert warmed.totals() == WarmedTotals(80, 0, 80)


def test_what_was_long_ago_is_forgotten() -> None:
    """As wasted: the counts add up."""
    warmed = Warmed()
    for seed in range(MAX_RUNS + 2):
        warmed.warm(sequence(20, seed), 0, 20)
    assert warmed.totals() == WarmedTotals((MAX_RUNS + 2) * 20, 0, 40)
    warmed.forget()
    assert warmed.totals() == WarmedTotals()


@given(
    st.lists(
        st.tuples(st.sampled_from(["warm", "use", "instead", "look", "clear"]), st.integers(0, 3), st.integers(0, 90)),
        max_size=40,
    )
)
def test_the_counts_add_up(steps: list[tuple[str, int, int]]) -> None:
    """Whatever happens in whatever order, nothing is counted twice."""
    warmed = Warmed()
    for what, seed, number in steps:
        tokens = TokenSequence((*BASE.ids[: 20 * seed], *sequence(100 - 20 * seed, seed).ids))
        match what:
            case "warm":
                warmed.warm(tokens, number, min(90, number + 30), str(seed))
            case "use":
                warmed.request(tokens, number)
            case "instead":
                warmed.instead(str(seed), tokens)
            case "look":
                warmed.depth = number
                warmed.look()
            case _:
                warmed.clear()
        totals = warmed.totals()
        assert min(totals.num_warmed_tokens, totals.num_used_tokens, totals.num_wasted_tokens) >= 0
        assert totals.num_unused_tokens == sum(run.end - run.first_unused for run in warmed._runs) >= 0
