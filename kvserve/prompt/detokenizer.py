"""Decodes generated ids one at a time; the joined pieces equal the text of all ids decoded at once.

It knows the decoders of `tokenizer.json`, no templates, stop tokens or requests.
"""

import codecs
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import tokenizers

from kvserve.errors import ModelLoadError


class Detokenizer(Protocol):
    """Decodes one growing sequence of ids. Not thread-safe: one per sequence."""

    def add(self, token: int) -> str:
        """The text that `token` completes, "" while it may still change. Ids without a token have no text."""
        ...

    def finish(self) -> str:
        """The text held back; bytes that are not a character become U+FFFD. No token may be added afterwards."""
        ...


DecoderKind = Literal["bytes", "window"]

WINDOW_DECODERS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """How the tokenizer's decoder works: "bytes" for byte-level BPE, else by a window over the last tokens."""

    kind: DecoderKind
    has_byte_tokens: bool


def decoder_form(backend: tokenizers.Tokenizer) -> DecoderForm:
    """The form of the decoder in `tokenizer.json`.

    Raises ModelLoadError for a decoder whose text of a token depends on more than its neighbours.
    """
    parts = tuple(_parts(json.loads(backend.decoder.__getstate__()))) if backend.decoder is not None else ()
    types = [str(part.get("type")) for part in parts]
    if types == ["ByteLevel"]:
        return DecoderForm("bytes", has_byte_tokens=False)
    strips = [part for part in parts if part.get("type") == "Strip"]
    if types and WINDOW_DECODERS.issuperset(types) and all(part["stop"] == 0 and part["start"] <= 1 for part in strips):
        return DecoderForm("window", has_byte_tokens="ByteFallback" in types)
    raise ModelLoadError(
        f"The decoder in tokenizer.json ({', '.join(types) or 'none'}) cannot be streamed token by token. Use a model "
        f"whose tokenizer has a ByteLevel decoder or one made of {', '.join(sorted(WINDOW_DECODERS))}."
    )


def _parts(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    else:
        yield decoder


def make_detokenizer(backend: tokenizers.Tokenizer, form: DecoderForm, after: Sequence[int] = ()) -> Detokenizer:
    """A detokenizer for ids that follow the ids `after`: at the start of a text some decoders drop a leading space."""
    if form.kind == "bytes":
        return ByteDetokenizer(backend)
    return WindowDetokenizer(backend, has_byte_tokens=form.has_byte_tokens, after=after)


def token_bytes(backend: tokenizers.Tokenizer, form: DecoderForm, token: int) -> bytes:
    """A token's text inside a text, as UTF-8 that may begin or end inside a character; b"" without a token."""
    name = backend.id_to_token(token) if token >= 0 else None
    if name is None:
        return b""
    if form.kind == "bytes":
        return _token_bytes(name)
    if form.has_byte_tokens and _is_byte(name):
        return bytes([int(name[3:5], 16)])
    # At the start of a text some decoders drop a leading space: the second of two is inside one.
    once: str = backend.decode([token], skip_special_tokens=False)
    twice: str = backend.decode([token, token], skip_special_tokens=False)
    return twice[len(once) :].encode()


def _is_byte(name: str) -> bool:
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, the others for U+0100 and up (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


class ByteDetokenizer:
    """For byte-level BPE: each token is a run of bytes, the text is their UTF-8."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        name = self._backend.id_to_token(token) if token >= 0 else None
        return self._utf8.decode(_token_bytes(name)) if name is not None else ""

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def _token_bytes(name: str) -> bytes:
    """The bytes of a token; an added token with a character outside the alphabet stands for its own UTF-8."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in name])
    except KeyError:
        return name.encode()


class WindowDetokenizer:
    """For decoders where a token's text depends on whether it is the first, and on the byte tokens beside it.

    The newest tokens are decoded together with the one before them, whose own text is then cut off. A run of byte
    tokens (`<0xE2>`) is either valid as a whole or not at all, so it is held back until it ends.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, has_byte_tokens: bool, after: Sequence[int] = ()) -> None:
        self._backend = backend
        self._has_byte_tokens = has_byte_tokens
        self._pending: list[int] = []
        self._before: list[int] = []
        for token in reversed(after):
            name = backend.id_to_token(token)
            if name is not None and not self._is_byte(name):
                self._before = [token]
                break

    def add(self, token: int) -> str:
        name = self._backend.id_to_token(token) if token >= 0 else None
        if name is None:
            return ""
        self._pending.append(token)
        return "" if self._is_byte(name) else self.finish()

    def finish(self) -> str:
        if not self._pending:
            return ""
        known = self._backend.decode(self._before, skip_special_tokens=False)
        text: str = self._backend.decode(self._before + self._pending, skip_special_tokens=False)
        self._before, self._pending = self._pending[-1:], []
        return text[len(known) :]

    def _is_byte(self, name: str) -> bool:
        return self._has_byte_tokens and _is_byte(name)
