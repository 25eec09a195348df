"""The raw prompts that a model has read last, for whoever asks why the next one reused no more.

They have no messages, so they are known by their text; it knows no causes.
"""

import hashlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvserve.core import RequestId
from kvserve.explain.difference import common_length
from kvserve.sessions.seen import PACKED

MAX_PROMPTS = 32
MAX_BYTES = 16 * 2**20

SHORTEST_DIGESTED = 256
TELLING_CHARACTERS = 64
"""What fewer characters two prompts begin with says nothing of how they go on."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RawRecord:
    """One raw prompt and what was written to it: `text` and `packed_ids` (`pack_ids`) hold both, the prompt first.

    `owner`: whose it is. The prompt is the first `num_prompt_characters` of the text. `num_computed_tokens`: of a
    request whose client left, how many tokens were computed; None for a complete one.
    """

    request_id: RequestId
    owner: str
    text: str
    num_prompt_characters: int
    packed_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int | None = None

    @property
    def ids(self) -> Sequence[int]:
        """The model tokens, read-only and without a copy."""
        view: Sequence[int] = memoryview(self.packed_ids).cast(PACKED)
        return view

    @property
    def answer(self) -> str:
        """What was written to it."""
        return self.text[self.num_prompt_characters :]

    @property
    def num_bytes(self) -> int:
        """Bytes that Python holds for it, roughly."""
        return sys.getsizeof(self.text) + len(self.packed_ids)


class RawPrompts:
    """At most so many records and bytes, the oldest goes first. Safe for several threads."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._records: deque[RawRecord] = deque()
        self.num_bytes = 0

    def remember(self, record: RawRecord) -> None:
        """The model has read this; one that is larger than all may be is not kept."""
        with self._lock:
            self._records.append(record)
            self.num_bytes += record.num_bytes
            while len(self._records) > self._max_prompts or self.num_bytes > self._max_bytes:
                self.num_bytes -= self._records.popleft().num_bytes

    def nearest(self, text: str, owner: str, shown_by: Callable[[str], bool] | None = None) -> RawRecord | None:
        """The record of this owner that has most in common with the text at its beginning and least behind that, the
        newest among equals; None where none is known. `shown_by`: only one that the text repeats with its answer, if
        that answer passes: whoever was not given it cannot repeat it.

        Where next to nothing is common, as when a prompt's first word changes each time, the one of like length counts.
        """
        with self._lock:
            records = [record for record in self._records if record.owner == owner]
        if shown_by is not None:
            records = [record for record in records if text.startswith(record.text) and shown_by(record.answer)]

        def likeness(record: RawRecord) -> tuple[int, int]:
            num_common, length = common_length(record.text, text), len(record.text)
            return num_common, -length if num_common >= TELLING_CHARACTERS else -abs(length - len(text))

        return max(reversed(records), key=likeness, default=None)

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Forget what these owners sent."""
        with self._lock:
            self._records = deque(record for record in self._records if not is_gone(record.owner))
            self.num_bytes = sum(record.num_bytes for record in self._records)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._records.clear()
            self.num_bytes = 0


def text_digests(text: str, owner: str) -> list[bytes]:
    """Digests of a raw prompt's first 256, 512, 1,024 ... characters and, last, of all of it: prompts of one owner that
    begin alike share the first ones."""
    digests, start, end = [], 0, SHORTEST_DIGESTED
    digest = hashlib.sha256(b"raw prompt:" + owner.encode("utf-8", "surrogatepass") + b"\0")
    while start < len(text):
        digest.update(text[start:end].encode("utf-8", "surrogatepass"))
        digests.append(digest.digest())
        start, end = end, 2 * end
    return digests
