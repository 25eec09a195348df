"""Parses requests for log-probabilities and encodes them in OpenAI's three forms. This file knows fields and their
ranges; the engine computes the numbers (`engine/logits_processors.py`).

A token whose bytes are not whole characters is spelt as OpenAI spells it: each odd byte as `\\xf0`, in completions the
whole token after `bytes:`.
"""

from collections.abc import Sequence

from kvserve.core import ContentToken
from kvserve.errors import BadRequest
from kvserve.protocols.fields import Fields, flag, integer

type Wire = dict[str, object]

MAX_TOP_LOGPROBS = 20

LEAST_LOGPROB = -9999.0
"""OpenAI's value for minus infinity, which JSON lacks."""

RESPONSE_LOGPROBS = "message.output_text.logprobs"

_read_num_top = integer(0, MAX_TOP_LOGPROBS)


# --- requests --------------------------------------------------------------------------------------------------------


def read_chat_logprobs(fields: Fields) -> int | None:
    """The number of likeliest tokens to report; None without log-probabilities. Raises BadRequest."""
    return _num_top(fields, wanted=bool(fields.optional("logprobs", _read_flag)), needs="logprobs: true")


def read_completion_logprobs(fields: Fields) -> int | None:
    """The same for `logprobs: N`; 0 asks for the drawn tokens alone. Raises BadRequest."""
    value, _ = fields.locate("logprobs")
    return None if value is False else fields.optional("logprobs", _read_num_top)


def read_response_logprobs(fields: Fields, include: Sequence[str]) -> int | None:
    """The same for `include`. Raises BadRequest."""
    return _num_top(fields, wanted=RESPONSE_LOGPROBS in include, needs=f'include: ["{RESPONSE_LOGPROBS}"]')


def _read_flag(value: object, path: str) -> bool:
    """true or false; 0, which completions send, is false."""
    return False if value == 0 and not isinstance(value, bool) else flag(value, path)


def _num_top(fields: Fields, *, wanted: bool, needs: str) -> int | None:
    num_top = fields.optional("top_logprobs", _read_num_top) or 0
    if num_top and not wanted:
        _, path = fields.locate("top_logprobs")
        raise BadRequest(f"{path} needs {needs}.", param=path)
    return num_top if wanted else None


# --- answers ---------------------------------------------------------------------------------------------------------


def chat_logprobs(tokens: Sequence[ContentToken]) -> Wire:
    """`choices[].logprobs` of a chat: the content's tokens; `refusal` is always null."""
    return {"content": response_logprobs(tokens), "refusal": None}


def response_logprobs(tokens: Sequence[ContentToken]) -> list[Wire]:
    """Each token with its bytes and its likeliest alternatives, as in chats and in parts of responses."""
    return [
        {
            **_spelt(token.text_bytes, token.logprob),
            "top_logprobs": [_spelt(text_bytes, logprob) for text_bytes, logprob in token.top],
        }
        for token in tokens
    ]


def response_delta_logprobs(tokens: Sequence[ContentToken]) -> list[Wire]:
    """The same without bytes, as in the text events of responses."""
    return [
        {
            "token": _text(token.text_bytes),
            "logprob": _number(token.logprob),
            "top_logprobs": [{"token": _text(each), "logprob": _number(logprob)} for each, logprob in token.top],
        }
        for token in tokens
    ]


def completion_logprobs(tokens: Sequence[ContentToken]) -> Wire:
    """`choices[].logprobs` of a completion: one list per value; offsets count characters of the whole completion.

    Each token's alternatives include the drawn one, by text: of several tokens with one text the likeliest counts.
    """
    return {
        "tokens": [_legacy_text(token.text_bytes) for token in tokens],
        "token_logprobs": [_number(token.logprob) for token in tokens],
        "top_logprobs": [_legacy_top(token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _legacy_top(token: ContentToken) -> dict[str, float]:
    top: dict[str, float] = {}
    for text_bytes, logprob in (*token.top, (token.text_bytes, token.logprob)):
        top.setdefault(_legacy_text(text_bytes), _number(logprob))
    return top


def _spelt(text_bytes: bytes, logprob: float) -> Wire:
    return {"token": _text(text_bytes), "logprob": _number(logprob), "bytes": list(text_bytes)}


def _text(text_bytes: bytes) -> str:
    return text_bytes.decode("utf-8", "backslashreplace")


def _legacy_text(text_bytes: bytes) -> str:
    try:
        return text_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text_bytes)


def _number(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # also for NaN
