"""Paths by chain, case by case; `test_turns_machine.py` has the any-order law."""

import threading

import pytest

from kvserve.core import Message
from kvserve.sessions.seen import PathNode, PathStep, PlaceReadings
from kvserve.sessions.tool_layouts import ToolLayout
from kvserve.sessions.turns import TurnStore
from tests.integrity import check_integrity
from tests.sessions.samples import Notebook, assistant, call, chains_of, record_of, steps_of, texts_of, user, written


def answer(letters: str, text: str, thinking: str = "", *ids: int) -> PathStep:
    """The model's answer as the last letter of a conversation."""
    message = assistant(text, thinking=thinking)
    return PathStep(chains_of(letters)[-1], message, written(message, *ids))


def test_an_empty_store_knows_nothing() -> None:
    """No chain, no path, no record."""
    store = TurnStore()
    assert store.find([]) is None and store.find(chains_of("ab")) is None and store.record_for(None, "s") is None


def test_the_deepest_message_is_found_and_its_path_read() -> None:
    """What goes on differently shares what stands before."""
    store = TurnStore()
    store.extend(None, steps_of("abcd"))
    assert texts_of(store.find(chains_of("abcdef"))) == list("abcd")
    assert texts_of(store.find(chains_of("abxy"))) == list("ab")
    assert store.find(chains_of("xbcd")) is None


def test_the_same_words_after_another_beginning_are_not_found() -> None:
    """A chain is a whole history: one changed letter before changes all that follow."""
    store = TurnStore()
    store.extend(None, steps_of("abcd"))
    assert not set(chains_of("abcd")[1:]) & set(chains_of("xbcd"))
    assert store.find(chains_of("xbcd")) is None


def test_reading_the_same_again_adds_nothing() -> None:
    """A repeated request, also with other call ids, has the nodes that are there."""
    store = TurnStore()
    first = store.extend(None, [*steps_of("a"), PathStep(b"call", assistant("", call("{}", call_id="1")))])
    again = store.extend(None, [*steps_of("a"), PathStep(b"call", assistant("", call("{}", call_id="2")))])
    assert again is first and store.totals().num_nodes == 2


def test_a_message_outside_the_identity_has_no_node() -> None:
    """A carrier that is gone from the next request leaves the chain, and so the path, as it is."""
    store = TurnStore()
    chains = chains_of("ab")
    steps = [PathStep(chains[0], user("a")), PathStep(chains[0], user("carrier")), PathStep(chains[1], assistant("b"))]
    assert texts_of(store.extend(None, steps)) == ["a", "b"]
    assert texts_of(store.extend(store.find(chains[:1]), [PathStep(chains[0], user("carrier"))])) == ["a"]


def test_a_path_has_a_message() -> None:
    """Nothing to add to nothing is a mistake of the caller."""
    with pytest.raises(ValueError, match="at least one message"):
        TurnStore().extend(None, [])


def test_a_fresh_clock_is_found_while_the_older_path_keeps_its_own() -> None:
    """The same conversation read again with another clock: the newest reading is found, a longer path stays true."""
    store = TurnStore()
    older = store.extend(None, steps_of("abc", ["a", "b 10:00", "c"]))
    store.extend(None, steps_of("ab", ["a", "b 10:05"]))
    assert texts_of(store.find(chains_of("abx"))) == ["a", "b 10:05"]
    assert store.find(chains_of("abcd")) is older and texts_of(older) == ["a", "b 10:00", "c"]
    check_integrity(store)


def test_a_reading_that_comes_again_is_the_newest_one() -> None:
    """Two windows with another clock at the top: a branch off their common beginning follows who read it last."""
    store = TurnStore()
    store.extend(None, steps_of("ab", ["a 10:00", "b"]))
    store.extend(None, steps_of("ac", ["a 10:05", "c"]))
    assert texts_of(store.find(chains_of("ax"))) == ["a 10:05"]
    store.extend(None, steps_of("ab", ["a 10:00", "b"]))
    assert texts_of(store.find(chains_of("ax"))) == ["a 10:00"]
    assert store.totals().num_nodes == 4


def test_a_replaced_reading_that_nobody_needs_is_gone() -> None:
    """A hundred clocks in the newest message leave one node, not a hundred."""
    store = TurnStore()
    for minute in range(100):
        store.extend(None, steps_of("ab", ["a", f"b {minute}"]))
    assert store.totals().num_nodes == 2
    check_integrity(store)


def test_two_clocks_in_turn_do_not_multiply_the_paths() -> None:
    """Two windows that differ in a clock at the top and read everything again keep one path each, the same one."""
    store = TurnStore()
    leaves = set()
    for _ in range(10):
        for clock in ("10:00", "10:05"):
            leaf = store.extend(None, steps_of("abc" + clock, [f"a {clock}", "b", "c", *clock]))
            leaves.add(leaf)
    assert store.totals().num_nodes == 2 * (3 + 5) and len(leaves) == 2
    check_integrity(store)


