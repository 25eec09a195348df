"""Replaces images by words for a model without vision. It knows messages, not what an image shows.

A client cannot take an image out of its history, so a refusal would end the conversation; and without words the model
could not understand the question.
"""

from collections.abc import Iterable
from dataclasses import replace

from kvserve.core import Block, ImageBlock, Message, TextBlock, ToolResultBlock, Turn

_WORDS = "[An image that this model cannot see]"
UNSEEN = TextBlock(_WORDS, is_ours=True)
"""The same for every image, so that the next turn's prompt begins with this one's."""

_UNSEEN_OF_ASSISTANT = TextBlock(f"\n{_WORDS}\n", is_ours=True)
"""On its own line, apart from the pieces of an assistant's text."""


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
    """The number of images. Every request counts its whole history, so it is one comprehension."""
    images = [
        None
        for message in messages
        for block in message.blocks
        for part in (block.blocks if isinstance(block, ToolResultBlock) else (block,))
        if isinstance(part, ImageBlock)
    ]
    return len(images)
