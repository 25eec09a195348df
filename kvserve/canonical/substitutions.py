"""What the model reads in place of what was sent, whatever it read before: telemetry that holds nobody's words, where
the value that came first stands in every prompt, as it is what the prompts of all clients begin with; and, if so set,
digests of the contents that past `write` calls wrote. Those come last: what is put back from the past may hold contents
again.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvserve.canonical.rule import RuleSet
from kvserve.canonical.spans import RuleSpan, find_spans
from kvserve.core import Block, Message, TextBlock, ToolCallBlock

type FirstValue = Callable[[str, str], str]
"""The text that came first under a key, given the key and the text that is there now."""


def with_shared_values(message: Message, rules: RuleSet, first: FirstValue) -> tuple[Message, frozenset[str]]:
    """The message with the values that came first, and the rules whose values are not those that were sent."""
    openers = rules.impersonal_openers[message.role]
    if not openers:
        return message, frozenset()
    fired: set[str] = set()
    blocks: list[Block] = []
    for block in message.blocks:
        if isinstance(block, TextBlock) and any(opener in block.text for opener in openers):
            text = block.text
            for span in reversed(find_spans(text, message.role, rules)):
                said = _shared(span, rules, first, fired)
                text = text if said == span.text else text[: span.start] + said + text[span.end :]
            blocks.append(block if text == block.text else replace(block, text=text))
        else:
            blocks.append(block)
    return (Message(message.role, tuple(blocks), message.name), frozenset(fired)) if fired else (message, frozenset())


def _shared(span: RuleSpan, rules: RuleSet, first: FirstValue, fired: set[str]) -> str:
    """What is said in place of a span; the rules whose part of it is another then are added to `fired`."""
    form = span.rule.form
    names = [name for name in (form.volatile if form is not None else ()) if name in rules and rules.is_shared(name)]
    if form is None or not names or span.rule.is_personal:
        return span.text
    said = first(f"{span.rule.name}\n{span.without(names)}", span.text)
    fired |= {name for name in names if form.volatile[name].findall(said) != form.volatile[name].findall(span.text)}
    return said


# --- write calls ------------------------------------------------------------------------------------------------------

WRITE_TOOLS = frozenset({"write", "Write", "write_file", "WriteFile", "writeFile", "create_file"})
CONTENT_KEY = "content"

_PLACEHOLDER = re.compile(r"\[\d+ characters, sha256 [0-9a-f]{16}\]")


def with_write_content_digested(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with `content` of every write call replaced by its length and digest. Calls whose arguments are
    not a JSON object with text under that key stay as they are. Changes nothing in place; doing it twice is doing it
    once."""
    return tuple(_digested_message(message) for message in messages)


def _digested_message(message: Message) -> Message:
    if message.role != "assistant" or not any(map(_is_write, message.blocks)):
        return message
    return Message(message.role, tuple(map(_digested_block, message.blocks)), message.name)


def _is_write(block: Block) -> bool:
    return isinstance(block, ToolCallBlock) and block.name in WRITE_TOOLS


def _digested_block(block: Block) -> Block:
    if not isinstance(block, ToolCallBlock) or block.name not in WRITE_TOOLS:
        return block
    try:
        arguments = json.loads(block.arguments)
    except (ValueError, RecursionError):
        return block
    content = arguments.get(CONTENT_KEY) if isinstance(arguments, dict) else None
    if not isinstance(content, str) or _PLACEHOLDER.fullmatch(content):
        return block
    arguments[CONTENT_KEY] = _placeholder(content)
    return ToolCallBlock(block.call_id, block.name, json.dumps(arguments, ensure_ascii=False))


def _placeholder(content: str) -> str:
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
    return f"[{len(content)} characters, sha256 {digest[:16]}]"
