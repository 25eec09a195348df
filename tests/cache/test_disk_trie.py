"""The trie of blobs against a plain set of prefixes: what was added is found, token by token, also after a restart."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.disk_blob import BlobHead
from kvserve.cache.disk_records import Entry
from kvserve.cache.disk_trie import BlobTrie
from kvserve.cache.token_run import pack
from kvserve.core import ImageSpan, TokenSequence
from tests.cache.disks import HASHER, MODEL, named, names_of
from tests.laws import num_examples

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=8)


def add(index: BlobTrie, ids: list[int], heads: list[BlobHead], states: tuple[int, ...] = ()) -> None:
    """Make a prompt known as one more segment, and states on it; `heads` takes what was new."""
    run, chain = named(ids)
    depth = index.find(run, chain).depth
    entry = index.add_segment(run, chain, depth, run.end, "user")
    entries = [entry, *(index.add_checkpoint(run, chain, offset, "user") for offset in states)]
    for each in entries:
        if each is not None:
            assert index.confirm(each, 10)
            heads.append(each.head)


def common(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


@given(prompts, st.lists(st.integers(0, 2), min_size=1, max_size=24))
@settings(max_examples=num_examples(50))
def test_the_longest_prefix_is_found(said: list[list[int]], asked: list[int]) -> None:
    """As deep as the best of all prompts, in steps that follow one another."""
    index, heads = BlobTrie(HASHER, MODEL), []
    for ids in said:
        add(index, ids, heads)
    found = index.find(*named(asked)).written()
    assert found.depth == max(common(asked, ids) for ids in said)
    edges = [0, *(step.end for step in found.steps)]
    assert [step.start for step in found.steps] == edges[:-1] and edges[-1] == found.depth


@given(prompts)
@settings(max_examples=num_examples(50))
def test_shared_tokens_are_on_disk_once(said: list[list[int]]) -> None:
    """Blobs hold as many tokens as there are different prefixes."""
    index, heads = BlobTrie(HASHER, MODEL), []
    for ids in said:
        add(index, ids, heads)
    prefixes = {tuple(ids[:end]) for ids in said for end in range(1, len(ids) + 1)}
    assert sum(len(head.tokens) for head in heads) == len(prefixes)


@given(prompts, st.randoms())
@settings(max_examples=num_examples(50))
def test_a_restart_knows_the_same(said: list[list[int]], random: object) -> None:
    """An index that adopts the blobs, parents first, finds what the one found that wrote them, states too."""
    first, heads = BlobTrie(HASHER, MODEL), []
    for number, ids in enumerate(said):
        add(first, ids, heads, states=(len(ids),) if number % 2 else (max(1, len(ids) // 2),))
    random.shuffle(heads)  # type: ignore[attr-defined]
    second = BlobTrie(HASHER, MODEL)
    for head in sorted(heads, key=lambda head: (head.tokens.start, head.kind != "segment")):
        assert second.adopt(head, 10)
    for ids in said:
        one, other = (index.find(*named([*ids, 9])) for index in (first, second))
        assert one.depth == other.depth == len(ids)
        assert names_of(one) == names_of(other)
        assert [step.end for step in one.steps if step.checkpoint] == [
            step.end for step in other.steps if step.checkpoint
        ]


@given(prompts, st.integers(0, 20))
@settings(max_examples=num_examples(50))
def test_what_is_forgotten_takes_along_what_stands_on_it(said: list[list[int]], which: int) -> None:
    """Every name that is left leads back to the root, and nothing else was forgotten."""
    index, heads = BlobTrie(HASHER, MODEL), []
    for ids in said:
        add(index, ids, heads, states=(len(ids),))
    victim = heads[which % len(heads)]
    gone = set(index.forget(victim.name))
    parents = {head.name: head.parent for head in heads}

    def stands_on_it(name: str) -> bool:
        while name and name != victim.name:
            name = parents[name]  # type: ignore[index]
        return bool(name)

    assert gone == {name for name in parents if stands_on_it(name)}
    assert {name for name in parents if index.is_known(name)} == parents.keys() - gone
    assert index.num_of("segment") + index.num_of("checkpoint") == len(parents) - len(gone)
    assert index.num_bytes() == 10 * (len(parents) - len(gone))
    assert index.forget(victim.name) == []


def test_a_blob_that_is_not_written_yet_is_no_hit() -> None:
    """It is known, so that nobody writes it again, and it is not read before it is there."""
    index = BlobTrie(HASHER, MODEL)
    run, chain = named([1, 2, 3])
    entry = index.add_segment(run, chain, 0, 3, "user")
    assert entry is not None and index.find(run, chain).depth == 3
    assert index.find(run, chain).written().depth == 0
    assert index.add_segment(run, chain, 0, 3, "user") is None
    assert index.confirm(entry, 5) and index.find(run, chain).written().depth == 3
    index.forget(entry.name)
    assert not index.confirm(entry, 5)


def test_a_blob_of_another_model_or_without_its_parent_finds_no_place() -> None:
    """What cannot be verified from the first token on is not taken in."""
    index = BlobTrie(HASHER, MODEL)
    run, _ = named([1, 2, 3])
    assert not index.adopt(BlobHead("other", "segment", "", run, "user"), 1)
    assert not index.adopt(BlobHead(MODEL, "segment", "ab", run.part(1, 3), "user"), 1)
    assert not index.adopt(BlobHead(MODEL, "checkpoint", "", run.part(1, 1), "user"), 1)
    assert index.adopt(BlobHead(MODEL, "segment", "", run, "user"), 1)
    assert not index.adopt(BlobHead(MODEL, "segment", "", run.part(0, 2), "user"), 1), "these tokens are there already"


def test_images_part_by_content_after_a_restart() -> None:
    """Two images of one size lead to two blobs, and each is found by its own digest only."""
    ids = (5, 9, 9, 9, 9, 9, 9, 6)
    index, second = BlobTrie(HASHER, MODEL), BlobTrie(HASHER, MODEL)
    for digest in ("cat", "dog"):
        run = pack(TokenSequence(ids, (ImageSpan(1, 7, digest),)))
        chain = HASHER.start().extended(run)
        entry = index.add_segment(run, chain, index.find(run, chain).depth, 8, "user")
        assert entry is not None and second.adopt(entry.head, 1)
        found = second.find(run, chain)
        assert found.depth == 8 and found.steps[-1].segment.name == entry.name


def test_whoever_has_an_entry_sees_that_it_was_forgotten() -> None:
    """Alone, with what it stands on, or with all there is; put again it is another one."""
    index = BlobTrie(HASHER, MODEL)
    run, chain = named([1, 2, 3, 4])
    first, last = index.add_segment(run, chain, 0, 2, "user"), index.add_segment(run, chain, 2, 4, "user")
    state = index.add_checkpoint(run, chain, 4, "user")
    assert first is not None and last is not None and state is not None
    seen = [(first.is_forgotten, last.is_forgotten, state.is_forgotten)]
    for forget in (lambda: index.forget(state.name), lambda: index.forget(last.name), index.clear):
        forget()
        seen.append((first.is_forgotten, last.is_forgotten, state.is_forgotten))
    assert seen == [(False,) * 3, (False, False, True), (False, True, True), (True,) * 3]
    again = index.add_segment(run, chain, 0, 2, "user")
    assert again is not None and not again.is_forgotten and first.is_forgotten


def chain_of(index: BlobTrie) -> list[Entry]:
    """Three states of one prompt, each of which goes on from the one before."""
    run, chain = named(list(range(30)))
    rows = index.add_segment(run, chain, 0, 30, "user")
    assert rows is not None and index.confirm(rows, 10)
    states: list[Entry] = []
    for offset in (10, 20, 30):
        state = index.add_checkpoint(run, chain, offset, "answer", (), states[-1] if states else None)
        assert state is not None
        states.append(state)
    return states


def test_a_state_is_there_once_all_that_it_goes_on_from_is() -> None:
    """And it is read with them, the whole one first."""
    index = BlobTrie(HASHER, MODEL)
    first, second, third = chain_of(index)
    assert third.chain == (first, second, third)
    ends = []
    for each in (third, first, second):
        assert index.confirm(each, 10)
        found = index.find(*named(list(range(30)))).written()
        ends.append([step.end for step in found.steps if step.checkpoint is not None])
    assert ends == [[], [10], [10, 20, 30]]


def test_states_leave_with_the_one_that_they_go_on_from() -> None:
    """Those before it stay."""
    index = BlobTrie(HASHER, MODEL)
    first, second, third = chain_of(index)
    assert set(index.forget(second.name)) == {second.name, third.name}
    assert [each.is_forgotten for each in (first, second, third)] == [False, True, True]
    assert index.add_checkpoint(*named(list(range(30))), 20, "answer", (), second) is None, "that is no more"


def test_a_restart_finds_chains_of_states_also_of_two_servers() -> None:
    """One whole state at a place is as good as another server's: what goes on from either is taken in."""
    one, other, third = (BlobTrie(HASHER, MODEL) for _ in range(3))
    heads = [each.head for each in chain_of(one)]
    run, chain = named(list(range(30)))
    rows = [index.add_segment(run, chain, 0, end, "user") for index, end in ((other, 10),)]
    rows.append(other.add_segment(run, chain, 10, 30, "user"))
    states = [other.add_checkpoint(run, chain, 10, "answer")]
    states.append(other.add_checkpoint(run, chain, 25, "answer", (), states[0]))
    segments = [one.find(run, chain).steps[0].segment.head, *(each.head for each in rows if each is not None)]
    for head in segments:
        third.adopt(head, 1)
    for head in sorted(
        (*heads, *(each.head for each in states if each is not None)), key=lambda head: head.tokens.start
    ):
        third.adopt(head, 1)
    assert [step.end for step in third.find(run, chain).written().steps if step.checkpoint] == [10, 20, 25, 30]
    lost = BlobTrie(HASHER, MODEL)
    for head in segments:
        lost.adopt(head, 1)
    assert not lost.adopt(heads[1], 1), "what it goes on from is not there"
