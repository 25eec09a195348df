"""Branches of a session: what goes on moves its tip, what leaves begins a new one, nobody moves another's."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvserve.sessions.lineage import Branch, SessionIndex, SessionKey, session_key
from tests.laws import num_examples
from tests.sessions.samples import Notebook, chains_of

ONE, TWO = SessionKey("id:one"), SessionKey("id:two")
MESSAGE_TOKENS = 1_000


def advance(
    index: SessionIndex,
    letters: Sequence[str],
    key: SessionKey = ONE,
    now: float = 0.0,
    until: float | None = None,
) -> Branch:
    """A request of one message per letter, a thousand tokens each."""
    ends = [MESSAGE_TOKENS * (place + 1) for place in range(len(letters))]
    return index.advance(
        key, chains_of(letters), num_tokens=MESSAGE_TOKENS * len(letters), ends=ends, now=now, until=until
    )


def test_a_conversation_that_goes_on_is_one_branch() -> None:
    """Turn after turn moves the tip: turns, messages and tokens grow, the branch stays."""
    index = SessionIndex()
    branches = [advance(index, "sua"), advance(index, "suaua"), advance(index, "suauaua", now=5.0)]
    assert {branch.branch_id for branch in branches} == {1}
    last = branches[-1]
    assert (last.num_turns, last.num_messages, last.num_tokens, last.last_used) == (3, 7, 7_000, 5.0)
    assert (last.parent_id, last.fork_message_index, last.fork_token_offset) == (None, 0, 0)


def test_a_rewound_conversation_is_a_branch_of_its_own() -> None:
    """It leaves its parent after three messages; the parent's tip stays and can go on."""
    index = SessionIndex()
    main = advance(index, "suaua")
    rewound = advance(index, "suaxb")
    assert (rewound.parent_id, rewound.fork_message_index, rewound.fork_token_offset) == (main.branch_id, 3, 3_000)
    assert advance(index, "suauauc").branch_id == main.branch_id
    assert advance(index, "suaxbuc").branch_id == rewound.branch_id


def test_a_branch_leaves_the_one_it_shares_most_with() -> None:
    """A branch of a branch has that one as its parent, not the trunk."""
    index = SessionIndex()
    main, first = advance(index, "suaua"), advance(index, "suaxb")
    assert advance(index, "suaxq").parent_id == first.branch_id
    assert advance(index, "suq").parent_id == main.branch_id


def test_a_sub_agent_never_moves_its_parents_branch() -> None:
    """Another system prompt under the same id, between the parent's turns: two lines, each goes on."""
    index = SessionIndex()
    parent = advance(index, "sua")
    child = advance(index, "Xua")
    assert child.parent_id is None and child.fork_message_index == 0
    assert advance(index, "suaua").branch_id == parent.branch_id
    assert advance(index, "Xuaua").branch_id == child.branch_id


def test_two_windows_of_one_client_are_two_branches() -> None:
    """The same id and system prompt, two conversations at once: they never mix."""
    index = SessionIndex()
    first, second = advance(index, "s1a"), advance(index, "s2a")
    assert (second.parent_id, second.fork_message_index) == (first.branch_id, 1)
    for length in range(2, 6):
        assert advance(index, "s1a" + "ua" * length).branch_id == first.branch_id
        assert advance(index, "s2a" + "ua" * length).branch_id == second.branch_id


def test_a_request_that_was_sent_again_moves_nothing() -> None:
    """The same answer again, or an earlier turn with its old answer: the branch stays as long as it was."""
    index = SessionIndex()
    advance(index, "suaua")
    again, earlier = advance(index, "suaua"), advance(index, "sua")
    assert again.branch_id == earlier.branch_id == 1
    assert (earlier.num_messages, earlier.num_turns) == (5, 3)
    assert advance(index, "suauaua").branch_id == 1


def test_an_edited_old_message_is_a_branch() -> None:
    """One changed message early on: the rest is other history, though its words are the same."""
    index = SessionIndex()
    main = advance(index, "suauaua")
    edited = advance(index, "sUauaua")
    assert (edited.parent_id, edited.fork_message_index) == (main.branch_id, 1)


