"""The model's thoughts as `encrypted_content`: text that a client which keeps nothing else gives back to us whole.

It is packed, not secret: the same client got the thoughts in clear. Pure functions over text.
"""

import base64
import binascii
import zlib

_MARK = "kvserve1."
_MAX_CHARACTERS = 64 * 2**20


def seal_reasoning(said: str) -> str:
    """The thoughts as one word of ASCII."""
    packed = zlib.compress(said.encode("utf-8", "surrogatepass"))
    return _MARK + base64.urlsafe_b64encode(packed).decode("ascii")


def unseal_reasoning(sealed: str) -> str:
    """The thoughts that were sealed here; "" for a word of another server, which cannot be read, or a broken one."""
    if not sealed.startswith(_MARK):
        return ""
    try:
        packed = base64.urlsafe_b64decode(sealed[len(_MARK) :].encode("ascii"))
        # a few bytes must not become gigabytes
        return zlib.decompressobj().decompress(packed, _MAX_CHARACTERS).decode("utf-8", "surrogatepass")
    except (UnicodeError, binascii.Error, zlib.error):
        return ""
