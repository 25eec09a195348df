"""What a request shows of where it comes from: that its client was given the answers which it sends back.

Clients without a session of their own share their records, so a path of messages that was found proves nothing: two
people may have said "hello". What the model wrote there does, if a client sends it back: it was told to nobody else.
It must be more than a model writes to everybody, or carry an id that only this server gave.
"""

from collections.abc import Callable, Iterable, Sequence

from kvserve.core import Message, TextBlock, ToolCallBlock, Written

MIN_ANSWER_CHARACTERS = 250
"""One answer of so many characters, white space aside, shows it: about fifty words. What a model writes to everybody is
shorter: greetings have up to 120, refusals with their reason as many, and the longest known answer to who it is 239.
That is a heuristic; a session or a call id is proof."""

type Wrote = Callable[[bytes], Written | None]
"""What the model wrote at a place of a conversation, None where it did not or where nobody knows."""

_MIN_ID_CHARACTERS = 16


def num_shown(messages: Sequence[Message], chains: Sequence[bytes], wrote: Wrote) -> int:
    """How many messages from the beginning this client was there for: up to and with the last answer that it sends
    back, if these show it. `chains[i]` is the place of message i, which all that stands before it is part of."""
    answers = {
        index: written.message
        for index, (message, place) in enumerate(zip(messages, chains, strict=True))
        if message.role == "assistant" and (written := wrote(place)) is not None
    }
    return max(answers) + 1 if answers and is_shown([messages[index] for index in answers], answers.values()) else 0


def is_shown(sent: Iterable[Message], wrote: Iterable[Message]) -> bool:
    """Whether a request that sends these answers back was given what the model wrote, which says the same: one of them
    says enough, or one of its calls has the id that it was given."""
    wrote = list(wrote)
    return any(map(is_telling, wrote)) or not _call_ids(sent).isdisjoint(_call_ids(wrote))


def is_telling(answer: Message) -> bool:
    """Whether an answer, as the model wrote it, says so much in its text and arguments that whoever sends it back was
    given it. Thinking, which many clients do not show, does not count."""
    return sum(map(_num_characters, _texts(answer))) >= MIN_ANSWER_CHARACTERS


def is_telling_text(text: str) -> bool:
    """The same of an answer without messages."""
    return _num_characters(text) >= MIN_ANSWER_CHARACTERS


def _call_ids(answers: Iterable[Message]) -> set[str]:
    """The ids of their calls that are too long to be guessed, as every client leaves them: some take out all but
    letters and digits."""
    calls = (block for answer in answers for block in answer.blocks if isinstance(block, ToolCallBlock))
    ids = ("".join(filter(str.isalnum, call.call_id)) for call in calls)
    return {call_id for call_id in ids if len(call_id) >= _MIN_ID_CHARACTERS}


def _texts(answer: Message) -> list[str]:
    said: list[str] = []
    for block in answer.blocks:
        match block:
            case TextBlock(text):
                said.append(text)
            case ToolCallBlock(arguments=arguments):
                said.append(arguments)
    return said


def _num_characters(text: str) -> int:
    return sum(map(len, text.split()))
