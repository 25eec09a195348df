"""Computes the identity of a message: its canonical form and digest. Pure; it does not decide what the model reads."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from kvserve.canonical.message_layout import Layout, canonical_blocks, is_dropped, lay_out
from kvserve.canonical.rule import RuleSet
from kvserve.canonical.rules import DEFAULT_RULES
from kvserve.canonical.spans import meaning_text
from kvserve.core import (
    Block,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolBlock,
    ToolCallBlock,
    ToolResultBlock,
    ToolSpec,
)

_FORMAT = b"kvserve canonical 1"
"""Part of every digest, so that stored digests of an older form do not match."""

_MAX_SHORTENING = 0.1


@dataclass(frozen=True, slots=True)
class Canonical:
    """The identity of a message.

    `message` is None for a message without identity, which leaves the chain unchanged. `digest` is of the canonical
    form. `meaning` differs from it only if a rule took out a whole span: it also distinguishes what the client may
    leave out, such as the sender. `wording` differs from that if such a span has volatile parts that may come back: it
    distinguishes every word that the client may have sent once. `fired`: the rules that changed something.
    """

    message: Message | None
    digest: bytes
    meaning: bytes
    fired: frozenset[str]
    wording: bytes = b""


def canonicalise(message: Message, rules: RuleSet = DEFAULT_RULES) -> Canonical:
    """The identity of `message`, which is not changed. Digests have 32 bytes; b"" for a message without identity."""
    layout = lay_out(message, rules)
    blocks = canonical_blocks(layout)
    canonical = message if blocks == message.blocks else Message(message.role, blocks, message.name)
    fired = frozenset([name for part in layout for name in part.fired])
    # the rest without the spans may have no identity either
    if (rule := is_dropped(message, rules) or is_dropped(canonical, rules)) is not None:
        return Canonical(None, b"", b"", fired | {rule})
    digest = meaning = _digest(canonical)
    if any(span.canonical != span.meaning for part in layout for span in part.spans) or not rules.tells_images_apart:
        meaning = _digest(Message(message.role, _meaning_blocks(layout), message.name))
    volatile = [each for part in layout for span in part.spans for each in span.volatile]
    hidden = [word for name, value in volatile if value and rules.is_hidden(name) for word in (name, value)]
    wording = hashlib.sha256(meaning + _joined(hidden)).digest() if hidden else meaning
    return Canonical(canonical, digest, meaning, fired, wording)


def chain(root: bytes, messages: Iterable[Canonical]) -> tuple[bytes, ...]:
    """SHA-256 of the chain so far and the digest, per message; a message without identity repeats the last value.

    Equal values mean equal canonical histories under an equal `root`.
    """
    links: list[bytes] = []
    last = hashlib.sha256(_FORMAT + root).digest()
    for canonical in messages:
        if canonical.message is not None:
            last = hashlib.sha256(last + canonical.digest).digest()
        links.append(last)
    return tuple(links)


def canonical_tools(tools: Sequence[ToolSpec], rules: RuleSet = DEFAULT_RULES) -> bytes:
    """The digest of a set of tools in any order; of the list in its order if that rule is switched off."""
    digests = list(map(tool_digest, tools))
    ordered = sorted(digests) if "tools_order" in rules else digests
    return hashlib.sha256(_FORMAT + b"".join(ordered)).digest()


def tool_digest(tool: ToolSpec) -> bytes:
    """The digest of everything that the model reads of one tool."""
    return _digest_of([tool.name, tool.description, tool.parameters, tool.strict])


def rules_off(rules: RuleSet, was: Message, now: Message) -> frozenset[str]:
    """The rules, switched off in `rules`, under which both messages would have one identity."""
    one, other = canonicalise(was), canonicalise(now)
    if one.digest != other.digest:
        return frozenset()
    return frozenset(name for name in one.fired | other.fired if name not in rules)


# --- the optional check ----------------------------------------------------------------------------------------------


def num_chars(message: Message | None) -> int:
    """Characters of text, calls and results. Thinking does not count, because templates drop it anyway."""
    if message is None:
        return 0
    return sum(_num_block_chars(block) for block in message.blocks)


def is_shortened_too_much(original_chars: int, canonical_chars: int) -> bool:
    """Whether the key lost more than 10 % of the prompt: then a rule takes out too much."""
    return canonical_chars < original_chars * (1 - _MAX_SHORTENING)


def _num_block_chars(block: Block) -> int:
    match block:
        case TextBlock(text):
            return len(text)
        case ToolCallBlock(_, name, arguments):
            return len(name) + len(arguments)
        case ToolResultBlock(_, blocks):
            return sum(_num_block_chars(inner) for inner in blocks)
        case ToolBlock(name, description, parameters):
            return len(name) + len(description or "") + len(parameters or "")
        case _:
            return 0


# --- digests ---------------------------------------------------------------------------------------------------------


def _meaning_blocks(layout: Layout) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for part in layout:
        if part.spans and isinstance(part.block, TextBlock):
            blocks.append(replace(part.block, text=meaning_text(part.block.text, part.spans)))
        elif part.canonical is not None:
            blocks.append(_with_own_images(part.canonical, part.block))
    return tuple(blocks)


def _with_own_images(canonical: Block, block: Block) -> Block:
    """A block's canonical form with the images that it really shows."""
    if isinstance(canonical, ToolResultBlock) and isinstance(block, ToolResultBlock):
        return ToolResultBlock(canonical.call_id, block.blocks, canonical.is_error)
    return block if isinstance(block, ImageBlock) else canonical


def _digest(message: Message) -> bytes:
    fields: list[str] = [message.role, "-" if message.name is None else f"+{message.name}"]
    for block in message.blocks:
        _add_fields(block, fields)
    return hashlib.sha256(_joined(fields)).digest()


def _joined(fields: list[str]) -> bytes:
    """The fields with their lengths before them, so that different lists of fields are different bytes."""
    lengths = ",".join(map(str, map(len, fields)))
    # clients that cut text send lone surrogates, which must not stop a request
    return _FORMAT + f"[{lengths}]{''.join(fields)}".encode("utf-8", "surrogatepass")


def _add_fields(block: Block, fields: list[str]) -> None:
    match block:
        case TextBlock(text, is_ours):
            fields += ("ours" if is_ours else "text", text)
        case ThinkingBlock(text):
            fields += ("thinking", text)
        case ToolCallBlock(call_id, name, arguments):
            fields += ("call", call_id, name, arguments)
        case ImageBlock(source):
            fields += ("image", source)
        case ToolBlock():
            fields += ("tool", *map(repr, astuple(block)))
        case ToolResultBlock(call_id, blocks, is_error):
            fields += ("result", call_id, str(is_error), str(len(blocks)))
            for inner in blocks:
                _add_fields(inner, fields)


def _digest_of(value: object) -> bytes:
    fields: list[str] = []
    _add_value(value, fields)
    return hashlib.sha256(_joined(fields)).digest()


def _add_value(value: object, fields: list[str]) -> None:
    """Adds a JSON value with its type (1, 1.0 and true differ) and the order of keys, which is rendered."""
    if isinstance(value, Mapping):
        fields.append(f"object {len(value)}")
        for key, inner in value.items():
            fields.append(str(key))
            _add_value(inner, fields)
    elif isinstance(value, list | tuple):
        fields.append(f"array {len(value)}")
        for inner in value:
            _add_value(inner, fields)
    else:
        fields.append(f"{type(value).__name__} {value!r}" if not isinstance(value, str) else f"str {value}")
