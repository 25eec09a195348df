"""Token runs: slices and comparisons agree with the slow and obvious way."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.token_run import common_end, image_around, join, pack
from tests.cache.payloads import Atom, flatten, keys_of
from tests.laws import num_examples

atoms = st.lists(st.one_of(st.integers(0, 2), st.sampled_from(["cat", "dog"])), min_size=1, max_size=16)


@given(base=atoms, one=atoms, other=atoms, data=st.data())
@settings(max_examples=num_examples(60))
def test_common_end_is_the_first_difference(
    base: list[Atom], one: list[Atom], other: list[Atom], data: st.DataObject
) -> None:
    """From any place on, two runs agree up to the first token whose id, digest or index differs."""
    sequences = [flatten([*base, *one]), flatten([*base, *other])]
    keys = [keys_of(tokens) for tokens in sequences]
    limit = data.draw(st.integers(0, min(map(len, keys))))
    start = data.draw(st.integers(0, limit))
    expected = next((n for n in range(start, limit) if keys[0][n] != keys[1][n]), limit)
    assert common_end(pack(sequences[0]), pack(sequences[1]), start, limit) == expected


@given(atoms=atoms, data=st.data())
@settings(max_examples=num_examples(60))
def test_parts_join_to_the_whole(atoms: list[Atom], data: st.DataObject) -> None:
    """A run cut anywhere, even inside an image, keeps every token's identity, and its parts make it again."""
    run, keys = pack(flatten(atoms)), keys_of(flatten(atoms))
    cut = data.draw(st.integers(0, len(run)))
    parts = [run.part(0, cut), run.part(cut, len(run))]
    assert join(parts) == run
    assert [part.key_at(position) for part in parts for position in range(part.start, part.end)] == list(keys)
    assert pack(flatten(atoms), cut) == parts[1]


@given(atoms=atoms)
@settings(max_examples=num_examples(60))
def test_an_image_is_around_its_inner_offsets(atoms: list[Atom]) -> None:
    """A cut divides an image strictly between its first and its last token."""
    tokens = flatten(atoms)
    inside = {offset for span in tokens.images for offset in range(span.start + 1, span.end)}
    assert {n for n in range(len(tokens) + 1) if image_around(tokens.images, n)} == inside
