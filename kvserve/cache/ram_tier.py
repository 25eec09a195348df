"""Where payloads live: the contract of a tier, and the one in memory. It knows keys and sizes, not prefixes."""

from typing import Protocol

from kvserve.cache.records import Payload, RecordId


class Tier(Protocol):
    """A place for payloads. A node lives in the index as long as some tier holds what it needs.

    A tier never changes a payload and holds it under one key for ever: what is trimmed or merged is a new record.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        ...

    def put(self, record_id: RecordId, payload: Payload) -> None:
        """Hold a payload under a key that is new."""
        ...

    def get(self, record_id: RecordId) -> Payload | None:
        """The payload, or None where it is not held or cannot be read: a miss, never an error."""
        ...

    def drop(self, record_id: RecordId) -> None:
        """Forget a payload; nothing happens if it is not held."""
        ...


class RamTier:
    """Payloads in memory. `num_bytes` changes in `put` and `drop` only."""

    def __init__(self) -> None:
        self._payloads: dict[RecordId, Payload] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._payloads)

    def put(self, record_id: RecordId, payload: Payload) -> None:
        """Hold a payload. Raises ValueError for a key that is taken."""
        if record_id in self._payloads:
            raise ValueError(f"Record {record_id} is held already.")
        self._payloads[record_id] = payload
        self._num_bytes += payload.num_bytes

    def get(self, record_id: RecordId) -> Payload | None:
        return self._payloads.get(record_id)

    def drop(self, record_id: RecordId) -> None:
        payload = self._payloads.pop(record_id, None)
        if payload is not None:
            self._num_bytes -= payload.num_bytes
