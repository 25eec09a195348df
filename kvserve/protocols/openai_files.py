"""Files in OpenAI's messages -> text. Knows where a file stands in a part and how its bytes are written, and reads text
only: other documents would be guessed at, and what was uploaded elsewhere is not here.
"""

import base64
import re

from kvserve.core import TextBlock
from kvserve.errors import BadRequest
from kvserve.protocols.fields import Fields, child_path, filled_text, mapping, text

_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_ELSEWHERE = ("file_id", "file_url")


def read_file_part(part: Fields) -> TextBlock:
    """The file of a `file` part, as chat/completions has it. Raises BadRequest."""
    return read_input_file(part.required("file", mapping))


def read_input_file(part: Fields) -> TextBlock:
    """`file_data`, a data URL or plain base64, as the text that it holds, below `filename` if there is one. Raises
    BadRequest."""
    for elsewhere in _ELSEWHERE:
        if part.values.get("file_data") is None and part.optional(elsewhere, text) is not None:
            raise _refused(part, elsewhere, "no files are fetched: send the text, or the bytes as file_data")
    said = _DATA_URL.sub("", part.required("file_data", filled_text), count=1)
    try:
        content = base64.b64decode(said, validate=True).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_text(part) from error
    except ValueError as error:  # binascii's own error is one too
        raise _refused(part, "file_data", f"expected base64 or a data URL with it ({error})") from error
    if "\0" in content:
        raise _not_text(part)
    name = part.optional("filename", text)
    return TextBlock("\n".join(line for line in (name, content) if line))


def _not_text(part: Fields) -> BadRequest:
    return _refused(part, "file_data", "only files of UTF-8 text are read; send the text of other documents")


def _refused(part: Fields, name: str, why: str) -> BadRequest:
    path = child_path(part.path, name)
    return BadRequest(f"{path}: {why}.", param=path)
