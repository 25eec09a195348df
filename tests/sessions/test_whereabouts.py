"""Digests and what is known of them: the last one counts, and the oldest goes first."""

from kvserve.sessions.whereabouts import Places


def test_the_last_digest_that_is_known_counts() -> None:
    """Unknown ones are passed over; a newer note replaces an older one."""
    places: Places[str] = Places()
    places.put([b"a", b"b"], "one")
    places.put([b"b"], "two")
    assert places.find([b"a", b"b", b"c"]) == "two"
    assert places.find([b"b", b"a"]) == "one"
    assert places.find([b"c"]) is None and places.find([]) is None


def test_the_oldest_goes_first() -> None:
    """At the limit, and all of them when it is cleared."""
    places: Places[int] = Places(max_entries=2)
    for number in range(3):
        places.put([bytes([number])], number)
    assert len(places) == 2 and places.find([b"\x00"]) is None and places.find([b"\x01"]) == 1
    places.clear()
    assert len(places) == 0


def test_what_is_known_of_some_can_be_forgotten() -> None:
    """By what is known of them; the others stay."""
    places: Places[str] = Places()
    places.put([b"a", b"b"], "one")
    places.put([b"b", b"c"], "two")
    places.forget(lambda place: place == "two")
    assert places.find([b"a", b"b", b"c"]) == "one" and len(places) == 1
