"""What is remembered, in which order it is forgotten, and that the bound holds."""

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from kvserve.prompt.memo import Memo


def test_the_least_recently_used_value_goes_first() -> None:
    """Looking a value up makes it the newest one."""
    memo: Memo[str] = Memo(30)
    for key in "abc":
        memo.put(key, key.upper(), 10)
    assert memo.get("a") == "A"
    memo.put("d", "D", 10)
    assert [memo.get(key) for key in "abcd"] == ["A", None, "C", "D"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60))))
def test_the_bound_always_holds(puts: list[tuple[int, int]]) -> None:
    """The bytes counted are those of the values kept, and never more than the bound."""
    memo: Memo[int] = Memo(100)
    for key, num_bytes in puts:
        memo.put(key, num_bytes, num_bytes)
        kept = [memo.get(known) for known in range(10)]
        assert memo.num_bytes == sum(value for value in kept if value is not None) <= 100


def test_what_is_larger_than_everything_is_not_kept() -> None:
    """It drives nothing else out, and an older value under its name is gone."""
    memo: Memo[str] = Memo(10)
    memo.put("a", "A", 4)
    memo.put("b", "B", 4)
    memo.put("a", "larger", 11)
    assert (memo.get("a"), memo.get("b"), memo.num_bytes) == (None, "B", 4)
    memo.clear()
    assert (memo.get("b"), memo.num_bytes) == (None, 0)


def test_threads_share_one_memo() -> None:
    """Many threads that put and get leave it whole."""
    memo: Memo[int] = Memo(500)

    def work(seed: int) -> bool:
        right = True
        for step in range(2000):
            key = (seed * 7 + step) % 100
            right &= memo.get(key) in (None, key)
            memo.put(key, key, 10)
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert memo.num_bytes == 500
