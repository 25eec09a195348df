"""Signs thinking blocks. A signature holds the whole thinking, so that an echoed block needs no record of ours.

A client may leave the text out of its echo, or never have received it (`display: omitted`); the signature restores the
text, also after a restart and on another machine. It is not encrypted: the thinking is of the user's own model.
"""

import base64
import hashlib

_MARK = "kv1"
_CHECK_BYTES = 9


def sign(text: str) -> str:
    """The signature of this thinking; equal text always has an equal signature."""
    raw = text.encode("utf-8", "surrogatepass")
    return _MARK + base64.urlsafe_b64encode(_check(raw) + raw).decode("ascii")


def signed_text(signature: str) -> str | None:
    """The thinking in a signature; None for a foreign or damaged signature."""
    if not signature.startswith(_MARK):
        return None
    try:
        packed = base64.b64decode(signature.removeprefix(_MARK), altchars=b"-_", validate=True)
        raw = packed[_CHECK_BYTES:]
        return raw.decode("utf-8", "surrogatepass") if packed[:_CHECK_BYTES] == _check(raw) else None
    except ValueError:  # base64's own error and bad UTF-8 are ValueErrors
        return None


def _check(raw: bytes) -> bytes:
    """A checksum that foreign and damaged signatures fail."""
    return hashlib.sha256(b"kvserve thinking" + raw).digest()[:_CHECK_BYTES]