def test_the_same_answer_again_keeps_its_first_tokens() -> None:
    """An answer that the model repeats with other tokens: the KV is there for the first ones."""
    store = TurnStore()
    first = store.extend(None, [*steps_of("a"), answer("ab", "Done.", "", 1)])
    assert store.extend(None, [*steps_of("a"), answer("ab", "Done.", "", 2)]) is first
    assert store.find(chains_of("ab")) is first


def test_two_answers_at_one_place_are_nobodys() -> None:
    """Equal words with other thoughts: neither is found, and no conversation gets the other one's thoughts."""
    store = TurnStore()
    one = store.extend(None, [*steps_of("a"), answer("ab", "Done.", "thought 1")])
    store.extend(one, steps_of("abc")[2:])
    assert texts_of(store.find(chains_of("abc"))) == ["a", "Done.", "c"]
    store.extend(store.find(chains_of("a")), [answer("ab", "Done.", "thought 2")])
    for letters in ("ab", "abc", "abcd"):
        assert texts_of(store.find(chains_of(letters))) == ["a"]


def test_after_two_answers_what_the_client_sends_is_followed() -> None:
    """Read once as it was sent, the conversation goes on from there; the doubtful place itself stays doubtful."""
    store = TurnStore()
    for thought in ("thought 1", "thought 2"):
        store.extend(None, [*steps_of("a"), answer("ab", "Done.", thought)])
    known = store.find(chains_of("abc"))
    chains = chains_of("abc")
    leaf = store.extend(known, [PathStep(chains[1], assistant("Done.")), PathStep(chains[2], user("c"))])
    found = store.find(chains_of("abcd"))
    assert found is leaf
    assert [node.message for node in leaf.path()] == [user("a"), assistant("Done."), user("c")]
    check_integrity(store)


def test_an_answer_without_thoughts_that_became_doubtful_is_read_as_sent() -> None:
    """The client's words equal one of the two writings: still they are followed as sent, not as that writing."""
    store = TurnStore()
    for thought in ("thought 1", ""):
        store.extend(None, [*steps_of("a"), answer("ab", "Done.", thought)])
    steps = [PathStep(chains_of("ab")[1], assistant("Done.")), *steps_of("abc")[2:]]
    leaf = store.extend(store.find(chains_of("a")), steps)
    assert store.find(chains_of("abc")) is leaf and leaf.parent is not None and leaf.parent.written is None


def test_an_echo_does_not_undo_what_was_written() -> None:
    """Reading an answer as it was written, without saying who wrote it, keeps its tokens."""
    store = TurnStore()
    first = store.extend(None, [*steps_of("a"), answer("ab", "Done.")])
    assert store.extend(None, [*steps_of("a"), PathStep(chains_of("ab")[1], assistant("Done."))]) is first


def test_a_reading_becomes_a_writing_when_the_model_writes_it() -> None:
    """First sent by a client, then written here: the newest node knows the tokens."""
    store = TurnStore()
    store.extend(None, [*steps_of("a"), PathStep(chains_of("ab")[1], assistant("Done."))])
    store.extend(None, [*steps_of("a"), answer("ab", "Done.")])
    found = store.find(chains_of("ab"))
    assert found is not None and found.written is not None
    assert store.totals().num_nodes == 2


def test_nodes_are_bounded_and_shared_beginnings_stay() -> None:
    """Ten branches, room for few: the newest leaves stay, their beginning is never cut away."""
    store = TurnStore(max_nodes=5)
    for letter in "0123456789":
        store.extend(None, steps_of("abc" + letter))
        check_integrity(store)
    assert texts_of(store.find(chains_of("abc9"))) == [*"abc", "9"]
    assert texts_of(store.find(chains_of("abc8"))) == [*"abc", "8"]
    assert texts_of(store.find(chains_of("abc7"))) == list("abc")


def test_finding_is_a_use() -> None:
    """A leaf that is asked for outlives younger ones."""
    store = TurnStore(max_nodes=3)
    store.extend(None, steps_of("a"))
    store.extend(None, steps_of("b"))
    store.extend(None, steps_of("c"))
    store.find(chains_of("a"))
    store.extend(None, steps_of("d"))
    assert store.find(chains_of("a")) is not None and store.find(chains_of("b")) is None


def test_a_conversation_erodes_from_its_end() -> None:
    """The oldest conversation loses its last messages first, so what is left of it can still be used."""
    store = TurnStore(max_nodes=6)
    store.extend(None, steps_of("abcd"))
    store.extend(None, steps_of("wxyz"))
    assert texts_of(store.find(chains_of("abcd"))) == list("ab")
    assert texts_of(store.find(chains_of("wxyz"))) == list("wxyz")


def test_bytes_are_bounded_by_the_texts() -> None:
    """Ten conversations of 100 kB in 350 kB: three stay. One that is too large alone leaves its beginning."""
    store = TurnStore(max_bytes=350_000)
    for letter in "0123456789":
        store.extend(None, [PathStep(chain, user("x" * 100_000)) for chain in chains_of(letter)])
    assert store.totals().num_nodes == 3
    leaf = store.extend(None, steps_of("ab", ["a", "y" * 500_000]))
    assert texts_of(leaf) == ["a", "y" * 500_000]
    assert texts_of(store.find(chains_of("ab"))) == ["a"]
    check_integrity(store)


