"""Requests by the answers that they were given: found by who sends these back, and not where two were given them."""

from kvserve.sessions.given_answers import GivenAnswers


def test_the_last_known_answers_are_found() -> None:
    """Whatever came after them is another's or not known yet."""
    given = GivenAnswers()
    given.put(b"one", b"leaf 1", b"prompt 1")
    given.put(b"one, two", b"leaf 2", b"prompt 2")
    assert given.find([b"one", b"one, two", b"one, two, three"]) == b"leaf 2"
    assert given.find([b"one", b"one, other"]) == b"leaf 1"
    assert given.find([b"none"]) is None and given.find([]) is None


def test_what_two_were_given_belongs_to_neither() -> None:
    """A request that was only sent again is the same one."""
    given = GivenAnswers()
    for _ in range(2):
        given.put(b"one", b"leaf", b"prompt")
    assert given.find([b"one"]) == b"leaf"
    given.put(b"one", b"leaf", b"another prompt")
    assert given.find([b"one"]) is None
    given.put(b"one", b"leaf", b"prompt")
    assert given.find([b"one"]) is None, "that is not forgotten"
    given.put(b"none", b"a shallower leaf", b"prompt")
    assert given.find([b"none", b"one"]) is None, "one of the two is on this path too"


def test_the_longest_unused_go_first() -> None:
    """To be found is a use."""
    given = GivenAnswers(max_entries=2)
    for name in (b"a", b"b"):
        given.put(name, name, name)
    assert given.find([b"a"]) == b"a"
    given.put(b"c", b"c", b"c")
    assert [given.find([name]) for name in (b"a", b"b", b"c")] == [b"a", None, b"c"]
    given.clear()
    assert given.find([b"a", b"c"]) is None
