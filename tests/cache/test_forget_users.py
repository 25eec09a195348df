"""Who is forgotten takes along what only it used: in the tree and in the disk's trie, token for token, and nothing that
somebody else used."""

import sqlite3
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvserve.cache.disk_records import Removal
from kvserve.cache.disk_trie import BlobTrie
from kvserve.cache.node import MAX_USERS
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from tests.cache.disks import HASHER, MODEL, Disk, named, names_of
from tests.cache.payloads import joined, make_tree, store
from tests.cache.test_disk_trie import add
from tests.integrity import check_integrity
from tests.laws import num_examples

SYSTEM = list(range(10))
ONE, OTHER = [*SYSTEM, *range(20, 40)], [*SYSTEM, *range(50, 70)]

used = st.lists(
    st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 2), min_size=1, max_size=20)), min_size=1, max_size=8
)


def depth(tree: PrefixTree, ids: list[int]) -> int:
    """How much of a conversation that goes on is known."""
    return tree.known_depth(TokenSequence((*ids, 99)))


def forget(tree: PrefixTree, user: str) -> int:
    num_tokens = tree.forget(lambda name: name == user)
    check_integrity(tree)
    return num_tokens


def prefixes(*conversations: list[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[:end]) for ids in conversations for end in range(1, len(ids) + 1)}


@pytest.mark.parametrize("needs_checkpoints", [False, True])
def test_what_two_used_stays_with_the_second(needs_checkpoints: bool) -> None:
    """Of the first one what both begin with; once the second is forgotten too, nothing, the end of a system prompt
    neither."""
    tree = make_tree(needs_checkpoints=needs_checkpoints)
    for user, ids in (("a", ONE), ("b", OTHER)):
        store(tree, TokenSequence(tuple(ids)), (len(SYSTEM), len(ids)), user=user, kinds={len(SYSTEM): "system"})
    assert forget(tree, "a") == len(ONE) - len(SYSTEM)
    assert (depth(tree, ONE), depth(tree, OTHER)) == (len(SYSTEM), len(OTHER))
    assert forget(tree, "b") == len(OTHER)
    assert (tree.num_ram_bytes, tree.stats().num_checkpoints) == (0, 0)


def test_the_end_of_the_other_ones_way_is_the_end_of_what_stays() -> None:
    """It stood in the middle of a node: what lies behind that place was read by the forgotten one only."""
    tree = make_tree()
    store(tree, TokenSequence(tuple(ONE)), user="a")
    store(tree, TokenSequence(tuple(ONE[:17])), user="b")
    forget(tree, "a")
    assert depth(tree, ONE) == tree.stats().num_stored_tokens == 17


def test_what_is_of_nobody_who_is_known_goes_too() -> None:
    """It may be theirs: what a server of before kept, or computed because many begin with it."""
    tree = make_tree()
    store(tree, TokenSequence(tuple(ONE)))
    store(tree, TokenSequence(tuple(OTHER)), user="b")
    forget(tree, "a")
    assert (depth(tree, ONE), depth(tree, OTHER)) == (len(SYSTEM), len(OTHER))


def test_a_live_row_of_who_is_forgotten_leaves_nothing_more() -> None:
    """Another one's row keeps what it stands on."""
    tree = make_tree()
    own = store(tree, TokenSequence(tuple(ONE)), user="a", keep=True)
    theirs = store(tree, TokenSequence(tuple(OTHER)), user="b", keep=True)
    forget(tree, "a")
    assert own.is_detached and not theirs.is_detached
    assert (depth(tree, ONE), depth(tree, OTHER)) == (len(SYSTEM), len(OTHER))
    tree.release(theirs)


def test_an_entry_that_is_pinned_goes() -> None:
    """Who is to be forgotten has asked for that later than for a lifetime."""
    tree = make_tree()
    store(tree, TokenSequence(tuple(ONE)), user="a", owner="a/branch", ttl_seconds=3600)
    forget(tree, "a")
    assert tree.stats().num_entries == 0 and tree.num_ram_bytes == 0


def test_no_more_than_so_many_are_remembered() -> None:
    """Of a prefix that all use; whoever is not remembered finds its own gone when it is forgotten all the same."""
    tree = make_tree()
    for number in range(MAX_USERS + 5):
        store(tree, TokenSequence((*SYSTEM, 100 + number)), user=f"user {number}")
    [root] = {nodes[0] for nodes in tree.sequences()}
    assert len(root.users) == MAX_USERS and "user 0" not in root.users
    assert forget(tree, "user 0") == 1
    assert depth(tree, [*SYSTEM, 100]) == len(SYSTEM)


