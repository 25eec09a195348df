"""Digests and what is known of them: the last one counts, the oldest goes first, and of two values neither is meant."""

from kvserve.sessions.digest_lru import DigestLru, UnambiguousLru


def test_the_last_digest_that_is_known_counts() -> None:
    """Unknown ones are passed over; a newer value replaces an older one."""
    places: DigestLru[str] = DigestLru()
    places.put([b"a", b"b"], "one")
    places.put([b"b"], "two")
    assert places.find([b"a", b"b", b"c"]) == "two"
    assert places.find([b"b", b"a"]) == "one"
    assert places.find([b"c"]) is None and places.find([]) is None


def test_the_oldest_goes_first() -> None:
    """At the limit, and all of them when it is cleared."""
    places: DigestLru[int] = DigestLru(max_entries=2)
    for number in range(3):
        places.put([bytes([number])], number)
    assert len(places._entries) == 2 and places.find([b"\x00"]) is None and places.find([b"\x01"]) == 1
    places.clear()
    assert len(places._entries) == 0


def test_what_is_known_of_some_can_be_forgotten() -> None:
    """By what is known of them; the others stay."""
    places: DigestLru[str] = DigestLru()
    places.put([b"a", b"b"], "one")
    places.put([b"b", b"c"], "two")
    places.forget(lambda place: place == "two")
    assert places.find([b"a", b"b", b"c"]) == "one" and len(places._entries) == 1


def test_the_last_known_digest_is_found() -> None:
    """Whatever comes after it is another's or not known yet."""
    values: UnambiguousLru[str] = UnambiguousLru()
    values.put(b"one", "first")
    values.put(b"one, two", "second")
    assert values.find([b"one", b"one, two", b"one, two, three"]) == "second"
    assert values.find([b"one", b"one, other"]) == "first"
    assert values.find([b"none"]) is None and values.find([]) is None


def test_two_values_of_one_digest_are_ambiguous() -> None:
    """The same value again is the same one; after another one neither is meant any more."""
    values: UnambiguousLru[str] = UnambiguousLru()
    assert not values.is_other(b"one", "this") and values.find([b"one"]) is None
    for _ in range(2):
        values.put(b"one", "this")
    assert values.find([b"one"]) == "this"
    assert not values.is_other(b"one", "this") and values.is_other(b"one", "that")
    values.put(b"one", "that")
    assert values.find([b"one"]) is None
    assert values.is_other(b"one", "this") and values.is_other(b"one", "that")
    values.put(b"one", "this")
    assert values.find([b"one"]) is None, "that is not forgotten"
    values.put(b"none", "a shallower one")
    assert values.find([b"none", b"one"]) is None, "one of the two is on this path too"


def test_the_longest_unused_go_first() -> None:
    """To be put again and to be found are uses, to be compared is none."""
    values: UnambiguousLru[bytes] = UnambiguousLru(max_entries=2)
    for name in (b"a", b"b", b"a", b"c"):
        values.put(name, name)
    assert [values.find([name]) for name in (b"b", b"c", b"a")] == [None, b"c", b"a"]
    assert values.is_other(b"c", b"another")
    values.put(b"d", b"d")
    assert [values.find([name]) for name in (b"a", b"c", b"d")] == [b"a", None, b"d"]
    values.clear()
    assert values.find([b"a", b"d"]) is None and not values.is_other(b"a", b"b")
