"""Who leaves no record is counted all the same where two could be meant."""

from kvserve.sessions.passers_by import PassersBy


def test_what_was_said_otherwise_is_known() -> None:
    """The same is nobody else's as far as anybody knows; two meanings, or two answers, are nobody's."""
    passed = PassersBy()
    assert not passed.meant_otherwise(b"place", b"meaning") and not passed.was_given_otherwise(b"place", b"answer")
    passed.put(b"place", b"meaning", b"answer")
    assert not passed.meant_otherwise(b"place", b"meaning") and passed.meant_otherwise(b"place", b"other")
    assert not passed.was_given_otherwise(b"place", b"answer") and passed.was_given_otherwise(b"place", b"other")
    passed.put(b"place", b"other", None)
    assert passed.meant_otherwise(b"place", b"meaning") and passed.meant_otherwise(b"place", b"other")
    assert not passed.was_given_otherwise(b"place", b"answer")
    passed.clear()
    assert not passed.meant_otherwise(b"place", b"other")


def test_the_longest_unused_go_first() -> None:
    """To pass by again is a use."""
    passed = PassersBy(max_digests=2)
    for place in (b"a", b"b", b"a", b"c"):
        passed.put(place, b"meaning", None)
    assert [passed.meant_otherwise(place, b"other") for place in (b"a", b"b", b"c")] == [True, False, True]
