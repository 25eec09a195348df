"""Images where the model sees none: words stand in their place. It knows messages, not what an image shows.

A client cannot take an image out of its history, so a refusal would end the conversation; and an image left out unsaid
would blind the model to the question.
"""

from collections.abc import Iterable
from dataclasses import replace

from kvserve.core import Block, ImageBlock, Message, TextBlock, ToolResultBlock, Turn

_WORDS = "[An image that this model cannot see]"
UNSEEN = TextBlock(_WORDS)
"""The same for every image, so that the prompt of the next turn begins as this one did."""

_UNSEEN_OF_ASSISTANT = TextBlock(f"\n{_WORDS}\n")
"""On a line of its own: nothing goes between the pieces of an assistant's text."""


def without_images_seen(turn: Turn) -> Turn:
    """The turn with words for all images, and a note of how many there are. The same object where there are none."""
    num_images = _num_images(turn.messages)
    if not num_images:
        return turn
    note = f"the model sees no images: {num_images} of them stand in the prompt as words"
    return replace(turn, messages=tuple(unseen(message) for message in turn.messages), notes=(*turn.notes, note))


def unseen(message: Message) -> Message:
    """The message with words for its images, those in tool results too."""
    words = _UNSEEN_OF_ASSISTANT if message.role == "assistant" else UNSEEN
    return replace(message, blocks=tuple(_in_words(block, words) for block in message.blocks))


def _in_words(block: Block, words: TextBlock) -> Block:
    if isinstance(block, ToolResultBlock):
        return replace(block, blocks=tuple(UNSEEN if isinstance(part, ImageBlock) else part for part in block.blocks))
    return words if isinstance(block, ImageBlock) else block


def _num_images(messages: Iterable[Message]) -> int:
    """Every request asks this of its whole history, so it is one comprehension."""
    images = [
        None
        for message in messages
        for block in message.blocks
        for part in (block.blocks if isinstance(block, ToolResultBlock) else (block,))
        if isinstance(part, ImageBlock)
    ]
    return len(images)
