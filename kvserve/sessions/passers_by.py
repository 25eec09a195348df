"""What requests said and were given that leave no record: digests only, for as long as the process lives."""

from collections import OrderedDict

MAX_DIGESTS = 8_192


class PassersBy:
    """What was meant, and written by the model, at places of conversations: at most `max_digests`, the longest unused
    go first. Used under the turn store's lock.

    Of such a request nothing is kept, so nothing of it can be put back. But what another client is known to have said
    at the same place may be what this one left out: nobody knows whose words its next request would get.
    """

    def __init__(self, max_digests: int = MAX_DIGESTS) -> None:
        self._max_digests = max_digests
        self._digests: OrderedDict[tuple[str, bytes], bytes | None] = OrderedDict()

    def put(self, chain: bytes, meaning: bytes, said: bytes | None) -> None:
        """Somebody said this here; `said` is a digest of what the model wrote, None where it did not."""
        self._put(("meaning", chain), meaning)
        if said is not None:
            self._put(("said", chain), said)

    def meant_otherwise(self, chain: bytes, meaning: bytes) -> bool:
        """Whether somebody said something else here that looks the same when it is sent again."""
        return self._digests.get(("meaning", chain), meaning) != meaning

    def was_given_otherwise(self, chain: bytes, said: bytes) -> bool:
        """Whether the model wrote something else here that looks the same when it is sent back."""
        return self._digests.get(("said", chain), said) != said

    def clear(self) -> None:
        """Forget everything."""
        self._digests.clear()

    def _put(self, key: tuple[str, bytes], digest: bytes) -> None:
        if self._digests.setdefault(key, digest) != digest:
            self._digests[key] = None  # several
        self._digests.move_to_end(key)
        while len(self._digests) > self._max_digests:
            self._digests.popitem(last=False)
