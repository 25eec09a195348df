"""Packs thinking into one ASCII word that a client sends back: the signature of Anthropic's blocks, the
`encrypted_content` of responses. An echo needs no record of ours, also after a restart and on another machine.

A client may leave the text out of its echo, or never have received it (`display: omitted`). Neither word is secret: the
thinking is of the user's own model. Pure functions over text.
"""

import base64
import binascii
import hashlib
import zlib

_SIGNATURE_MARK = "kv1"
_CHECK_BYTES = 9


def sign(text: str) -> str:
    """The signature of this thinking; equal text always has an equal signature."""
    raw = text.encode("utf-8", "surrogatepass")
    return _SIGNATURE_MARK + base64.urlsafe_b64encode(_check(raw) + raw).decode("ascii")


def signed_text(signature: str) -> str | None:
    """The thinking in a signature; None for a foreign or damaged signature."""
    if not signature.startswith(_SIGNATURE_MARK):
        return None
    try:
        packed = base64.b64decode(signature.removeprefix(_SIGNATURE_MARK), altchars=b"-_", validate=True)
        raw = packed[_CHECK_BYTES:]
        return raw.decode("utf-8", "surrogatepass") if packed[:_CHECK_BYTES] == _check(raw) else None
    except ValueError:  # base64's own error and bad UTF-8 are ValueErrors
        return None


def _check(raw: bytes) -> bytes:
    """A checksum that foreign and damaged signatures fail."""
    return hashlib.sha256(b"kvserve thinking" + raw).digest()[:_CHECK_BYTES]


# --- encrypted_content of responses ----------------------------------------------------------------------------------


_SEAL_MARK = "kvserve1."
_MAX_CHARACTERS = 64 * 2**20


def seal_reasoning(said: str) -> str:
    """The thoughts as one ASCII word."""
    packed = zlib.compress(said.encode("utf-8", "surrogatepass"))
    return _SEAL_MARK + base64.urlsafe_b64encode(packed).decode("ascii")


def unseal_reasoning(sealed: str) -> str:
    """The thoughts that this server packed; "" for another server's or a broken word."""
    if not sealed.startswith(_SEAL_MARK):
        return ""
    try:
        packed = base64.urlsafe_b64decode(sealed[len(_SEAL_MARK) :].encode("ascii"))
        # bounded: a few bytes could unpack to gigabytes
        return zlib.decompressobj().decompress(packed, _MAX_CHARACTERS).decode("utf-8", "surrogatepass")
    except (UnicodeError, binascii.Error, zlib.error):
        return ""
