"""What `cache_control` says: up to which message the prompt is to be kept, and for how long. It knows field names only.

A mark may stand on tools, on blocks of the system text, on blocks of messages, or on the request itself, which means
its last message. Of several marks the last place and the longest time count: what is kept up to there serves them all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvserve.core import JsonObject, Message
from kvserve.protocols.anthropic_content import wire_blocks
from kvserve.protocols.fields import Fields, mapping, text, word
from kvserve.protocols.session import read_ttl

DEFAULT_TTL = "5m"


@dataclass(frozen=True, slots=True)
class CacheMarks:
    """The last mark stands behind `num_messages` messages (None: there is none); `ttl_seconds` is the longest asked
    for."""

    num_messages: int | None = None
    ttl_seconds: float | None = None


def read_cache_marks(body: JsonObject, system: Sequence[Message], messages: Sequence[Sequence[Message]]) -> CacheMarks:
    """The marks of a body whose `tools`, `system` and `messages` were read; `messages` are those of each wire message.

    Raises BadRequest for a mistyped mark.
    """
    places: list[int] = []
    seconds: list[float] = []
    for num_messages, holder in _holders(body, system, messages):
        ttl_seconds = holder.optional("cache_control", _read_mark)
        if ttl_seconds is not None:
            places.append(num_messages)
            seconds.append(ttl_seconds)
    return CacheMarks(max(places), max(seconds)) if places else CacheMarks()


def _holders(
    body: JsonObject, system: Sequence[Message], messages: Sequence[Sequence[Message]]
) -> Iterator[tuple[int, Fields]]:
    """Whatever may carry a mark, with the number of messages up to it."""
    num_messages = len(system)
    for key in ("tools", "system"):
        for index, block in enumerate(wire_blocks(body.get(key))):
            yield num_messages, Fields(block, f"{key}[{index}]")
    sent = body.get("messages")
    for number, message in enumerate(sent if isinstance(sent, list | tuple) else ()):
        num_messages += len(messages[number])
        for block in wire_blocks(message.get("content")):
            yield num_messages, Fields(block, f"messages[{number}].content")
    yield num_messages, Fields(body)


def _read_mark(value: object, path: str) -> float:
    """Seconds: 5 minutes unless the mark says otherwise."""
    mark = mapping(value, path)
    mark.required("type", word("ephemeral"))
    mark.optional("scope", text)
    ttl = mark.optional("ttl", read_ttl)
    return read_ttl(DEFAULT_TTL, path) if ttl is None else ttl