@given(used)
@example([("b", [1, 1, 0, 0, 0]), ("a", [1, 1, 0, 0, 1, 0]), ("a", [1, 0, 0])])
@settings(max_examples=num_examples(80))
def test_the_tree_keeps_what_others_used_and_nothing_else(said: list[tuple[str, list[int]]]) -> None:
    """Whatever was said in whichever order, and joined or cut meanwhile."""
    tree = make_tree()
    for user, ids in said:
        store(tree, TokenSequence(tuple(ids)), user=user)
        while (run := tree.plan_coalesce(8)) is not None:
            tree.replace(run, joined(run.pieces))
    others = [ids for user, ids in said if user != "a"]
    forget(tree, "a")
    assert [depth(tree, ids) for ids in others] == [len(ids) for ids in others]
    assert tree.stats().num_stored_tokens == len(prefixes(*others))
    assert not any("a" in node.users for path in tree.sequences() for node in path)


# --- on disk ----------------------------------------------------------------------------------------------------------


@given(used)
@settings(max_examples=num_examples(80))
def test_the_index_knows_nothing_of_who_is_forgotten(said: list[tuple[str, list[int]]]) -> None:
    """No blob is left with a token that only that one used; what others wrote for themselves is there."""
    index, heads = BlobTrie(HASHER, MODEL), []
    for user, ids in said:
        add(index, ids, heads)
        index.use(*named(ids), {user: len(ids)})
    others = prefixes(*(ids for user, ids in said if user != "a"))
    alone = [ids for user, ids in said if user != "a" and not prefixes(ids) & prefixes(*theirs(said))]
    unused = index.forget_users(lambda user: user == "a")
    for entry in index._by_name.values():
        assert "a" not in entry.users and entry.users
    assert all(index.find(*named(ids)).depth == len(ids) for ids in alone)
    for ids in theirs(said):
        known = index.find(*named(ids)).depth
        assert tuple(ids[:known]) in others or not known
    assert len(set(unused.names)) == len(unused.names)


def theirs(said: list[tuple[str, list[int]]]) -> list[list[int]]:
    return [ids for user, ids in said if user == "a"]


def found_in(folder: Path, ids: list[int]) -> list[str]:
    """The files that hold these tokens as they are written down."""
    run = named(ids)[0]
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and run.ids in path.read_bytes())


def test_no_byte_is_left_on_disk(tmp_path: Path) -> None:
    """Neither in a blob nor in a deleted row of the index nor in its log; after a restart it is as if it never was."""
    mine, shared = list(range(1000, 1100)), list(range(2000, 2100))
    with Disk(tmp_path) as disk:
        for user, ids in (("a", mine), ("b", shared)):
            disk.say(ids, states=(len(ids),))
            disk.tier.index.use(*named(ids), {user: len(ids)})
            disk.tier._has_news = True
        assert disk.tier.flush(60)
        assert found_in(tmp_path, mine)
        held = disk.tier.index.num_bytes()
        removal = disk.tier.forget(lambda user: user == "a")
        assert removal.is_done and removal.num_bytes == held - disk.tier.index.num_bytes() > 0
        assert found_in(tmp_path, mine) == []
        assert disk.recall(shared) == (shared, [len(shared)])
        assert disk.faults == {}
    with Disk(tmp_path) as disk:
        assert disk.recall(mine) == ([], [])
        assert disk.recall(shared) == (shared, [len(shared)])


def test_what_merely_leaves_is_left_in_a_log(tmp_path: Path) -> None:
    """Negative control: a blob that is let go as others are is in no file of its own any more, and its tokens are."""
    mine = list(range(1000, 1100))
    with Disk(tmp_path) as disk:
        disk.say(mine)
        disk.tier.discard(names_of(disk.tier.index.find(*named(mine))))
        assert disk.tier.flush(60)
        assert disk.files() == [] and found_in(tmp_path, mine) != []


@pytest.mark.parametrize("is_scratch", [False, True])
def test_whose_a_blob_is_outlives_the_process(tmp_path: Path, is_scratch: bool) -> None:
    """Users are put down beside the blobs, all that share one, and are forgotten with them."""
    users = {"a": 12, "b": len(ONE)}
    with Disk(tmp_path, is_scratch=is_scratch) as disk:
        disk.say(ONE)
        assert disk.tier.index.use(*named(ONE), users)
        disk.tier._has_news = True
        assert disk.tier.flush(60)
        catalog = disk.tier.worker.account.catalog.open()
        assert catalog is not None
        assert {(user, depth) for _, user, depth in catalog.users(MODEL)} == set(users.items())
        if is_scratch:
            assert disk.tier.forget(lambda user: user == "a").num_bytes == 0
            assert {user for _, user, _ in catalog.users(MODEL)} == {"b"}
    if not is_scratch:
        with Disk(tmp_path) as disk:
            [entry] = disk.tier.index._by_name.values()
            assert entry.users == users
            assert disk.tier.forget(lambda user: user == "b").num_bytes > 0
            assert disk.recall(ONE) == ([], []), "the rest of it was read by one who is forgotten"


