"""The turn store against plain dicts: agents that go on, branch, rewind, edit, interleave, abort and send again, and a
server that restarts in between.

A conversation is a list of letters; how the model saw a letter may carry a clock, which is no part of the chain.
"""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvserve.core import Message, Written
from kvserve.sessions.seen import PathNode, PathStep
from kvserve.sessions.turns import TurnStore
from tests.integrity import check_integrity
from tests.laws import num_examples
from tests.sessions.samples import Notebook, assistant, chains_of, record_of, user, written

NEVER = 1e12
"""No row goes before."""

letters = st.lists(st.sampled_from("abc"), min_size=1, max_size=3)
clocks = st.sampled_from(["", "10:00", "10:05"])
thoughts = st.sampled_from(["", "hm", "so"])


@dataclass(frozen=True, eq=False)
class Plain:
    """One entry of a path: chain, how it was seen, what the model wrote (its thought) or None."""

    chain: bytes
    message: Message
    thought: str | None


type Path = tuple[Plain, ...]
type Values = list[tuple[bytes, Message, str | None]]


class PlainTurns:
    """What the store should know, without bounds: dicts of whole paths. Kept is what a newest path goes through."""

    def __init__(self) -> None:
        self.newest: dict[bytes, Path] = {}
        self.below: dict[tuple[Path, bytes], list[Plain]] = {}
        self.thoughts: dict[bytes, set[str]] = {}

    def is_doubtful(self, entry: Plain) -> bool:
        return entry.thought is not None and len(self.thoughts[entry.chain]) > 1

    def is_kept(self, path: Path) -> bool:
        return any(newest[: len(path)] == path for newest in self.newest.values())

    def find(self, chains: list[bytes]) -> Path:
        for chain in reversed(chains):
            path = self.newest.get(chain)
            if path is not None and not any(self.is_doubtful(entry) for entry in path):
                return path
        return ()

    def extend(self, path: Path, steps: list[Plain]) -> Path:
        for end in range(1, len(path) + 1):
            self.put(path[:end])
        for step in steps:
            if step.thought is not None:
                self.thoughts.setdefault(step.chain, set()).add(step.thought)
            known = reversed(self.below.get((path, step.chain), []))
            same = (entry for entry in known if self.is_kept((*path, entry)) and self.says_all(entry, step))
            path = (*path, next(same, step))
            self.put(path)
        return path

    def put(self, path: Path) -> None:
        self.newest[path[-1].chain] = path
        readings = self.below.setdefault((path[:-1], path[-1].chain), [])
        readings[:] = [*(entry for entry in readings if entry is not path[-1]), path[-1]]

    def says_all(self, known: Plain, step: Plain) -> bool:
        if step.thought is None:
            return known.message == step.message and not self.is_doubtful(known)
        return known.message == step.message and known.thought == step.thought


def values(path: Path) -> Values:
    return [(entry.chain, entry.message, entry.thought) for entry in path]


def seen_values(leaf: PathNode | None) -> Values:
    path = () if leaf is None else leaf.path()
    return [(seen.chain, seen.message, thought_of(seen.written)) for seen in path]


def places_of(store: TurnStore) -> dict[bytes, object]:
    """What is known of each place, and its readings in their order."""
    return {
        chain: (place.said, place.is_doubtful, place.meaning, place.is_contested, list(map(seen_values, place.nodes)))
        for chain, place in store._states.items()
    }


def thought_of(said: Written | None) -> str | None:
    if said is None:
        return None
    first = said.message.blocks[0]
    return first.text if len(said.message.blocks) == 2 else ""  # type: ignore[union-attr]


