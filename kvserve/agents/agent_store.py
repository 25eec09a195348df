"""Stores agents and their histories in SQLite: persistent ones in one file, the others in memory.

A turn is written in one transaction before its client receives the end, so the history is complete up to the last
finished turn whatever happens to the process. It knows no wire form and no model.
"""

import dataclasses
import json
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from kvserve.core import Block, ImageSpan, Message, TokenSequence
from kvserve.core.agent_nouns import Agent, NewAgent, TurnDone
from kvserve.errors import Conflict, NotFound, StorageFailure

BUSY_SECONDS = 5.0

_KIND = "kind"
_BLOCKS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(Block.__value__)}

_PRAGMAS = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
PRAGMA foreign_keys = ON;
PRAGMA secure_delete = ON;
"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS agents (
    key INTEGER PRIMARY KEY AUTOINCREMENT, agent_id TEXT NOT NULL UNIQUE, model TEXT, system_prompt TEXT,
    max_context INTEGER, created_at REAL NOT NULL, last_accessed REAL NOT NULL, num_turns INTEGER NOT NULL DEFAULT 0,
    first_turn INTEGER NOT NULL DEFAULT 0, context_model TEXT, context_ids BLOB NOT NULL DEFAULT x'',
    context_images TEXT NOT NULL DEFAULT '[]'
);
CREATE TABLE IF NOT EXISTS turns (
    agent INTEGER NOT NULL REFERENCES agents (key) ON DELETE CASCADE, number INTEGER NOT NULL, messages TEXT NOT NULL,
    PRIMARY KEY (agent, number)
) WITHOUT ROWID;
PRAGMA user_version = 1;
"""
_COLUMNS = (
    "key, agent_id, model, system_prompt, max_context, created_at, last_accessed, num_turns, first_turn, "
    "context_model, context_ids, context_images"
)
_LATER_COLUMN = "context_images TEXT NOT NULL DEFAULT '[]'"
"""The column that the first files lack."""


class AgentStore:
    """Thread-safe. The first persistent agent creates the file; without a file no agent persists. Every method raises
    StorageFailure, and changes nothing, if the file cannot be read or written."""

    def __init__(self, file: Path | None, wall_clock: Callable[[], float] = time.time) -> None:
        self._passing = _Shelf(None)
        self._persistent = _Shelf(file) if file is not None else self._passing
        self._shelves = (self._persistent, self._passing) if file is not None else (self._passing,)
        self._wall_clock = wall_clock
        self._lock = threading.Lock()

    def create(self, new: NewAgent) -> Agent:
        """A new agent without turns. Raises Conflict if its id is taken."""
        with self._lock:
            if any(shelf.find(new.agent_id) is not None for shelf in self._shelves):
                raise Conflict(f"There is an agent {_told(new.agent_id)!r} already.", param="agent_id")
            shelf = self._persistent if new.is_persistent else self._passing
            shelf.insert(new, self._wall_clock())
            return self._agent(new.agent_id)

    def agent(self, agent_id: str) -> Agent:
        """The agent with this id. Raises NotFound."""
        with self._lock:
            return self._agent(agent_id)

    def agents(self) -> tuple[Agent, ...]:
        """All of them, by age."""
        with self._lock:
            found = [agent for shelf in self._shelves for agent in shelf.all()]
        return tuple(sorted(found, key=lambda agent: agent.created_at))

    def num_agents(self) -> int:
        """The number of agents."""
        with self._lock:
            return sum(shelf.num_agents() for shelf in self._shelves)

    def history(self, agent: Agent) -> tuple[tuple[Message, ...], ...]:
        """The messages of each turn, the oldest first."""
        with self._lock:
            return self._shelf(agent).turns(agent.key)

    def append(self, agent: Agent, done: TurnDone) -> Agent:
        """Add a turn behind the agent's last one. Raises NotFound if the agent was deleted meanwhile, also if another
        agent took its id, and Conflict if another server added a turn."""
        with self._lock:
            is_added = self._shelf(agent).append(agent, done, self._wall_clock())
            now = self._agent(agent.agent_id)
            if now.key != agent.key:
                raise _unknown(agent.agent_id)
            if not is_added:
                said = f"Another server has added a turn to agent {_told(agent.agent_id)!r}."
                raise Conflict(said, param="agent_id")
            return now

    def delete(self, agent_id: str) -> Agent:
        """Delete an agent with its history, and return it. Raises NotFound."""
        with self._lock:
            agent = self._agent(agent_id)
            self._shelf(agent).delete(agent.key)
            return agent

    def close(self) -> None:
        """Close the files. Idempotent."""
        with self._lock:
            for shelf in self._shelves:
                shelf.close()

    def _agent(self, agent_id: str) -> Agent:
        for shelf in self._shelves:
            if (agent := shelf.find(agent_id)) is not None:
                return agent
        raise _unknown(agent_id)

    def _shelf(self, agent: Agent) -> "_Shelf":
        return self._persistent if agent.is_persistent else self._passing


class _Shelf:
    """One database. Its owner holds a lock."""

    def __init__(self, file: Path | None) -> None:
        """`file` None is memory."""
        self._file = file
        self._connection: sqlite3.Connection | None = None

    def find(self, agent_id: str) -> Agent | None:
        rows = self._read(f"SELECT {_COLUMNS} FROM agents WHERE agent_id = ?", agent_id)
        return self._agent(rows[0]) if rows else None

    def all(self) -> list[Agent]:
        return [self._agent(row) for row in self._read(f"SELECT {_COLUMNS} FROM agents")]

    def num_agents(self) -> int:
        rows = self._read("SELECT COUNT(*) FROM agents")
        return int(rows[0][0]) if rows else 0

    def turns(self, key: int) -> tuple[tuple[Message, ...], ...]:
        rows = self._read("SELECT messages FROM turns WHERE agent = ? ORDER BY number", key)
        try:
            return tuple(decode_messages(text) for (text,) in rows)
        except ValueError as error:
            raise self._failure(error) from error

    def insert(self, new: NewAgent, now: float) -> None:
        self._write(
            (
                "INSERT INTO agents (agent_id, model, system_prompt, max_context, created_at, last_accessed) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (new.agent_id, new.model, new.system_prompt, new.max_context, now, now),
            )
        )

    def append(self, agent: Agent, done: TurnDone, now: float) -> bool:
        """Add the turn; False if the agent is gone or another server added this turn."""
        ids = array("i", done.context.ids).tobytes()
        images = json.dumps([(span.start, span.end, span.digest) for span in done.context.images])
        changed = self._write(
            (
                "UPDATE agents SET num_turns = num_turns + 1, last_accessed = ?, model = ?, system_prompt = ?, "
                "first_turn = ?, context_model = ?, context_ids = ?, "
                "context_images = ? WHERE key = ? AND num_turns = ?",
                (
                    *(now, done.model, done.system_prompt, done.first_turn, done.context_model, ids, images),
                    *(agent.key, agent.num_turns),
                ),
            ),
            (
                "INSERT INTO turns (agent, number, messages) VALUES (?, ?, ?)",
                (agent.key, agent.num_turns, encode_messages(done.messages)),
            ),
        )
        return changed

    def delete(self, key: int) -> None:
        self._write(("DELETE FROM agents WHERE key = ?", (key,)))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- the database ------------------------------------------------------------------------------------------------

    def _read(self, statement: str, *values: object) -> list[Any]:
        try:
            connection = self._opened(may_make=False)
            return connection.execute(statement, values).fetchall() if connection is not None else []
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise self._failure(error) from error

    def _write(self, *statements: tuple[str, tuple[object, ...]]) -> bool:
        """Run all in one transaction, or none if the first changes nothing (False)."""
        try:
            connection = self._opened(may_make=True)
            assert connection is not None
            with connection:
                for number, (statement, values) in enumerate(statements):
                    if connection.execute(statement, values).rowcount == 0 and number == 0:
                        return False
            return True
        except (sqlite3.Error, OSError, OverflowError, UnicodeDecodeError) as error:
            raise self._failure(error) from error

    def _opened(self, *, may_make: bool) -> sqlite3.Connection | None:
        """The connection; None if there is no file yet and none may be made."""
        if self._connection is None and (may_make or self._file is None or self._file.exists()):
            if self._file is not None:
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file.touch(mode=0o600)  # before SQLite makes it, readable for others
            name = ":memory:" if self._file is None else str(self._file)
            connection = sqlite3.connect(name, timeout=BUSY_SECONDS, check_same_thread=False)
            try:
                connection.executescript(_PRAGMAS + _SCHEMA)
                _add_later_column(connection)
            except sqlite3.Error:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _agent(self, row: tuple[Any, ...]) -> Agent:
        (key, agent_id, model, system_prompt, max_context, created_at, last_accessed, *rest) = row
        num_turns, first_turn, context_model, packed, images = rest
        ids = array("i")
        ids.frombytes(packed)
        return Agent(
            key=key,
            agent_id=agent_id,
            model=model,
            system_prompt=system_prompt,
            max_context=max_context,
            is_persistent=self._file is not None,
            created_at=created_at,
            last_accessed=last_accessed,
            num_turns=num_turns,
            first_turn=first_turn,
            context_model=context_model,
            context=TokenSequence(tuple(ids), self._images(images)),
        )

    def _images(self, text: str) -> tuple[ImageSpan, ...]:
        try:
            return tuple(ImageSpan(int(start), int(end), str(digest)) for start, end, digest in json.loads(text))
        except (TypeError, ValueError) as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> StorageFailure:
        return StorageFailure(f"The history of agents in {self._file or 'memory'} cannot be used: {error}.")


def _add_later_column(connection: sqlite3.Connection) -> None:
    """Add the later column to an old file; of two servers that open it at once, one does."""

    def is_there() -> bool:
        return any(row[1] == "context_images" for row in connection.execute("PRAGMA table_info(agents)"))

    if is_there():
        return
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        if not is_there():
            connection.execute(f"ALTER TABLE agents ADD COLUMN {_LATER_COLUMN}")


def _unknown(agent_id: str) -> NotFound:
    return NotFound(f"There is no agent {_told(agent_id)!r}.", param="agent_id")


def _told(agent_id: str) -> str:
    """An id as its client has it, whoever holds it."""
    return agent_id.rpartition("/")[2]


# --- messages as JSON ------------------------------------------------------------------------------------------------
#
# Blocks are written by their dataclass fields: a new kind of block needs no line here.


def encode_messages(messages: Sequence[Message]) -> str:
    """One line of JSON."""
    return json.dumps([_plain(message) for message in messages], ensure_ascii=False, separators=(",", ":"))


def decode_messages(text: str) -> tuple[Message, ...]:
    """The messages that `encode_messages` wrote. Raises ValueError for what it cannot have written."""
    try:
        return tuple(
            Message(row["role"], tuple(_block(block) for block in row["blocks"]), row.get("name"))
            for row in json.loads(text)
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a list of messages: {error}") from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return fields if isinstance(value, Message) else {_KIND: type(value).__name__, **fields}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _block(row: Mapping[str, Any]) -> Any:
    """A block, and the blocks inside it: every list is a tuple of blocks."""
    fields = {
        name: tuple(_block(item) for item in value) if isinstance(value, list) else value
        for name, value in row.items()
        if name != _KIND
    }
    return _BLOCKS[row[_KIND]](**fields)
