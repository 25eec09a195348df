"""All stores of a model together: shares of one number, a life beyond the process, terms and emptiness."""

import dataclasses
from pathlib import Path

from kvserve.core import ToolSpec
from kvserve.sessions.archive import Archive
from kvserve.sessions.lineage import SessionKey
from kvserve.sessions.seen import PathStep
from kvserve.sessions.stores import (
    FAMILIAR_SHARE,
    HEALING_SHARE,
    HOT_PREFIXES_SHARE,
    LINEAGE_SHARE,
    MEMO_SHARE,
    PATHS_SHARE,
    PLACED_SHARE,
    RECORDS_SHARE,
    TOOLS_SHARE,
    StoreLimits,
    Stores,
)
from tests.integrity import check_integrity
from tests.sessions import samples
from tests.sessions.samples import assistant, chains_of, steps_of, texts_of, user, written

DAY = 86_400.0


class Life:
    """One process's stores in a folder, at a time of its own."""

    def __init__(
        self, folder: Path, now: float = 0.0, limits: StoreLimits | None = None, *, is_late: bool = False
    ) -> None:
        """`is_late`: the file is there once it is attached."""
        self.now = now
        self.lines: list[str] = []
        limits = limits or StoreLimits()
        self.archive = Archive(folder, max_bytes=limits.max_bytes, report=self.lines.append)
        begins_with = None if is_late else self.archive
        self.stores = Stores(limits, begins_with, clock=lambda: self.now, awaits_archive=is_late)

    def turn(self, letters: str, thought: str = "", ttl_seconds: float | None = None, name: str = "r") -> PathStep:
        """A request of users' messages, answered with the last letter."""
        until, chains = self.stores.until(ttl_seconds), chains_of(letters)
        message = assistant(letters[-1], thinking=thought)
        answer = PathStep(chains[-1], message, written(message, 4, 5, 6))
        seen = self.stores.turns.find(chains[:-1])
        new = steps_of(letters[:-1])[0 if seen is None else seen.index + 1 :]
        leaf = self.stores.turns.extend(seen, [*new, answer], until)
        record = dataclasses.replace(samples.record_of(leaf, name, "s"), tools_digest=b"d")
        self.stores.turns.remember(record, is_lasting=until is not None)
        self.stores.healing.remember(chains[-1], answer.written or written(message), until)
        ends = list(range(len(chains)))
        self.stores.index.advance(
            SessionKey("id:s"), chains, num_tokens=len(chains), ends=ends, now=self.now, until=until
        )
        return answer

    def known(self, letters: str) -> list[str]:
        return texts_of(self.stores.turns.find(chains_of(letters)))

    def end(self) -> None:
        self.stores.close()
        assert not self.lines


def test_everything_is_there_in_the_next_life(tmp_path: Path) -> None:
    """Paths with what was written, the request before, healing, branches and their numbers, the tools' first order."""
    tools = tuple(ToolSpec(name, None, {"type": "object"}) for name in "ab")
    first = Life(tmp_path)
    first.turn("suA", "hm", name="r1")
    first.turn("suAvB", "so", name="r2")
    first.turn("suxC", name="r3")
    first.stores.turns.tools_as_seen(b"t", tools, first.stores.until(None))
    sessions, totals = first.stores.index.sessions(0.0), first.stores.turns.totals()
    first.end()
    second = Life(tmp_path)
    assert second.known("suAvBw") == list("suAvB") and second.known("suxCw") == list("suxC")
    leaf = second.stores.turns.find(chains_of("suAvB"))
    assert leaf is not None and leaf.written is not None and leaf.written.ids == (4, 5, 6)
    before = second.stores.turns.record_for(leaf)
    assert before is not None and before.request_id == "r2" and before.messages[2] == assistant("A", thinking="hm")
    assert before.messages[2] is leaf.path()[2].message
    assert second.stores.healing.find(chains_of("suA")[-1]) is not None and len(second.stores.healing) == 3
    assert second.stores.index.sessions(0.0) == sessions and second.stores.turns.totals() == totals
    assert second.stores.turns.tools_as_seen(b"t", tools[::-1]) == tools
    check_integrity(second.stores.turns)
    second.turn("suyD")
    assert max(branch.branch_id for view in second.stores.index.sessions(0.0) for branch in view.branches) == 3
    second.end()


