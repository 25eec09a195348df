"""The system prompts that conversations begin with are counted, bounded, and known again after a restart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.core import ImageSpan, MessageStart
from kvserve.sessions.hot_prefixes import MAX_PREFIXES, MIN_TOKENS, HotPrefixes
from kvserve.sessions.seen import pack_ids
from tests.sessions.samples import Notebook

STARTS = (MessageStart(1, is_user=False), MessageStart(40, is_user=True), MessageStart(50, is_user=False))


def prompt(system: int, user: int = 0) -> bytes:
    """A prompt of 60 tokens, the first 40 of them one system prompt's."""
    return pack_ids(range(system * 1000, system * 1000 + 40), range(user, user + 20))


def used(
    beginnings: HotPrefixes, system: int, times: int, now: float = 0.0, until: float | None = None, owner: str = ""
) -> None:
    for user in range(times):
        beginnings.count(prompt(system, user), STARTS, now=now, until=until, owner=owner)


def uses(beginnings: HotPrefixes) -> list[tuple[int, tuple[tuple[str, int], ...]]]:
    """Which system prompts are known, and whose they are how often."""
    return [(each.ids[0] // 1000, each.uses) for each in beginnings.most_used(MAX_PREFIXES)]


def systems(beginnings: HotPrefixes, num: int = MAX_PREFIXES) -> list[tuple[int, int]]:
    """Which system prompts are the most used, and how often they were."""
    return [(each.ids[0] // 1000, each.num_uses) for each in beginnings.most_used(num)]


def test_the_most_used_come_first() -> None:
    """By number of uses, of equal ones the last used first; one use is none."""
    beginnings = HotPrefixes()
    for system, times in ((1, 2), (2, 5), (3, 1), (4, 2)):
        used(beginnings, system, times, now=system)
    assert systems(beginnings) == [(2, 5), (4, 2), (1, 2)]
    assert systems(beginnings, 1) == [(2, 5)]
    assert systems(beginnings, 0) == []
    [first] = beginnings.most_used(1)
    assert (first.ids, first.first_message) == (tuple(range(2000, 2040)), 1)


@pytest.mark.parametrize(
    ("starts", "images"),
    [
        ((), ()),
        ((MessageStart(0, is_user=True), MessageStart(40, is_user=False)), ()),
        ((MessageStart(0, is_user=False),), ()),
        ((MessageStart(0, is_user=False), MessageStart(MIN_TOKENS - 1, is_user=True)), ()),
        (STARTS, (ImageSpan(30, 45, "a"),)),
    ],
    ids=["no messages", "no system", "no user", "too short", "a picture in it"],
)
def test_what_is_no_beginning_is_not_counted(starts: tuple[MessageStart, ...], images: tuple[ImageSpan, ...]) -> None:
    """A conversation without a system prompt, a short one, one with a picture in it."""
    beginnings = HotPrefixes()
    for _ in range(3):
        beginnings.count(prompt(1), starts, images, now=0)
    assert beginnings.most_used(9) == ()


def test_they_are_known_again() -> None:
    """What was written down is there after a restart; what was not to last is not, nor what was cleared or is old."""
    book = Notebook()
    before = HotPrefixes(journal=book)
    used(before, 1, 2, until=10_000.0)
    used(before, 2, 3, until=20_000.0)
    used(before, 3, 4)
    after = HotPrefixes(journal=book)
    after.load(book.rows())
    assert [system for system, _ in systems(after)] == [2, 1]
    after.expire(15_000.0)
    assert [system for system, _ in systems(after)] == [2]
    after.clear()
    assert not book.bodies
    after.load({})
    assert systems(after) == []


def test_everything_can_be_told_again() -> None:
    """A journal that begins anew gets all that is to last."""
    beginnings, book = HotPrefixes(), Notebook()
    used(beginnings, 1, 2, until=10_000.0)
    beginnings._journal = book
    beginnings.put_all()
    assert len(book.bodies) == 1


def test_whose_they_are_is_counted_apart() -> None:
    """What two principals used once each nobody has used twice; of what both use, who uses it more comes first."""
    beginnings = HotPrefixes()
    for owner in ("ann", "bob"):
        used(beginnings, 1, 1, owner=owner)
    assert uses(beginnings) == []
    used(beginnings, 1, 1, owner="ann")
    assert uses(beginnings) == [(1, (("ann", 2),))]
    used(beginnings, 1, 3, owner="bob")
    used(beginnings, 2, 3, now=1.0)
    assert uses(beginnings) == [(1, (("bob", 4), ("ann", 2))), (2, (("", 3),))]
    assert systems(beginnings, 1) == [(1, 4)]


def test_whose_they_are_outlives_a_restart() -> None:
    """Also nobody's, and those of an owner with a long name."""
    book = Notebook()
    before = HotPrefixes(journal=book)
    for now, owner in enumerate(("", "0123456789abcdef.0123456789abcdef", "ö" * 60)):
        used(before, 1, 2, float(now), until=10_000.0, owner=owner)
    after = HotPrefixes(journal=book)
    after.load(book.rows())
    assert uses(after) == uses(before) and len(uses(after)[0][1]) == 3


OWNERS = st.sampled_from(["", "ann", "bob"])


@given(st.lists(st.tuples(OWNERS, st.integers(1, 3)), max_size=40), st.sets(OWNERS))
def test_what_is_forgotten_might_never_have_been(order: list[tuple[str, int]], gone: set[str]) -> None:
    """In RAM and in the rows, whoever else used the same; what others used is as if they had been alone."""
    books = Notebook(), Notebook()
    forgetting, never = (HotPrefixes(journal=book) for book in books)
    for owner, system in order:
        used(forgetting, system, 1, until=10_000.0, owner=owner)
        if owner not in gone:
            used(never, system, 1, until=10_000.0, owner=owner)
    forgetting.forget(lambda owner: owner in gone)
    assert uses(forgetting) == uses(never)
    assert books[0].bodies == books[1].bodies
    assert forgetting._num_bytes == never._num_bytes


@pytest.mark.parametrize(
    "change", [lambda body: body[:-4] + b"\0\0\0\1", lambda body: body[:10], lambda body: body[:-1]]
)
def test_a_row_that_does_not_fit_is_refused(change: object) -> None:
    """Other tokens under the same name, a row that is cut."""
    book = Notebook()
    used(HotPrefixes(journal=book), 1, 2, until=10_000.0)
    [(place, body)] = book.bodies.items()
    book.bodies[place] = change(body)  # type: ignore[operator]
    with pytest.raises(ValueError, match="row of a prefix"):
        HotPrefixes().load(book.rows())


def test_the_least_recently_used_goes_first() -> None:
    """The number and the bytes are bounded; its row goes too."""
    book = Notebook()
    beginnings = HotPrefixes(journal=book)
    for system in range(1, MAX_PREFIXES + 3):
        used(beginnings, system, 2, until=10_000.0)
    assert {system for system, _ in systems(beginnings)} == set(range(3, MAX_PREFIXES + 3))
    assert len(book.bodies) == MAX_PREFIXES
    small = HotPrefixes(max_bytes=3 * 160)
    for system in range(1, 6):
        used(small, system, 2)
    assert {system for system, _ in systems(small)} == {3, 4, 5}


@given(st.lists(st.integers(1, 6), max_size=60))
def test_uses_add_up(order: list[int]) -> None:
    """Whatever the order, each is counted as often as it was used."""
    beginnings = HotPrefixes()
    for now, system in enumerate(order):
        beginnings.count(prompt(system), STARTS, now=float(now))
    assert dict(systems(beginnings)) == {each: order.count(each) for each in set(order) if order.count(each) > 1}


def test_what_two_principals_begin_with_is_theirs_each() -> None:
    """Counted apart, so that one use of each is none; wanted once where both have used it; one of them can be
    forgotten."""
    beginnings = HotPrefixes()
    for owner, times in (("a", 2), ("b", 1), ("b", 2)):
        for user in range(times):
            beginnings.count(prompt(1 if times == 2 else 2, user), STARTS, now=0, owner=owner)
    beginnings.count(prompt(2), STARTS, now=0, owner="a")
    assert systems(beginnings) == [(1, 2)], "each has used the second one once"
    beginnings.forget("a".__eq__)
    assert systems(beginnings) == [(1, 2)], "the other one's stays"
    beginnings.forget("b".__eq__)
    assert systems(beginnings) == [] and beginnings.most_used(9) == ()


def test_whose_a_beginning_is_outlives_a_restart() -> None:
    """Forgetting reaches what was written down."""
    notebook = Notebook()
    beginnings = HotPrefixes(journal=notebook)
    for owner in ("a", "b"):
        for user in range(2):
            beginnings.count(prompt(1 if owner == "a" else 2, user), STARTS, now=0, until=9.0, owner=owner)
    again = HotPrefixes(journal=notebook)
    again.load(notebook.rows())
    assert sorted(systems(again)) == [(1, 2), (2, 2)]
    again.forget("a".__eq__)
    assert systems(again) == [(2, 2)]
    last = HotPrefixes()
    last.load(notebook.rows())
    assert systems(last) == [(2, 2)]
