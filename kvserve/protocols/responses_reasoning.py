"""Packs the model's thoughts into `encrypted_content`, which a client sends back whole even if it keeps nothing else.

It is packed, not secret: the same client got the thoughts as text. Pure functions over text.
"""

import base64
import binascii
import zlib

_MARK = "kvserve1."
_MAX_CHARACTERS = 64 * 2**20


def seal_reasoning(said: str) -> str:
    """The thoughts as one ASCII word."""
    packed = zlib.compress(said.encode("utf-8", "surrogatepass"))
    return _MARK + base64.urlsafe_b64encode(packed).decode("ascii")


def unseal_reasoning(sealed: str) -> str:
    """The thoughts that this server packed; "" for another server's or a broken word."""
    if not sealed.startswith(_MARK):
        return ""
    try:
        packed = base64.urlsafe_b64decode(sealed[len(_MARK) :].encode("ascii"))
        # bounded: a few bytes could unpack to gigabytes
        return zlib.decompressobj().decompress(packed, _MAX_CHARACTERS).decode("utf-8", "surrogatepass")
    except (UnicodeError, binascii.Error, zlib.error):
        return ""
