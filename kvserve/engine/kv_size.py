"""How many bytes a row of so many tokens holds, in full precision and quantised: arithmetic, no arrays."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvSize:
    """Sizes of one row: `fixed` for windows and states, `per_token` in full precision, `per_packed_token` quantised.
    `slot_tokens` are places that its caches hold ahead, `copy_share` is the part of a batch that is there twice while a
    row joins, leaves or outgrows its places.

    A live row of more than `packed_from` tokens is quantised as a whole; None: never. What is kept of it for others is
    in full precision up to there.
    """

    fixed: int
    per_token: float
    per_packed_token: float = 0.0
    packed_from: int | None = None
    slot_tokens: int = 0
    copy_share: float = 0.0

    def token_bytes(self, num_tokens: int) -> float:
        """Bytes of each token of a live row that holds so many."""
        return self.per_packed_token if self._is_packed(num_tokens) else self.per_token

    def live(self, num_tokens: int) -> float:
        """Bytes of a live row with the places that it holds ahead, without padding."""
        return self.fixed + (num_tokens + self.slot_tokens) * self.token_bytes(num_tokens)

    def held(self, num_tokens: int) -> float:
        """Bytes of a row that has left its batch: no place is held ahead."""
        return self.fixed + num_tokens * self.token_bytes(num_tokens)

    def copied(self, num_bytes: float) -> float:
        """What of a batch of so many bytes is there twice at the most."""
        return self.copy_share * num_bytes

    def peak(self, num_tokens: int) -> float:
        """The most that a live row holds until it has so many tokens: while it is converted it is there twice."""
        if self.packed_from is None or not self._is_packed(num_tokens):
            return self.live(num_tokens)
        converting = (self.packed_from + self.slot_tokens) * self.per_token + self.packed_from * self.per_packed_token
        return self.fixed + max(converting, (num_tokens + self.slot_tokens) * self.per_packed_token)

    def kept(self, start: int, end: int) -> float:
        """Bytes that the tokens `[start, end)` take in the prefix cache, with a state at their end."""
        border = end if self.packed_from is None else min(max(start, self.packed_from), end)
        return self.fixed + (border - start) * self.per_token + (end - border) * self.per_packed_token

    def _is_packed(self, num_tokens: int) -> bool:
        return self.packed_from is not None and num_tokens > self.packed_from