def test_a_path_that_was_forgotten_while_a_request_held_it_comes_back_whole() -> None:
    """Evicted or cleared between the request's begin and its end: the path is the model's truth all the same."""
    store = TurnStore(max_nodes=4)
    held = store.extend(None, steps_of("ab"))
    store.extend(None, steps_of("wxyz"))
    assert store.find(chains_of("ab")) is None
    leaf = store.extend(held, steps_of("abc")[2:])
    assert store.find(chains_of("abc")) is leaf and texts_of(leaf) == list("abc")
    check_integrity(store)
    store.clear()
    assert texts_of(store.extend(leaf, [])) == list("abc") and store.find(chains_of("abc")) is leaf
    check_integrity(store)


def test_clear_forgets_everything() -> None:
    """Paths, records, doubts and tool orders are gone; totals are zero."""
    store = TurnStore()
    leaf = store.extend(None, [*steps_of("a"), answer("ab", "Done.", "1")])
    store.extend(None, [*steps_of("a"), answer("ab", "Done.", "2")])
    store.remember(record_of(leaf, session="s"))
    store.clear()
    totals = store.totals()
    assert (totals.num_nodes, totals.num_bytes, totals.num_records, totals.num_record_bytes) == (0, 0, 0, 0)
    assert store.record_for(leaf, "s") is None
    store.extend(None, [*steps_of("a"), answer("ab", "Done.", "2")])
    assert texts_of(store.find(chains_of("ab"))) == ["a", "Done."]


def test_many_threads_leave_the_store_whole() -> None:
    """Agents that extend, branch, re-read and record at once on a small store: every path is a true one."""
    store, errors = TurnStore(max_nodes=60, max_record_bytes=3_000), []

    def work(agent: int) -> None:
        try:
            for number in range(200):
                letters = f"s{number % 3}{agent}{number % 5}{number % 2}"
                known = store.find(chains_of(letters))
                depth = 0 if known is None else known.index + 1
                leaf = store.extend(known, steps_of(letters, [*letters[:-1], f"{letters[-1]} {number}"])[depth:])
                store.remember(record_of(leaf, f"{agent}.{number}", session=str(agent)))
                assert [node.chain for node in leaf.path()] == chains_of(letters)
                if number % 90 == 89:
                    store.clear()
                check_integrity(store)
        except Exception as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(agent,)) for agent in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    check_integrity(store)


def test_the_tools_keep_their_first_order() -> None:
    """The store passes tools through in the order in which their set first came."""
    assert TurnStore().tools_as_seen(b"d", []) == ()


def test_integrity_is_really_checked() -> None:
    """A count that is off by one, or a leaf nobody would evict, does not pass."""
    store = TurnStore()
    leaf = store.extend(None, steps_of("ab"))
    store._num_bytes += 1
    with pytest.raises(AssertionError):
        check_integrity(store)
    store._num_bytes -= 1
    store._leaves.clear()
    with pytest.raises(AssertionError):
        check_integrity(store)
    assert isinstance(leaf, PathNode) and isinstance(leaf.message, Message)


def test_what_another_server_read_is_as_if_it_was_read_here() -> None:
    """Behind what is known here, with rows and layouts; what is known already is not there twice."""
    book = Notebook()
    store, plain = TurnStore(journal=book), TurnStore()
    steps = [*steps_of("ab"), answer("abc", "Done.", "Hm.")]
    plain.extend(None, steps, 5.0, owner="one")
    store.extend(None, steps[:1], 5.0, owner="one")
    layouts = [ToolLayout((b"x",)), ToolLayout((b"y",))]
    for _ in range(2):
        known = store.find(chains_of("a"))
        places = [PlaceReadings((steps[1],)), PlaceReadings((steps[2],), layouts=tuple(layouts))]
        store.take_in(known, places, 5.0, owner="one")
    found = store.find(chains_of("abc"))
    assert texts_of(found) == ["a", "b", "Done."] and found is not None and found.written == steps[2].written
    assert store.totals() == plain.totals() and found.owner == "one"
    assert [layout for _, layout in store.tool_layouts(chains_of("abc"))] == layouts
    check_integrity(store)
    loaded = TurnStore()
    loaded.load(book.rows())
    assert texts_of(loaded.find(chains_of("abc"))) == ["a", "b", "Done."]


def test_of_two_answers_at_one_place_neither_is_taken_in_for_sure() -> None:
    """A shallower message is found, as where both were written here."""
    store = TurnStore()
    places = [steps_of("a"), [answer("ab", "Done.", "Hm."), answer("ab", "Done.", "Ah.")], steps_of("abc")[2:]]
    store.take_in(None, [PlaceReadings(tuple(each)) for each in places], 5.0, owner="one")
    assert texts_of(store.find(chains_of("abc"))) == ["a"]
    check_integrity(store)
