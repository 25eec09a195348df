"""The prompt of a turn: its history as the model saw and wrote it -> text -> model tokens; and what prompts begin with.

It joins what was recognised with how a model writes prompts. The engine hears nothing of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvserve.core import (
    Block,
    ImageBlock,
    ImageInput,
    Message,
    MessageStart,
    TextBlock,
    TokenSequence,
    ToolResultBlock,
    Turn,
    known_tools,
)
from kvserve.errors import BadRequest
from kvserve.identity.reading import RecognisedTurn
from kvserve.output.said import MessageReader
from kvserve.prompt.images_text import SEES_NOTHING, with_marks
from kvserve.prompt.images_unseen import without_images_seen
from kvserve.prompt.stitch import Stitched
from kvserve.prompt.template import PromptText
from kvserve.requests.served_model import ServedModel
from kvserve.requests.turn_facts import Prompt
from kvserve.sessions.seen import common_length

_NOBODY_SAYS = "\u2058"
"""Another user's words, to see where the system's end."""


def prompt_of(turn: Turn, reading: RecognisedTurn | None, served: ServedModel) -> Prompt:
    """What the model will see of a turn whose images were looked at; `reading` is None for a raw prompt. Raises
    BadRequest."""
    return _render(turn, reading, served) if reading is not None else _raw_prompt(turn, served)


def looked_at(turn: Turn, served: ServedModel) -> Turn:
    """The turn with its images named by what they show; to a model that sees none they are words."""
    return without_images_seen(turn) if served.images is None else served.images.look(turn)


def _render(turn: Turn, reading: RecognisedTurn, served: ServedModel) -> Prompt:
    """The turn as model tokens, its history as the model saw and wrote it."""
    text, stitched = readable(turn, reading, served)
    return Prompt(
        text=text.shown,
        tokens=TokenSequence(stitched.ids, stitched.images),
        opens_reasoning=text.opens_reasoning,
        continues=text.continues,
        message_starts=_message_starts(turn, reading, served, stitched),
        tail_ids=stitched.tail_ids,
        num_replayed_turns=stitched.num_replayed_turns,
        num_marked_tokens=_num_marked_tokens(turn, reading, served, stitched),
        notes=(*turn.notes, *_unserved(turn), *reading.notes, *text.notes),
        begun=text.begun,
    )


def _raw_prompt(turn: Turn, served: ServedModel) -> Prompt:
    """Text or token ids that go to the model as they are."""
    raw = turn.raw_prompt or ()
    ids = served.tokenizer.encode(raw, add_special_tokens=True) if isinstance(raw, str) else raw
    if not isinstance(raw, str) or served.may_lack_rows:
        _refuse_unknown(ids, served, "prompt")
    if not ids:
        raise BadRequest("The prompt is empty.", param="prompt")
    return Prompt(
        text=raw if isinstance(raw, str) else served.tokenizer.decode(ids),
        tokens=TokenSequence(ids),
        message_starts=served.markers.message_starts(ids),
    )


def _refuse_unknown(ids: Sequence[int], served: ServedModel, field: str) -> None:
    """Raises BadRequest for a token without a row in the model."""
    if (token := served.without_row(ids)) is not None:
        has_text = 0 <= token < served.tokenizer.vocab_size
        told = f"{served.tokenizer.decode([token])!r}, token {token}" if has_text else f"token {token}"
        raise BadRequest(f"The prompt holds {told}, which the model does not have.", param=field)


@dataclass(frozen=True, slots=True)
class SharedBeginning:
    """What several prompts begin with, and the messages that begin in it."""

    tokens: TokenSequence
    message_starts: tuple[MessageStart, ...]

    @classmethod
    def of(cls, prompt: TokenSequence, message_starts: Sequence[MessageStart], num_tokens: int) -> "SharedBeginning":
        """The first `num_tokens` tokens of a prompt, which end in no image."""
        return cls(
            TokenSequence(prompt.ids[:num_tokens], tuple(span for span in prompt.images if span.end <= num_tokens)),
            tuple(start for start in message_starts if start.offset < num_tokens),
        )

    def images_of(self, turn: Turn) -> tuple[ImageInput, ...]:
        """The images of a turn that are in it."""
        digests = frozenset(span.digest for span in self.tokens.images)
        return tuple(image for image in turn.images if image.facts.digest in digests)


def shared_beginning(turns: Sequence[Turn], served: ServedModel) -> SharedBeginning:
    """What the prompts of all these turns have in common, as `serve_turn` would write them now; their images were
    looked at, the engine hears nothing of it. Raises BadRequest, and ValueError for no turn."""
    stitched = [readable(turn, served.conversations.read(turn), served)[1] for turn in turns]
    if not stitched:
        raise ValueError("There is no prompt without a turn.")
    first = stitched[0]
    num_tokens = min([len(first.ids), *(common_length(first.ids, other.ids) for other in stitched[1:])])
    if (cut := next((span for span in first.images if span.start < num_tokens < span.end), None)) is not None:
        num_tokens = cut.start
    return SharedBeginning.of(TokenSequence(first.ids, first.images), first.message_starts, num_tokens)


def without_images(turn: Turn) -> Turn:
    """The turn without its images, those in tool results too."""

    def without(block: Block) -> Block:
        if not isinstance(block, ToolResultBlock):
            return block
        return replace(block, blocks=tuple(each for each in block.blocks if not isinstance(each, ImageBlock)))

    messages = (
        replace(message, blocks=tuple(without(block) for block in message.blocks if not isinstance(block, ImageBlock)))
        for message in turn.messages
    )
    return replace(turn, messages=tuple(messages), images=())


def _unserved(turn: Turn) -> tuple[str, ...]:
    names = ", ".join(turn.unserved_tools)
    return (f"not offered, for this server does not run them: {names}",) if names else ()


def _message_starts(
    turn: Turn, reading: RecognisedTurn, served: ServedModel, stitched: Stitched
) -> tuple[MessageStart, ...]:
    """Where messages begin, also those that the template writes into another one: there other prompts part from this
    one, and the beginning that they share is wanted."""
    starts = stitched.message_starts
    if len(reading.lasting) < len(reading.rendered):
        parting = _parting(turn, reading, served, stitched, reading.lasting)
        starts = (*starts, MessageStart(parting, is_user=False))
    first = reading.rendered[0]
    if first.role == "system" and len(reading.rendered) > 1 and starts and starts[0].is_user:
        end_of_system = _parting(turn, reading, served, stitched, _and_somebody(first))
        starts = (replace(starts[0], is_user=False), MessageStart(end_of_system, is_user=True), *starts[1:])
    if starts is stitched.message_starts:
        return starts
    return tuple(sorted(set(starts), key=lambda start: start.offset))


def _num_marked_tokens(turn: Turn, reading: RecognisedTurn, served: ServedModel, stitched: Stitched) -> int:
    """Tokens before the last place that the client marked for caching; 0 without one."""
    num_messages = turn.session.num_marked_messages
    if num_messages is None:
        return 0
    if num_messages >= len(reading.rendered):
        return len(stitched.ids) - len(stitched.tail_ids)
    return _parting(turn, reading, served, stitched, _and_somebody(*reading.rendered[:num_messages]))


def _and_somebody(*messages: Message) -> tuple[Message, ...]:
    """These messages, and another user's words behind them."""
    return (*messages, Message("user", (TextBlock(_NOBODY_SAYS),)))


