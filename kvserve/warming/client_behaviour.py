"""What a client does to its history between two requests: learned from two of them, and the history that follows.

    before   s - u - carrier - (answer)        after `learn`: the carrier leaves, thinking is stripped, ...
    now      s - u - answer - result           `history_after` the next answer: what the next request begins with

It knows messages and what they are known by, which is handed in; neither rules nor rendering. Nothing here changes what
a model reads: a wrong guess is KV that nobody asks for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvserve.core import Block, Message, Role, TextBlock, ThinkingBlock

OPENING_CHARS = 24
MAX_OPENINGS = 8
MAX_GONE = 4
"""So many messages at the end of a request may be gone from the next one."""

MAX_GLUED_CHARS = 16_384

type Opening = tuple[Role, str]
"""Who said a message and how it begins: synthetic ones begin alike."""


@dataclass(frozen=True, slots=True)
class Habits:
    """What was seen of a client, the newest sight last.

    `leaves`: by their opening, messages at the end of a request that the next one had not (True) or had after all;
    `num_gone`: how many were gone the last time. `is_rewritten`: the newest user's message came back in other words,
    less the text `glued` before and behind it where that is all. Of answers: whether thinking comes back, text without
    the white space around it, calls under other ids.
    """

    leaves: tuple[tuple[Opening, bool], ...] = ()
    num_gone: int = 0
    is_rewritten: bool = False
    glued: tuple[str, str] = ("", "")
    keeps_thinking: bool = True
    trims_text: bool = False
    renames_calls: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """How the next request begins: the `messages` up to the answer, and what it will have at its end again (`carried`,
    in the words of the last one)."""

    messages: tuple[Message, ...]
    carried: tuple[Message, ...]


def learn(
    known: Habits,
    asked: Sequence[Message],
    answer: Message,
    now: Sequence[Message],
    identity: Callable[[Message], bytes],
) -> Habits:
    """What a request shows of the one before it, which `asked` this and got this `answer`. `identity` names a message
    less what is volatile. Where the answer is not found in its place nothing is learned."""
    place = place_of(answer, asked, now, identity)
    if place is None:
        return known
    habits = _with_echo(known, answer, now[place])
    gone, last = asked[place:], asked[place - 1] if place else None
    stayed = last if not gone and last is not None and last.role == "user" else None
    habits = replace(habits, leaves=_leaves(known, gone, stayed, identity), num_gone=len(gone))
    if stayed is None or last is None:
        return habits
    if identity(last) == identity(now[place - 1]):
        return replace(habits, is_rewritten=False, glued=("", ""))
    return replace(habits, is_rewritten=True, glued=_glued(last, now[place - 1]))


def history_after(
    habits: Habits, asked: Sequence[Message], answer: Message, is_synthetic: Callable[[Message], bool]
) -> History | None:
    """How the request after this one begins, as far as it is known; None where only its beginning is that the model
    has read already. `is_synthetic`: messages that clients take back, as long as nothing else was seen."""
    kept = list(asked)
    carried: list[Message] = []
    while len(kept) > 1 and len(carried) < MAX_GONE and _is_leaving(habits, kept, len(carried), is_synthetic):
        carried.insert(0, kept.pop())
    if habits.is_rewritten and kept[-1].role == "user":
        unglued = _unglued(kept[-1], habits.glued)
        if unglued is None:
            return None
        kept[-1] = unglued
    return History((*kept, echoed(habits, answer)), tuple(carried))


def echoed(habits: Habits, answer: Message) -> Message:
    """The answer as the client sends it back."""
    blocks: list[Block] = []
    for block in answer.blocks:
        if isinstance(block, ThinkingBlock) and not habits.keeps_thinking:
            continue
        blocks.append(TextBlock(block.text.strip()) if habits.trims_text and isinstance(block, TextBlock) else block)
    return replace(answer, blocks=tuple(blocks))


# --- messages that leave ---------------------------------------------------------------------------------------------


def place_of(
    answer: Message, asked: Sequence[Message], now: Sequence[Message], identity: Callable[[Message], bytes]
) -> int | None:
    """Where in `now` the answer stands, behind all that was asked or in the place of messages that are gone; None where
    it does not."""
    named = identity(answer)
    for place in range(min(len(asked), len(now) - 1), max(0, len(asked) - MAX_GONE) - 1, -1):
        if now[place].role != "assistant" or identity(now[place]) != named:
            continue
        if place == len(asked) or (place and identity(now[place - 1]) == identity(asked[place - 1])):
            return place
    return None


def _leaves(
    known: Habits, gone: Sequence[Message], stayed: Message | None, identity: Callable[[Message], bytes]
) -> tuple[tuple[Opening, bool], ...]:
    """What is known of openings now; that one stayed is noted only where it would be thought to leave."""
    verdicts = dict(known.leaves)
    seen = [(_opening(message), True) for message in gone]
    if stayed is not None and (_opening(stayed) in verdicts or known.num_gone or not identity(stayed)):
        seen.append((_opening(stayed), False))
    for opening, leaves in seen:
        verdicts.pop(opening, None)
        verdicts[opening] = leaves
    return tuple(verdicts.items())[-MAX_OPENINGS:]


def _is_leaving(
    habits: Habits, kept: Sequence[Message], num_gone: int, is_synthetic: Callable[[Message], bool]
) -> bool:
    """Whether the last of these messages will be gone: as one was that began like it, else as one in its place was
    (behind another one of the user or a tool: a person's words follow an answer)."""
    message, before = kept[-1], kept[-2]
    if message.role != "user":
        return False
    verdict = dict(habits.leaves).get(_opening(message))
    if verdict is not None:
        return verdict
    return is_synthetic(message) or (num_gone < habits.num_gone and before.role in ("user", "tool"))


def _opening(message: Message) -> Opening:
    text = next((block.text for block in message.blocks if isinstance(block, TextBlock)), "")
    return message.role, text[:OPENING_CHARS]


# --- messages that come back changed ---------------------------------------------------------------------------------


def _with_echo(known: Habits, answer: Message, echo: Message) -> Habits:
    """What the echo of an answer shows; what the answer has not got shows nothing."""
    if any(isinstance(block, ThinkingBlock) for block in answer.blocks):
        known = replace(known, keeps_thinking=any(isinstance(block, ThinkingBlock) for block in echo.blocks))
    said, again = answer.text, echo.text
    if said != said.strip():
        known = replace(known, trims_text=again == said.strip())
    if answer.calls:
        ids, own_ids = ([call.call_id for call in message.calls] for message in (answer, echo))
        known = replace(known, renames_calls=ids != own_ids)
    return known


def _glued(before: Message, now: Message) -> tuple[str, str]:
    """What stood before and behind the words that came back; nothing where they are other words."""
    if len(before.blocks) != 1 or len(now.blocks) != 1:
        return "", ""
    [said], [again] = before.blocks, now.blocks
    if not isinstance(said, TextBlock) or not isinstance(again, TextBlock) or not again.text:
        return "", ""
    start = said.text.find(again.text)
    if start < 0 or len(said.text) - len(again.text) > MAX_GLUED_CHARS:
        return "", ""
    return said.text[:start], said.text[start + len(again.text) :]


def _unglued(message: Message, glued: tuple[str, str]) -> Message | None:
    """The message without what is glued to it; None where nothing is, or something else."""
    before, behind = glued
    if not (before or behind) or len(message.blocks) != 1:
        return None
    [block] = message.blocks
    if not isinstance(block, TextBlock) or len(block.text) <= len(before) + len(behind):
        return None
    if not (block.text.startswith(before) and block.text.endswith(behind)):
        return None
    return replace(message, blocks=(replace(block, text=block.text[len(before) : len(block.text) - len(behind)]),))