def test_the_newest_reading_is_the_newest_in_the_next_life(tmp_path: Path) -> None:
    """Not the one that was first read last: an older one that was read again since."""
    first = Life(tmp_path)
    for texts in (["s", "10:00", "x"], ["s", "10:05", "y"], ["s", "10:00", "x", "z"]):
        letters = "suxz" if texts[1] == "10:00" else "suy"
        first.stores.turns.extend(None, steps_of(letters[: len(texts)], texts), first.stores.until(None))
    assert first.known("su") == ["s", "10:00"]
    first.end()
    second = Life(tmp_path)
    assert second.known("su") == ["s", "10:00"] and second.known("suy") == ["s", "10:05", "y"]
    second.end()


def test_doubts_outlive_the_process(tmp_path: Path) -> None:
    """Two different thoughts behind the same words: after a restart too nobody is given either."""
    first = Life(tmp_path)
    first.turn("suA", "this")
    first.turn("suA", "that")
    assert first.known("suAv") == list("su")
    first.end()
    second = Life(tmp_path)
    assert second.known("suAv") == list("su")
    assert second.stores.healing.find(chains_of("suA")[-1]) is None
    second.end()


def test_a_request_without_a_term_leaves_nothing(tmp_path: Path) -> None:
    """`ttl` 0: known in this process, no byte of it on disk; what another request repeats of it is that one's."""
    first = Life(tmp_path)
    message = assistant("A", thinking="SECRET")
    chains = chains_of("suA")
    first.stores.turns.extend(
        None, [*steps_of("su", ["s", "QUESTION"]), PathStep(chains[-1], message, written(message))]
    )
    first.turn("suB", "SECRET", ttl_seconds=0)
    assert first.known("suB") == ["s", "QUESTION", "B"]
    first.stores.flush()
    assert not any(b"SECRET" in file.read_bytes() for file in tmp_path.iterdir())
    first.turn("suBvC")
    first.end()
    second = Life(tmp_path)
    assert second.known("suBvC") == ["s", "QUESTION", "B", "v", "C"] and second.known("suA") == ["s", "QUESTION"]
    second.end()


def test_what_nobody_used_for_a_day_goes(tmp_path: Path) -> None:
    """Each path by its last use, whatever time its client wanted it in RAM; then nothing is left on disk."""
    first = Life(tmp_path)
    first.turn("suA")
    first.turn("tuB")
    first.now = DAY / 2
    first.turn("suAvD")
    first.turn("xuC", ttl_seconds=60)
    first.end()
    second = Life(tmp_path, now=DAY + 1)
    assert [second.known(letters) for letters in ("suAvD", "tuB", "xuC")] == [list("suAvD"), [], list("xuC")]
    assert len(second.stores.healing) == 2 and second.stores.index.totals(second.now).num_branches == 2
    second.end()
    third = Life(tmp_path, now=3 * DAY)
    assert third.known("suAvD") == [] and third.stores.turns.totals().num_nodes == 0
    third.stores.flush()
    assert {kind for (kind,) in third.archive._file._connection.execute("SELECT kind FROM rows")} <= {"counter"}  # type: ignore[union-attr]
    third.end()


def test_clearing_empties_the_disk(tmp_path: Path) -> None:
    """When it returns there is nothing to find, whatever becomes of the process; what comes after is kept."""
    first = Life(tmp_path)
    first.turn("suA", "SECRET")
    first.turn("suA", "OTHER")
    first.stores.turns.tools_as_seen(b"t", (ToolSpec("SECRET", None, {}),), first.stores.until(None))
    first.stores.flush()
    first.stores.clear()
    connection = first.archive._file._connection  # type: ignore[union-attr]
    assert {kind for (kind,) in connection.execute("SELECT kind FROM rows")} <= {"counter"}
    first.turn("suAvB")
    first.end()
    second = Life(tmp_path)
    assert second.known("suAvB") == list("suAvB") and len(second.stores.healing) == 1
    second.end()


def test_rows_that_do_not_fit_together_are_begun_anew(tmp_path: Path) -> None:
    """A message whose parent was never written, by a faulty program: nothing of that file is used."""
    first = Life(tmp_path)
    first.turn("suA")
    first.stores.flush()
    first.archive.drop("node", (1).to_bytes(8))
    first.end()
    second = Life(tmp_path)
    assert second.stores.turns.totals().num_nodes == 0 and len(second.stores.healing) == 0
    assert len(second.lines) == 1 and "fit together" in second.lines[0]
    second.turn("tuB")
    second.stores.close()
    third = Life(tmp_path)
    assert third.known("tuB") == list("tuB")
    third.end()


def test_a_store_with_less_room_keeps_the_newest(tmp_path: Path) -> None:
    """The setting was lowered between two lives."""
    first = Life(tmp_path)
    for letter in "abcdefgh":
        first.stores.turns.extend(None, [PathStep(chains_of(letter)[0], user("x" * 10_000))], first.stores.until(None))
    first.end()
    second = Life(tmp_path, limits=StoreLimits(max_bytes=120_000))
    assert [bool(second.known(letter)) for letter in "abcdefgh"] == [False] * 5 + [True] * 3
    second.end()
    third = Life(tmp_path)
    assert third.stores.turns.totals().num_nodes == 3
    third.end()


