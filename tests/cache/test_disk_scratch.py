"""Places in one file: no two blobs overlap, what is freed is used again, and a free tail is cut off."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvserve.cache.disk_blob import BlobName
from kvserve.cache.disk_scratch import ScratchStore

actions = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 50)), max_size=40)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(actions)
def test_blobs_keep_their_bytes(tmp_path: Path, todo: list[tuple[bool, int, int]]) -> None:
    """Against a plain dict: after each step every blob reads as it was written, and the file ends with the last one."""
    store, held = ScratchStore(tmp_path, "model"), dict[BlobName, bytes]()
    for number, (is_write, which, size) in enumerate(todo):
        name = BlobName(f"blob{which}")
        store.delete("model", name)
        held.pop(name, None)
        if is_write:
            data = bytes([number % 251]) * size
            assert store.write(name, [data[:3], memoryview(data)[3:]]) == size
            held[name] = data
        assert {each: bytes(store.read(each)) for each in held} == held
        assert {file.name: file.num_bytes for file in store.files()} == {each: len(held[each]) for each in held}
    for name in list(held):
        store.delete("model", name)
    assert store._end == 0
    store.close()


def test_what_is_not_there_is_missing(tmp_path: Path) -> None:
    """As in a folder."""
    store = ScratchStore(tmp_path, "model")
    with pytest.raises(FileNotFoundError):
        store.read(BlobName("x"))
    store.delete("model", BlobName("x"))
    store.close()