def test_a_message_outside_the_identity_is_no_message_of_a_branch() -> None:
    """A carrier at the end repeats its chain: the branch goes on when it is gone."""
    index = SessionIndex()
    s, u, a = chains_of("sua")
    branch = index.advance(ONE, [s, u, u, a], num_tokens=400, ends=[100, 200, 300, 400], now=0.0)
    assert branch.num_messages == 3
    assert advance(index, "suaua").branch_id == branch.branch_id
    x = chains_of("sux")[-1]
    left = index.advance(ONE, [s, u, u, x], num_tokens=400, ends=[100, 200, 300, 400], now=0.0)
    assert (left.fork_message_index, left.fork_token_offset) == (2, 200)


def test_sessions_do_not_share_branches() -> None:
    """The same conversation under two ids is two sessions."""
    index = SessionIndex()
    assert advance(index, "sua", ONE).branch_id != advance(index, "sua", TWO).branch_id
    totals = index.totals(0.0)
    assert (totals.num_sessions, totals.num_branches) == (2, 2)


def test_the_key_is_the_given_id_or_the_first_tokens() -> None:
    """Without an id the first 128 tokens decide; an id cannot pretend to be a hash."""
    start = list(range(128))
    assert session_key("mine", start) == session_key("mine", [9]) == "id:mine"
    assert session_key(None, [*start, 1]) == session_key("", [*start, 2]) != session_key(None, [*start[:-1], 0])
    assert session_key("tokens:1", []) != session_key(None, [])


def test_mistaken_offsets_are_refused() -> None:
    """No message, or ends that do not belong to the chains."""
    index = SessionIndex()
    for chains, ends in (([], []), (chains_of("ab"), [1])):
        with pytest.raises(ValueError, match="ends"):
            index.advance(ONE, chains, num_tokens=2, ends=ends, now=0.0)
    assert index.totals(0.0).num_sessions == 0


def test_idle_sessions_are_forgotten() -> None:
    """After the idle time a session is gone; its conversation begins a branch of its own. 0 is never."""
    index = SessionIndex(idle_seconds=100.0)
    advance(index, "sua", ONE, now=0.0)
    advance(index, "sua", TWO, now=60.0)
    assert index.totals(100.0).num_sessions == 2
    assert [view.key for view in index.sessions(101.0)] == [TWO]
    assert advance(index, "suaua", ONE, now=102.0).branch_id == 3
    assert advance(index, "suauaua", ONE, now=203.0).branch_id == 4
    forever = SessionIndex(idle_seconds=0.0)
    advance(forever, "sua", now=0.0)
    assert forever.totals(10**9).num_sessions == 1


def test_sessions_branches_and_messages_are_bounded() -> None:
    """The least recently used goes; the one that was just used stays even where it alone is too long."""
    index = SessionIndex(max_sessions=3, max_branches_per_session=2, max_messages=20)
    for number in range(5):
        advance(index, "sua", SessionKey(str(number)))
    assert [view.key for view in index.sessions(0.0)] == ["2", "3", "4"]
    for letter in "xyz":
        advance(index, "s" + letter, SessionKey("4"))
    assert [branch.num_messages for branch in index.sessions(0.0)[-1].branches] == [2, 2]
    advance(index, "s" + "ua" * 9, SessionKey("2"))
    assert [view.key for view in index.sessions(0.0)] == ["2"]
    advance(index, "s" + "ua" * 30, SessionKey("2"))
    assert index.totals(0.0).num_branches == 1 and index._num_messages == 61
    index.clear()
    assert index._num_messages == 0 and index.totals(0.0).num_sessions == 0


