"""What a request shows of where it comes from: that its client was given the answers which it sends back.

Clients without a session of their own share their records, so a path of messages that was found proves nothing: two
people may have said "hello". What the model wrote there does, if a client sends it back: it was told to nobody else.
These must be more than a few words, which everybody would expect, or carry an id that only this server gave.
"""

from collections.abc import Callable, Iterable, Sequence

from kvserve.core import Message, TextBlock, ToolCallBlock, Written

MIN_BYTES = 40
"""Answers of so many bytes together, white space aside, show it: about eight words. Some stock greetings and refusals
have more."""

type Wrote = Callable[[bytes], Written | None]
"""What the model wrote at a place of a conversation, None where it did not or where nobody knows."""

_MIN_ID_CHARACTERS = 16


def num_shown(messages: Sequence[Message], chains: Sequence[bytes], wrote: Wrote) -> int:
    """How many messages from the beginning this client was there for: up to and with the last answer that it sends
    back, once these are enough. `chains[i]` is the place of message i."""
    num_bytes = num_messages = 0
    for index, (message, place) in enumerate(zip(messages, chains, strict=True)):
        written = wrote(place) if message.role == "assistant" else None
        if written is not None:
            num_bytes += MIN_BYTES if _has_given_id(message, written.message) else num_answer_bytes(written.message)
            num_messages = index + 1
    return num_messages if num_bytes >= MIN_BYTES else 0


def are_enough(answers: Iterable[Message]) -> bool:
    """Whether these answers, as the model wrote them, show who was given them."""
    return sum(map(num_answer_bytes, answers)) >= MIN_BYTES


def num_answer_bytes(message: Message) -> int:
    """What an answer says, in bytes of its text and calls; thinking, which many clients do not show, aside."""
    said: list[str] = []
    for block in message.blocks:
        match block:
            case TextBlock(text):
                said.append(text)
            case ToolCallBlock(_, name, arguments):
                said += (name, arguments)
    return sum(len(word.encode("utf-8", "surrogatepass")) for text in said for word in text.split())


def _has_given_id(echo: Message, wrote: Message) -> bool:
    """Whether a call has the id that the server gave it, or what a client made of that: some take out all but letters
    and digits."""
    given = {_plain(block.call_id) for block in wrote.blocks if isinstance(block, ToolCallBlock)}
    named = {_plain(block.call_id) for block in echo.blocks if isinstance(block, ToolCallBlock)}
    return any(len(each) >= _MIN_ID_CHARACTERS for each in given & named)


def _plain(call_id: str) -> str:
    return "".join(filter(str.isalnum, call_id))
