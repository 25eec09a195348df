"""Where words are still held: in files below a folder, and in whatever can be reached from an object."""

import gc
import types
from array import array
from collections import deque
from contextlib import suppress
from pathlib import Path

PASSED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType, types.CodeType)
"""What leads to the whole program and holds nobody's words."""


def files_with(folder: Path, *words: bytes) -> list[Path]:
    """The files that hold one of these bytes."""
    found = []
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError, IsADirectoryError):  # one that is being written has another name meanwhile
            if any(word in file.read_bytes() for word in words):
                found.append(file)
    return found


def values_with(root: object, *words: str) -> list[str]:
    """The texts and bytes that can be reached from an object and hold one of these words."""
    sought = [word.encode() for word in words]
    seen, todo, found = {id(root)}, deque([root]), []
    while todo:
        value = todo.popleft()
        if isinstance(value, str | bytes | bytearray | array):
            held = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
            if any(word in held for word in sought):
                found.append(held[:200].decode(errors="replace"))
            continue
        for inner in gc.get_referents(value):
            if id(inner) not in seen and not isinstance(inner, PASSED):
                seen.add(id(inner))
                todo.append(inner)
    return found
