"""Which fields of a body the parsers of OpenAI's endpoints look up, found out by watching them. It knows no field.

Tests that list fields compare their lists with this, so that a field that is new cannot be forgotten in them.
"""

import re
from collections.abc import Callable

import pytest

from kvserve.core import RequestDefaults, RequestId, SamplingParams
from kvserve.protocols.fields import Fields, Reader, child_path
from kvserve.protocols.openai_chat import parse_chat
from kvserve.protocols.openai_completions import parse_completion
from kvserve.protocols.openai_messages import ROLES
from kvserve.protocols.session import ID_FIELDS, ID_HEADERS

DEFAULTS = RequestDefaults(SamplingParams(), max_tokens=16, thinking=True, preserve_thinking=True)
_OF_HEADERS = frozenset(ID_HEADERS) - frozenset(ID_FIELDS)
"""Looked up in the same way, in another place."""


def chat_fields() -> set[str]:
    """Of `/v1/chat/completions`: those at the top level, and those of messages of every role as `messages[].name`."""
    messages = [{"role": role, "content": "x"} for role in ROLES]
    return _looked_up(lambda: parse_chat({"messages": messages}, {}, DEFAULTS, RequestId("r")))


def completion_fields() -> set[str]:
    """Of `/v1/completions`, at the top level."""
    return _looked_up(lambda: parse_completion({"prompt": "x"}, {}, DEFAULTS, RequestId("r")))


def without_indices(path: str) -> str:
    """`messages[3].name` -> `messages[].name`."""
    return re.sub(r"\[\d+\]", "[]", path)


def _looked_up(parse: Callable[[], object]) -> set[str]:
    names: set[str] = set()
    locate, optional = Fields.locate, Fields.optional

    def note(fields: Fields, key: str) -> None:
        if re.fullmatch(r"(messages\[\d+\])?", fields.path):
            names.add(without_indices(child_path(fields.path, key)))

    def noting_locate(self: Fields, key: str) -> tuple[object, str]:
        note(self, key)
        return locate(self, key)

    def noting_optional[T](self: Fields, key: str, reader: Reader[T]) -> T | None:
        note(self, key)  # a missing field is not located
        return optional(self, key, reader)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fields, "locate", noting_locate)
        patch.setattr(Fields, "optional", noting_optional)
        parse()
    return names - _OF_HEADERS
