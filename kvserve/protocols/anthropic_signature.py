"""The signature of a thinking block: it carries the thinking itself, so that whoever echoes it needs no memory of ours.

A client may leave the text out of what it echoes, or never have got it (`display: omitted`); the text comes back from
the signature after a restart and on another machine too. It is no secret: the thinking is that of the user's own model.
"""

import base64
import hashlib

_MARK = "kv1"
_CHECK_BYTES = 9


def sign(text: str) -> str:
    """The signature of this thinking: equal for equal text, whenever and wherever it is made."""
    raw = text.encode("utf-8", "surrogatepass")
    return _MARK + base64.urlsafe_b64encode(_check(raw) + raw).decode("ascii")


def signed_text(signature: str) -> str | None:
    """The thinking that a signature was made of; None for what is not a signature of ours, or a damaged one."""
    if not signature.startswith(_MARK):
        return None
    try:
        packed = base64.b64decode(signature.removeprefix(_MARK), altchars=b"-_", validate=True)
        raw = packed[_CHECK_BYTES:]
        return raw.decode("utf-8", "surrogatepass") if packed[:_CHECK_BYTES] == _check(raw) else None
    except ValueError:  # base64's own error and bad UTF-8 are ValueErrors
        return None


def _check(raw: bytes) -> bytes:
    """Tells our signatures from others, and whole ones from damaged ones."""
    return hashlib.sha256(b"kvserve thinking" + raw).digest()[:_CHECK_BYTES]