def test_texts_that_are_larger_on_disk_stay_within_the_bytes(tmp_path: Path) -> None:
    """Control characters take six bytes in JSON: the file keeps to its number, the least recently used go."""
    life = Life(tmp_path, limits=StoreLimits(max_bytes=200_000))
    for number in range(8):
        chain = chains_of([str(number)])[0]
        life.stores.turns.extend(None, [PathStep(chain, user("\x01" * 20_000))], life.stores.until(None))
        life.stores.flush()
    life.stores.flush()
    life.stores.flush()
    assert 0 < life.archive.totals().num_bytes <= 200_000
    assert life.known(["7"]) != []  # type: ignore[arg-type]
    life.end()


def test_the_shares_are_a_whole() -> None:
    """One setting, nothing beside it."""
    stores = (PATHS_SHARE, RECORDS_SHARE, HEALING_SHARE, LINEAGE_SHARE, TOOLS_SHARE, HOT_PREFIXES_SHARE)
    assert sum(stores) + FAMILIAR_SHARE + PLACED_SHARE + MEMO_SHARE == 1.0
    limits = StoreLimits(max_bytes=3200)
    assert (limits.memo_bytes, limits.familiar_bytes, limits.placed_bytes) == (450, 200, 100)


def test_without_an_archive_nothing_is_written() -> None:
    """Every request is without a term, and sessions go when they are idle."""
    stores = Stores(StoreLimits(idle_seconds=10.0), clock=lambda: 0.0)
    assert stores.until(None) is None and stores.flush() and not stores.archive_totals().is_on
    stores.index.advance(SessionKey("s"), chains_of("a"), num_tokens=1, ends=[1], now=0.0)
    assert stores.index.totals(11.0).num_sessions == 0
    stores.close()


def test_what_came_before_the_file_is_written_too(tmp_path: Path) -> None:
    """A file that holds nothing yet gets all of it, and what comes later; requests with a term of 0 stay out."""
    first = Life(tmp_path, is_late=True)
    first.turn("suA", "hm", name="r1")
    first.turn("sxB", ttl_seconds=0, name="r2")
    assert first.stores.awaits_archive and first.stores.archive_folder is None
    assert not first.stores.attach(first.archive) and first.stores.archive_folder == tmp_path
    first.turn("suAvC", name="r3")
    first.end()
    second = Life(tmp_path)
    assert second.known("suAvCw") == list("suAvC") and second.known("sxBw") == ["s"]
    second.end()


def test_what_the_file_held_takes_the_place_of_what_came_before_it(tmp_path: Path) -> None:
    """Numbers of nodes mean one store's: who still holds the store of before writes nothing into the file."""
    earlier = Life(tmp_path)
    earlier.turn("suA")
    earlier.end()
    life = Life(tmp_path, is_late=True)
    life.turn("sxB")
    of_before = life.stores.turns
    assert life.stores.attach(life.archive)
    assert life.known("suAw") == list("suA") and life.known("sxBw") == ["s"]
    life.turn("suAvC")
    of_before.extend(None, steps_of("syz"), life.stores.until(None))
    life.end()
    last = Life(tmp_path)
    assert last.known("suAvCw") == list("suAvC") and last.known("syz") == ["s"]
    last.end()


def test_a_file_that_is_another_models_is_left_as_it_is(tmp_path: Path) -> None:
    """What was read from it is forgotten in RAM, nothing more goes there, and later another one may come."""
    earlier = Life(tmp_path / "one")
    earlier.turn("suA")
    earlier.end()
    life = Life(tmp_path / "one")
    life.stores.detach()
    assert life.known("suAw") == [] and life.stores.until(None) is None
    life.turn("sxB")
    other = Archive(tmp_path / "two", max_bytes=2**20, report=life.lines.append)
    life.stores.attach(other)
    life.turn("syC")
    life.end()
    assert Life(tmp_path / "one").known("suAw") == list("suA")
    assert Life(tmp_path / "two").known("syCw") == list("syC")


def test_a_file_that_comes_after_the_end_is_closed(tmp_path: Path) -> None:
    """Another process can have it at once."""
    life = Life(tmp_path, is_late=True)
    life.turn("suA")
    life.end()
    assert not life.stores.attach(life.archive)
    again = Life(tmp_path)
    assert again.known("suA") == []
    again.end()
