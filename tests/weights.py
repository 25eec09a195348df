"""A model's fingerprint as a test works it out: all files read, nothing remembered."""

from pathlib import Path

from kvserve.engine.census import census
from kvserve.engine.file_digest import file_digest, hash_piece, pieces
from kvserve.engine.fingerprint import libraries_of, model_fingerprint


def fingerprint_of(folder: Path) -> str:
    """What `ModelDigest` finds in a folder that nobody changes meanwhile."""
    digests = {
        path: file_digest(
            stamp.num_bytes, [hash_piece(each, lambda _: None) for each in pieces(folder / path, stamp.num_bytes)]
        )
        for path, stamp in census(folder).items()
    }
    return model_fingerprint(digests, libraries_of(folder))