class PlainSessions:
    """Branches as whole conversations in lists, the last used one at the end of its session."""

    def __init__(self, max_branches: int) -> None:
        self.branches: dict[str, list[tuple[int, str]]] = {}
        self.parents: dict[int, tuple[int | None, int]] = {}
        self.max_branches = max_branches

    def advance(self, key: str, letters: str) -> int:
        known = self.branches.setdefault(key, [])
        shared = max((common(letters, path) for _, path in known), default=0)
        holders = sorted(pair for pair in known if common(letters, pair[1]) == shared) if shared else []
        tips = [pair for pair in holders if len(pair[1]) == shared]
        if shared == len(letters):
            pair = (tips or holders)[0]
            known.remove(pair)
        elif tips:
            known.remove(tips[0])
            pair = tips[0][0], letters
        else:
            pair = len(self.parents) + 1, letters
            self.parents[pair[0]] = holders[0][0] if holders else None, shared
        known.append(pair)
        del known[: -self.max_branches]
        return pair[0]


def common(one: str, other: str) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class LineageMachine(RuleBasedStateMachine):
    """Two clients, one of them with sub-agents, windows and rewinds, and restarts, against whole strings."""

    @initialize(max_branches=st.sampled_from([1, 3, 64]))
    def begin(self, max_branches: int) -> None:
        self.notebook = Notebook()
        self.max_branches = max_branches
        self.index = SessionIndex(max_branches_per_session=max_branches, journal=self.notebook)
        self.plain = PlainSessions(max_branches)
        self.conversations = ["s", "t", "su"]

    @rule(data=st.data(), key=st.sampled_from([ONE, TWO]), more=st.text("abu", min_size=1, max_size=2))
    def request(self, data: Any, key: SessionKey, more: str) -> None:
        base = data.draw(st.sampled_from(self.conversations))
        letters = base[: data.draw(st.sampled_from([len(base), len(base), max(1, len(base) - 2), 1]))] + more
        self.conversations.append(letters)
        self.send(key, letters)

    @rule(data=st.data(), key=st.sampled_from([ONE, TWO]))
    def send_again(self, data: Any, key: SessionKey) -> None:
        self.send(key, data.draw(st.sampled_from(self.conversations)))

    @rule(is_new_file=st.booleans())
    def restart(self, is_new_file: bool) -> None:
        """Another process goes on from what was written down."""
        if is_new_file:
            self.notebook.bodies.clear()
            self.index.put_all()
        before = self.index.sessions(0.0), self.index._num_messages
        self.index = SessionIndex(max_branches_per_session=self.max_branches, journal=self.notebook)
        self.index.load(self.notebook.rows())
        assert (self.index.sessions(0.0), self.index._num_messages) == before

    def send(self, key: SessionKey, letters: str) -> None:
        branch = advance(self.index, letters, key, until=1e12)
        assert branch.branch_id == self.plain.advance(key, letters)
        assert (branch.parent_id, branch.fork_message_index) == self.plain.parents[branch.branch_id]
        assert branch.fork_token_offset == branch.fork_message_index * MESSAGE_TOKENS
        views = {view.key: [(b.branch_id, b.num_messages) for b in view.branches] for view in self.index.sessions(0.0)}
        known = self.plain.branches.items()
        assert views == {key: [(number, len(path)) for number, path in pairs] for key, pairs in known}


def test_lineage_knows_what_whole_strings_know() -> None:
    """Any order of turns, rewinds, sub-agents, windows and repeats: the same branches, parents and forks."""
    run_state_machine_as_test(
        LineageMachine, settings=settings(max_examples=num_examples(30), stateful_step_count=30, deadline=None)
    )


def test_many_threads_leave_the_index_whole() -> None:
    """Four clients under one id and one under its own: each line is one branch, counts add up."""
    index, errors = SessionIndex(), []

    def work(agent: int) -> None:
        try:
            letters = f"s{agent}a"
            branch_ids = {advance(index, letters + "ua" * turn).branch_id for turn in range(60)}
            assert len(branch_ids) == 1
            index.sessions(0.0)
        except Exception as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(agent,)) for agent in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and index.totals(0.0).num_branches == 4
    assert index._num_messages == 4 * (3 + 59 * 2)
