"""A small file of rows below the cache folder: written whole or not at all, for its owner's eyes, and believed only
where it adds up. It knows nothing of what the rows say.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvserve.cache.disk_store import check_owner


class DamagedFile(Exception):
    """What is there was not written here as it stands."""


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """`format` is raised with what a row means; rows of another one are not read. `field`: the file's word for them."""

    path: Path
    format: int
    field: str

    def read(self) -> list[Any]:
        """The rows; none where there is no file, or none that this user may believe. Raises DamagedFile."""
        try:
            check_owner(self.path.parent)
            data = self.path.read_bytes()
        except OSError:
            return []
        try:
            held = json.loads(data)
            rows, is_known = held[self.field], held["format"] == self.format
            if held["check"] != _check(rows) or not isinstance(rows, list):
                raise DamagedFile("its checksum is another one")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise DamagedFile(str(error)) from None
        return rows if is_known else []

    def write(self, rows: Sequence[Any]) -> None:
        """Put these in the place of what is there. Raises OSError, and leaves what is there."""
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(folder)
        # nobody else's name: in two containers that share the folder both processes have the number 1
        descriptor, scratch = tempfile.mkstemp(prefix=f"{self.path.name}.", suffix=".part", dir=folder)
        try:
            with open(descriptor, "w") as file:
                json.dump({"format": self.format, "check": _check(rows), self.field: rows}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise


def _check(rows: object) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