def _parting(
    turn: Turn, reading: RecognisedTurn, served: ServedModel, stitched: Stitched, messages: tuple[Message, ...]
) -> int:
    """How many tokens the prompt has in common with that of other messages."""
    other = stitch(turn, replace(reading, rendered=messages), served)[1]
    return common_length(stitched.ids, other.ids)


def readable(turn: Turn, reading: RecognisedTurn, served: ServedModel) -> tuple[PromptText, Stitched]:
    """The text of a turn and its ids, for all of which the model has rows. Raises BadRequest."""
    text, stitched = stitch(turn, reading, served)
    if served.may_lack_rows:
        _refuse_unknown(stitched.ids, served, "messages")
    return text, stitched


def stitch(turn: Turn, reading: RecognisedTurn, served: ServedModel) -> tuple[PromptText, Stitched]:
    """The text of a turn and its ids."""
    preserve = turn.thinking.preserve
    tools = reading.tools if turn.tool_choice.mode != "none" else ()
    images = served.images
    text = served.template.write(
        with_marks(reading.rendered, SEES_NOTHING) if images is None else images.marked(reading.rendered),
        tools,
        thinking=served.is_thinking(turn),
        preserve_thinking=served.defaults.preserve_thinking if preserve is None else preserve,
        effort=turn.thinking.effort,
        template_arguments=turn.template_arguments,
        call_ids=_call_ids(reading, served),
    )
    if images is not None:
        text = images.worded(text, turn.images)
    called = known_tools(tools, reading.rendered) if turn.tool_choice.mode != "none" else ()
    return text, served.stitcher.tokens(
        text, reading.written_messages, MessageReader.under(served.output_format, called)
    )


def _call_ids(reading: RecognisedTurn, served: ServedModel) -> Mapping[str, str]:
    """By which ids the model knows the calls of a conversation."""
    if served.call_ids is None:
        return {}
    is_one_client = reading.identity.owner.is_one_client
    return served.call_ids.of(reading.rendered, reading.written_messages, is_one_client=is_one_client)
