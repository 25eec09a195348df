"""Telemetry that holds nobody's words: the value that came first stands in every prompt, whoever sent it, as it is what
the prompts of all clients begin with."""

from collections.abc import Callable

from kvserve.canonical.rule import RuleSet
from kvserve.canonical.spans import RuleSpan, find_spans
from kvserve.core import Block, Message, TextBlock

type FirstValue = Callable[[str, str], str]
"""The text that came first under a key, given the key and the text that is there now."""


def with_shared_values(message: Message, rules: RuleSet, first: FirstValue) -> tuple[Message, frozenset[str]]:
    """The message with the values that came first, and the rules whose values are not those that were sent."""
    openers = rules.impersonal_openers(message.role)
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
            blocks.append(block if text == block.text else TextBlock(text))
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