def test_an_index_of_before_is_taken_as_it_is(tmp_path: Path) -> None:
    """Its blobs are found, and are of nobody who is known."""
    with Disk(tmp_path) as disk:
        disk.say(ONE)
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        db.execute("DROP TABLE users")
    with Disk(tmp_path) as disk:
        assert disk.faults == {}
        assert disk.recall(ONE)[0] == ONE
        disk.tier.forget(lambda user: user == "somebody")
        assert disk.recall(ONE)[0] == []


OTHER_MODEL = "b" * 32


def forgotten(disk: Disk, user: str) -> Removal:
    """Whoever is forgotten, of all models."""
    return disk.tier.forget(user.__eq__) + disk.tier.forget_of_others(user.__eq__)


def users_in(folder: Path) -> set[tuple[str, str]]:
    with sqlite3.connect(folder / "index.sqlite") as db:
        return {(model, user) for model, user in db.execute("SELECT model, user FROM users")}


def written_of_another_model(folder: Path) -> tuple[list[int], list[int], list[int]]:
    """What two users, and nobody, have on disk of a model that is not served any more: a's, b's, nobody's."""
    mine, theirs, nobodys = list(range(1000, 1100)), list(range(2000, 2100)), list(range(3000, 3100))
    with Disk(folder, model=OTHER_MODEL) as disk:
        for ids, user in ((mine, "a"), (theirs, "b"), (nobodys, None)):
            disk.say(ids, states=(len(ids),))
            if user is not None:
                disk.tier.index.use(*named(ids), {user: len(ids)})
                disk.tier._has_news = True
        disk.say([*theirs, *range(4000, 4050)], states=(150,))  # stands on what b used, and is a's
        disk.tier.index.use(*named([*theirs, *range(4000, 4050)]), {"a": 150})
        disk.say([*mine[:50], *range(4100, 4150)])  # c's, behind the middle of what is a's
        disk.tier.index.use(*named([*mine[:50], *range(4100, 4150)]), {"c": 100})
        disk.tier._has_news = True
        assert disk.tier.flush(60)
    return mine, theirs, nobodys


def test_what_is_on_disk_of_other_models_goes_too(tmp_path: Path) -> None:
    """By the users that are put down beside the blobs, as in the trie of the model that is loaded; what others used of
    it is there when that model is served again, but what stands behind the middle of what goes."""
    mine, theirs, nobodys = written_of_another_model(tmp_path)
    tail = list(range(4010, 4040))
    own = list(range(5000, 5100))
    with Disk(tmp_path) as disk:
        disk.say(own)
        disk.tier.index.use(*named(own), {"b": len(own)})
        before = disk.tier.stats().total_bytes
        removal = forgotten(disk, "a")
        assert removal.is_done and removal.num_bytes == before - disk.tier.stats().total_bytes > 0
        for ids in (mine, nobodys, tail, list(range(4110, 4140))):
            assert found_in(tmp_path, ids) == [], ids
        assert users_in(tmp_path) == {(MODEL, "b"), (OTHER_MODEL, "b")}
        assert disk.recall(own)[0] == own and disk.faults == {}
    with Disk(tmp_path, model=OTHER_MODEL) as disk:
        assert disk.recall(theirs) == (theirs, [len(theirs)])
        assert disk.recall(mine) == ([], []) and disk.faults == {}


def test_a_folder_whose_index_cannot_be_asked_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on disk of other models is known by the index alone."""
    mine, _, _ = written_of_another_model(tmp_path)
    with Disk(tmp_path) as disk:

        def busy(*_: object) -> None:
            raise sqlite3.OperationalError("database is locked")

        monkeypatch.setattr("kvserve.cache.disk_catalog.Catalog.users", busy)
        monkeypatch.setattr("kvserve.cache.disk_catalog.is_passing", lambda error: True)
        assert not forgotten(disk, "a").is_done
        monkeypatch.undo()
        assert found_in(tmp_path, mine)
        assert forgotten(disk, "a").is_done
        assert found_in(tmp_path, mine) == []