class TurnMachine(RuleBasedStateMachine):
    """Without bounds the store and the dicts know the same."""

    max_nodes = 10**6
    max_bytes = 10**9

    @initialize(first=letters, second=letters)
    def begin(self, first: list[str], second: list[str]) -> None:
        self.notebook = Notebook()
        self.store = self.new_store()
        self.plain = PlainTurns()
        self.conversations: list[list[str]] = [["s", *first], ["s", *first, "B", *second], ["t", *second]]
        self.readings: dict[bytes, Values] = {}
        self.held: list[tuple[PathNode, Path, Values]] = []
        self.num_requests = 0

    def new_store(self) -> TurnStore:
        return TurnStore(
            max_nodes=self.max_nodes, max_bytes=self.max_bytes, max_record_bytes=20_000, journal=self.notebook
        )

    # --- what clients do ----------------------------------------------------------------------------------------------

    @rule(data=st.data(), more=letters)
    def branch_rewind_or_edit(self, data: st.DataObject, more: list[str]) -> None:
        """A conversation that leaves another one at any place."""
        base = data.draw(st.sampled_from(self.conversations))
        self.conversations.append([*base[: data.draw(st.integers(1, len(base)))], *more])

    @rule(more=letters)
    def sub_agent(self, more: list[str]) -> None:
        """Another system prompt under the same session."""
        self.conversations.append(["t", *more])

    @rule(data=st.data(), thought=thoughts, clock=clocks, is_fresh=st.booleans())
    def turn(self, data: st.DataObject, thought: str, clock: str, is_fresh: bool) -> None:
        """A request that is answered; the client goes on from it and strips the thinking. `is_fresh`: a clock in the
        history moved, and its policy is to show it: all is read again."""
        conversation = data.draw(st.sampled_from(self.conversations))
        said = data.draw(st.sampled_from("AB"))
        self.serve(conversation, clock, is_fresh, said, thought)
        conversation.append(said)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """The client leaves: its request was looked up, nothing is remembered; the same may come again."""
        self.look_up(chains_of(data.draw(st.sampled_from(self.conversations))))

    @rule(data=st.data(), thought=thoughts)
    def resend(self, data: st.DataObject, thought: str) -> None:
        """The last request again, with the same or another thought; the client shows only the words."""
        answered = [conversation for conversation in self.conversations if conversation[-1] in "AB"]
        if answered:
            conversation = data.draw(st.sampled_from(answered))
            self.serve(conversation[:-1], "", False, conversation[-1], thought)

    @rule(data=st.data())
    def somebody_who_held_a_path_ends_late(self, data: st.DataObject) -> None:
        """A slow request extends a path that may have been forgotten meanwhile."""
        if self.held:
            leaf, path, _ = data.draw(st.sampled_from(self.held))
            self.extend(leaf, path, [PathStep(chains_of(["Z"], leaf.chain)[0], user("Z"))])

    @rule(is_new_file=st.booleans())
    def restart(self, is_new_file: bool) -> None:
        """The process ends, and with it the requests that held a path; another one goes on from what was written."""
        if is_new_file:
            self.notebook.bodies.clear()
            self.store.put_all()
        self.held.clear()
        before = self.store.totals(), places_of(self.store)
        self.store = self.new_store()
        self.store.load(self.notebook.rows())
        assert (self.store.totals(), places_of(self.store)) == before

    # --- what the server does -----------------------------------------------------------------------------------------

    def look_up(self, chains: list[bytes]) -> tuple[PathNode | None, Path]:
        known, path = self.store.find(chains), self.plain.find(chains)
        found = seen_values(known)
        assert [chain for chain, _, _ in found] == chains[: len(found)]
        self.check_found(found, path)
        return known, path

    def serve(self, conversation: list[str], clock: str, is_fresh: bool, said: str, thought: str) -> None:
        """Replay what is known as it was seen, read the rest as it is sent now, write an answer."""
        chains = chains_of([*conversation, said])
        known, path = self.look_up(chains[:-1])
        if is_fresh:
            known, path = None, ()
        sent = [assistant(letter) if letter in "AB" else user(f"{letter} {clock}") for letter in conversation]
        start = 0 if known is None else known.index + 1
        steps = [PathStep(chain, message) for chain, message in zip(chains[:-1], sent, strict=True)][start:]
        self.num_requests += 1
        message = assistant(said, thinking=thought)
        steps.append(PathStep(chains[-1], message, written(message, self.num_requests)))
        leaf, path = self.extend(known, path, steps)
        self.store.remember(record_of(leaf, str(self.num_requests), session="one"), is_lasting=True)
        if self.num_requests % 4 == 0:
            self.held.append((leaf, path, seen_values(leaf)))

    def extend(self, parent: PathNode | None, path: Path, steps: list[PathStep]) -> tuple[PathNode, Path]:
        before = seen_values(parent)
        leaf = self.store.extend(parent, steps, until=NEVER)
        path = self.plain.extend(path, [Plain(step.chain, step.message, thought_of(step.written)) for step in steps])
        now = seen_values(leaf)
        assert now[: len(before)] == before
        assert [entry[:2] for entry in now[len(before) :]] == [(step.chain, step.message) for step in steps]
        for entry in now:
            self.readings.setdefault(entry[0], []).append(entry)
        self.check_extended(now, path)
        return leaf, path

    def check_found(self, found: Values, path: Path) -> None:
        assert found == values(path)

    def check_extended(self, now: Values, path: Path) -> None:
        assert now == values(path)

    @invariant()
    def all_is_well(self) -> None:
        """Bounds hold, and who holds a path holds what it was."""
        if hasattr(self, "store"):
            check_integrity(self.store)
            assert all(seen_values(leaf) == before for leaf, _, before in self.held)


class BoundedTurnMachine(TurnMachine):
    """With room for little: what is found was truly read so, only less of it is known."""

    max_nodes = 9
    max_bytes = 12_000

    def check_found(self, found: Values, path: Path) -> None:
        assert all(entry in self.readings[entry[0]] for entry in found)

    def check_extended(self, now: Values, path: Path) -> None:
        """The path is compared with the steps already; which equal node it shares may differ."""


@pytest.mark.parametrize("machine", [TurnMachine, BoundedTurnMachine])
def test_the_store_knows_what_plain_dicts_know(machine: type[TurnMachine]) -> None:
    """Any order of turns, branches, edits, clocks, repeated and aborted requests: the same paths, nobody else's."""
    run_state_machine_as_test(
        machine, settings=settings(max_examples=num_examples(14), stateful_step_count=30, deadline=None)
    )
