"""Finds an earlier request of the same client other than by the path of its messages. Keeps digests, in RAM."""

import hashlib
from collections.abc import Iterable, Sequence

from kvserve.identity.reading import Identity
from kvserve.sessions.digest_lru import DigestLru, UnambiguousLru
from kvserve.sessions.seen import PACKED_BYTES, PathStep, TurnRecord

type _Given = tuple[bytes, bytes]
"""The conversation that an answer ended, and a digest of the whole prompt before the answer."""


class EarlierRequests:
    """Finds conversations of a session by their first words, those of clients that share records by the answers that
    they were given. Thread-safe."""

    def __init__(self) -> None:
        self._first_words: DigestLru[bytes] = DigestLru()
        self._answers: UnambiguousLru[_Given] = UnambiguousLru()

    def put(self, identity: Identity, steps: Sequence[PathStep], prompt: bytes) -> None:
        """Note a request, which was answered if the last step is the model's; `prompt` is all before the answer."""
        leaf = steps[-1]
        if identity.owner.is_one_client:
            self._first_words.put(_first_words(identity), leaf.chain)
        elif leaf.written is not None:
            for digest in (leaf.chain, _answers(identity)[-1]):
                self._answers.put(digest, _given(leaf.chain, prompt))

    def recall(self, records: Iterable[TurnRecord]) -> None:
        """Note the requests of these records, which an earlier process wrote."""
        for record in records:
            if record.leaf.written is not None:
                prompt = record.packed_ids[: record.num_prompt_tokens * PACKED_BYTES]
                self._answers.put(record.leaf.chain, _given(record.leaf.chain, prompt))

    def by_first_words(self, identity: Identity) -> bytes | None:
        """The conversation with the same first words, whatever its system prompt."""
        return self._first_words.find(_first_words(identity))

    def by_answers(self, identity: Identity) -> bytes | None:
        """The conversation of the request that was given the answers of this one, by its answers alone or with its
        messages."""
        given = self._answers.find([*_answers(identity), *identity.chains])
        return given[0] if given is not None else None

    def clear(self) -> None:
        """Drop all digests."""
        self._first_words.clear()
        self._answers.clear()


def _given(leaf: bytes, packed_prompt: bytes) -> _Given:
    return leaf, hashlib.sha256(packed_prompt).digest()


def _first_words(identity: Identity) -> list[bytes]:
    """Digests of the first user message, and of it with the answer to it."""
    said = [each for each in identity.canonical if each.message and each.message.role in ("user", "assistant")][:2]
    return [
        hashlib.sha256(b"".join([identity.owner.root, *(each.digest for each in said[:count])])).digest()
        for count in range(1, len(said) + 1)
    ]


def _answers(identity: Identity) -> list[bytes]:
    """For each answer a digest of all answers up to and with it."""
    digest, digests = hashlib.sha256(identity.owner.root), []
    for each in identity.canonical:
        if each.message is not None and each.message.role == "assistant":
            digest.update(each.digest)
            digests.append(digest.digest())
    return digests
