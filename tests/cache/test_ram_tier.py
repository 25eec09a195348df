"""The tier in memory."""

import pytest

from kvserve.cache.records import RecordId
from kvserve.cache.store import RamTier
from tests.cache.payloads import Rows


def test_bytes_are_those_of_what_is_held() -> None:
    """Put adds, drop takes away once, an unknown key is a miss."""
    tier, rows = RamTier(), Rows((1, 2, 3))
    tier.put(RecordId(1), rows)
    assert (tier.num_bytes, tier.get(RecordId(1)), tier.get(RecordId(2)), len(tier._payloads)) == (12, rows, None, 1)
    tier.drop(RecordId(1))
    tier.drop(RecordId(1))
    assert (tier.num_bytes, len(tier._payloads)) == (0, 0)


def test_a_key_is_given_once() -> None:
    """A payload never changes under its key."""
    tier = RamTier()
    tier.put(RecordId(1), Rows((1,)))
    with pytest.raises(ValueError, match="already"):
        tier.put(RecordId(1), Rows((2,)))
