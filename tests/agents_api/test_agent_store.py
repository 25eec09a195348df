"""Agents in SQLite: histories in order, turns that are whole or not there, and files that cannot be used."""

import os
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvserve.agents.agent_store import AgentStore
from kvserve.core import ImageSpan, Message, TextBlock, ThinkingBlock, TokenSequence, ToolCallBlock
from kvserve.core.agent_nouns import NewAgent, TurnDone
from kvserve.errors import Conflict, NotFound, StorageFailure

QUESTION = Message("user", (TextBlock("What is it?"),))
ANSWER = Message("assistant", (ThinkingBlock("hm"), TextBlock("It is."), ToolCallBlock("c1", "look", "{}")))


def done(*messages: Message, first_turn: int = 0, ids: tuple[int, ...] = (1, 2, 3)) -> TurnDone:
    return TurnDone(messages or (QUESTION, ANSWER), "m", "Be brief.", first_turn, "served/m", TokenSequence(ids))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "agents.sqlite3"


def test_a_history_is_read_as_it_was_written(file: Path) -> None:
    """Turn by turn, with what the agent is after each, also by another store on the same file."""
    store = AgentStore(file, wall_clock=iter([10.0, 20.0, 30.0]).__next__)
    agent = store.create(NewAgent("one", "m", "Be brief.", 4096))
    assert (agent.num_turns, agent.created_at, agent.last_accessed, agent.context) == (0, 10.0, 10.0, TokenSequence(()))
    agent = store.append(agent, done(ids=tuple(range(1000))))
    context = TokenSequence((7, 200_000), (ImageSpan(1, 2, "a" * 64),))
    agent = store.append(agent, replace(done(QUESTION, first_turn=1), context=context))
    assert (agent.num_turns, agent.first_turn, agent.last_accessed) == (2, 1, 30.0)
    assert (agent.context, len(agent.context), agent.context_model) == (context, 2, "served/m")
    store.close()
    again = AgentStore(file)
    assert again.agent("one") == agent
    assert again.history(agent) == ((QUESTION, ANSWER), (QUESTION,))
    again.close()


def test_a_file_from_before_images_were_kept_is_read(file: Path) -> None:
    """Its agents go on, and from their next turn on it is kept where their images stand; by two stores at once, too."""
    store = AgentStore(file)
    agent = store.append(store.create(NewAgent("one")), done())
    store.close()
    with closing(sqlite3.connect(file)) as old, old:
        old.execute("ALTER TABLE agents DROP COLUMN context_images")
    first, second = AgentStore(file), AgentStore(file)
    assert first.agent("one") == second.agent("one") == agent
    context = TokenSequence((7, 7), (ImageSpan(0, 2, "a" * 64),))
    first.append(agent, replace(done(), context=context))
    assert second.agent("one").context == context


def test_what_was_written_is_there_without_a_close(file: Path) -> None:
    """As after a process that was killed: a second store sees every turn that was appended."""
    store = AgentStore(file)
    agent = store.create(NewAgent("one"))
    for number in range(5):
        agent = store.append(agent, done(Message("user", (TextBlock(str(number)),))))
        assert len(AgentStore(file).history(agent)) == number + 1


def test_a_taken_id_is_taken(file: Path) -> None:
    """Also by an agent that does not persist; deleted, it is free, and another agent begins without turns."""
    store = AgentStore(file)
    for is_persistent in (True, False):
        agent = store.append(store.create(NewAgent("one", is_persistent=is_persistent)), done())
        for other in (True, False):
            with pytest.raises(Conflict, match="one"):
                store.create(NewAgent("one", is_persistent=other))
        assert store.delete("one") == agent
        for lost in (lambda: store.agent("one"), lambda: store.delete("one")):
            with pytest.raises(NotFound, match="one"):
                lost()
        assert store.history(agent) == ()


def test_an_agent_that_does_not_persist_ends_with_its_store(file: Path) -> None:
    """It leaves nothing on disk, and until then it is like any other."""
    store = AgentStore(file)
    agent = store.append(store.create(NewAgent("passing", is_persistent=False)), done())
    assert store.history(agent) == ((QUESTION, ANSWER),)
    assert not file.exists() and AgentStore(file).agents() == ()


def test_nothing_is_made_before_an_agent_is(file: Path) -> None:
    """Reading makes no file; the first agent makes one for the owner's eyes only."""
    store = AgentStore(file)
    assert (store.agents(), store.num_agents()) == ((), 0) and not file.parent.exists()
    store.create(NewAgent("one"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert store.num_agents() == 1


def test_a_turn_of_an_agent_that_is_gone_is_refused(file: Path) -> None:
    """Deleted, or another one under its id: the turn goes nowhere. So does a second turn at the same place."""
    store = AgentStore(file)
    before = store.create(NewAgent("one"))
    store.delete("one")
    with pytest.raises(NotFound):
        store.append(before, done())
    after = store.create(NewAgent("one"))
    with pytest.raises(NotFound):
        store.append(before, done())
    assert store.history(after) == ()
    store.append(after, done())
    with pytest.raises(Conflict, match="Another server"):
        store.append(after, done(QUESTION))
    assert store.history(after) == ((QUESTION, ANSWER),)


def test_many_threads_keep_their_own_histories(file: Path) -> None:
    """Twenty agents at once, ten turns each."""
    store = AgentStore(file)

    def live(name: str) -> None:
        agent = store.create(NewAgent(name))
        for number in range(10):
            agent = store.append(agent, done(Message("user", (TextBlock(f"{name} {number}"),))))

    names = [f"agent-{number}" for number in range(20)]
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(live, names))
    for name in names:
        texts = [turn[0].blocks[0].text for turn in store.history(store.agent(name))]  # type: ignore[union-attr]
        assert texts == [f"{name} {number}" for number in range(10)]


@pytest.mark.parametrize("damage", ["no database", "no messages", "a folder"])
def test_a_file_that_cannot_be_used_is_named_and_left_alone(file: Path, damage: str) -> None:
    """Whatever is asked says which file it is; nothing of it is changed."""
    store = AgentStore(file)
    store.append(store.create(NewAgent("one")), done())
    store.close()
    if damage == "no messages":
        store._persistent._write(("UPDATE turns SET messages = ?", ('[{"role": "user"}]',)))
        with pytest.raises(StorageFailure, match=file.name):
            store.history(store.agent("one"))
        return
    for path in file.parent.glob(f"{file.name}*"):
        path.unlink()
    if damage == "a folder":
        file.mkdir()
    else:
        file.write_bytes(b"not a database at all" * 100)
    before = os.stat(file)
    for act in (store.agents, lambda: store.agent("one"), lambda: store.create(NewAgent("two"))):
        with pytest.raises(StorageFailure, match=file.name):
            act()
    assert os.stat(file).st_size == before.st_size


def test_without_a_file_no_agent_persists() -> None:
    """It says so, whatever it was asked for, and is like any other until its store ends."""
    store = AgentStore(None)
    for is_persistent in (True, False):
        agent = store.create(NewAgent(f"one {is_persistent}", is_persistent=is_persistent))
        assert not agent.is_persistent
        assert store.append(agent, done()).num_turns == 1
    assert store.num_agents() == len(store.agents()) == 2
    assert store.delete("one True").agent_id == "one True"
