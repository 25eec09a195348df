"""Files in OpenAI's messages -> text. Knows where a file stands in a part and how its bytes are written, and reads text
only: other documents would be guessed at, and what was uploaded elsewhere is not here. The model learns the name.
"""

import base64
import re

from kvserve.core import TextBlock
from kvserve.errors import BadRequest
from kvserve.protocols.fields import Fields, child_path, filled_text, mapping, text
from kvserve.protocols.placeholders import NOT_READ, words

_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_ELSEWHERE = ("file_id", "file_url")


def read_file_part(part: Fields) -> TextBlock:
    """The file of a `file` part, as chat/completions has it. Raises BadRequest."""
    return read_input_file(part.required("file", mapping))


def read_input_file(part: Fields) -> TextBlock:
    """`file_data`, a data URL or plain base64, as the text that it holds, below `filename` if there is one; words for a
    file that is not here or holds no text. Raises BadRequest."""
    name = part.optional("filename", text)
    if part.values.get("file_data") is None and any(part.optional(place, text) for place in _ELSEWHERE):
        return _unread(part)
    said = _DATA_URL.sub("", part.required("file_data", filled_text), count=1)
    try:
        content = base64.b64decode(said, validate=True).decode("utf-8-sig")
    except UnicodeDecodeError:
        return _unread(part)
    except ValueError as error:  # binascii's own error is one too
        path = child_path(part.path, "file_data")
        raise BadRequest(f"{path}: expected base64 or a data URL with it ({error}).", param=path) from error
    if "\0" in content:
        return _unread(part)
    return TextBlock("\n".join(line for line in (name, content) if line))


def _unread(part: Fields) -> TextBlock:
    told = {name: part.values.get(name) for name in ("filename", "file_url")}
    return TextBlock(words(Fields({"type": "file", **told}, part.path), NOT_READ))
