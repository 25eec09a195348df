"""The file of one blob: it comes back as it was written, and proves that it did."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.disk_blob import (
    GATHERED_BYTES,
    BlobHead,
    BlobName,
    DamagedBlob,
    Tensor,
    pack_blob,
    parent_of_first,
    partition_of_first,
    read_head,
    unpack_blob,
)
from kvserve.cache.token_run import TokenRun, pack
from kvserve.core import ImageSpan, TokenSequence

TOKENS = pack(TokenSequence((7, 8, 8, 9, 2**32 - 1), (ImageSpan(1, 3, "cat"),)))
HEAD = BlobHead("model", "segment", "", TOKENS, "system")
TENSORS = (Tensor("BF16", (1, 2, 3), bytes(range(12))), Tensor("F32", (2, 0), b""), Tensor("BOOL", (), b"\1"))
FILE = b"".join(bytes(part) for part in pack_blob(HEAD, '{"what":"rows"}', TENSORS))


def test_a_blob_comes_back() -> None:
    """Tokens, images, boundary, note and every tensor with its type and shape."""
    blob = unpack_blob(FILE, HEAD.name)
    assert (blob.head, blob.note) == (HEAD, '{"what":"rows"}')
    assert [(each.dtype, each.shape, bytes(each.data)) for each in blob.tensors] == [
        (each.dtype, each.shape, bytes(each.data)) for each in TENSORS
    ]


def test_without_partitions_names_are_what_they_were() -> None:
    """A cache on disk of before there were any is found; in a partition the same tokens have another name."""
    run = TokenRun(0, b"\1\0\0\0\2\0\0\0")
    name = "8a4a7f26dbbea834c25f8781da7a9433c453e893"
    assert BlobHead("0" * 32, "segment", parent_of_first(""), run, "stride").name == name
    assert BlobHead("0" * 32, "segment", parent_of_first("key.user"), run, "stride").name != name
    assert [partition_of_first(parent_of_first(each)) for each in ("", "key.user")] == ["", "key.user"]
    assert partition_of_first(name) is None
    seed = BlockHasher(4, "fingerprint").start().seed.hex()
    assert seed == "3f06f11d45be457f5c61db4607255f0ee4aaa860986ec266aacb91a5b599cad6"


def test_it_is_a_safetensors_file() -> None:
    """Header length, JSON, then data without a gap or a rest, as the format has it."""
    (length,) = struct.unpack("<Q", FILE[:8])
    header = json.loads(FILE[8 : 8 + length])
    assert all(isinstance(value, str) for value in header.pop("__metadata__").values())
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert length % 8 == 0 and spans[-1][1] == len(FILE) - 8 - length


def test_the_head_is_read_without_the_payload() -> None:
    """First the header's length is asked for, then as many bytes as hold the tokens, and no more."""
    beginning, asked = b"", []
    while isinstance(answer := read_head(FILE[: len(beginning)], HEAD.name), int):
        asked.append(answer)
        beginning = FILE[:answer]
    assert answer == HEAD and len(asked) == 3 and asked[-1] < len(FILE) - 32 - 12


@pytest.mark.parametrize("change", ["model", "kind", "parent", "tokens", "base"])
def test_a_name_stands_for_all_that_kv_depends_on(change: str) -> None:
    """Another model, path, place or content has another name; why there is a border has no part in it."""
    tokens = TokenRun(1, TOKENS.ids, TOKENS.images)
    others = {"model": "other", "kind": "checkpoint", "parent": "ab", "tokens": tokens, "base": "ab"}
    fields = {"model": "model", "kind": "segment", "parent": "", "tokens": TOKENS, "boundary": "user"}
    assert BlobHead(**fields).name == HEAD.name  # type: ignore[arg-type]
    assert BlobHead(**(fields | {change: others[change]})).name != HEAD.name  # type: ignore[arg-type]


def test_images_count_by_their_content() -> None:
    """The same ids for another image are another name."""
    other = TokenRun(0, TOKENS.ids, (ImageSpan(1, 3, "dog"),))
    assert BlobHead("model", "segment", "", other, "system").name != HEAD.name


@given(st.integers(0, len(FILE) - 1), st.integers(1, 255))
def test_any_flipped_bit_shows(place: int, mask: int) -> None:
    """No byte may change, not even of the header or the checksum itself."""
    broken = bytearray(FILE)
    broken[place] ^= mask
    with pytest.raises(DamagedBlob):
        unpack_blob(broken, HEAD.name)


@given(st.integers(0, len(FILE) - 1))
def test_any_cut_shows(length: int) -> None:
    """Nor may one be missing."""
    with pytest.raises(DamagedBlob):
        unpack_blob(FILE[:length], HEAD.name)


def test_a_whole_file_under_another_name_shows() -> None:
    """A file that somebody renamed is not what its name says."""
    for check in (unpack_blob, read_head):
        with pytest.raises(DamagedBlob):
            check(FILE, BlobName("0" * 40))


@given(st.binary(max_size=200))
def test_rubbish_is_no_head(data: bytes) -> None:
    """What is no blob asks for more bytes or says that it is damaged; nothing else is raised."""
    try:
        assert not isinstance(read_head(data, HEAD.name), BlobHead)
    except DamagedBlob:
        return


def test_packing_copies_no_large_tensor() -> None:
    """Its buffer is itself among the parts."""
    data = bytearray(GATHERED_BYTES)
    parts = pack_blob(HEAD, "", [Tensor("U8", (8,), bytes(8)), Tensor("U8", (len(data),), data)])
    assert any(part is data for part in parts)


def test_small_tensors_make_few_parts() -> None:
    """Hundreds of them, small as those of a short message, are hashed and written in one go or two."""
    tensors = [Tensor("U8", (1024,), bytes([number % 251]) * 1024) for number in range(400)]
    parts = pack_blob(HEAD, "", tensors)
    assert len(parts) == 3  # 256 KiB, the rest, the digest
    assert unpack_blob(b"".join(parts), HEAD.name).tensors == tuple(tensors)


@given(st.lists(st.sampled_from([0, 1, 1000, GATHERED_BYTES - 1, GATHERED_BYTES, GATHERED_BYTES + 1]), max_size=6))
def test_a_blob_of_any_sizes_comes_back(sizes: list[int]) -> None:
    """Whatever was gathered and whatever was not."""
    tensors = tuple(Tensor("U8", (size,), bytes([number]) * size) for number, size in enumerate(sizes))
    data = b"".join(pack_blob(HEAD, "", tensors))
    assert unpack_blob(data, HEAD.name).tensors == tensors
