"""Payloads in RAM, by key. It knows keys and sizes, not prefixes."""

from kvserve.cache.records import Payload, RecordId


class RamTier:
    """Payloads by key. A payload never changes and keeps its key: what is trimmed or merged gets a new record."""

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
