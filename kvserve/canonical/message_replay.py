"""Decides what the model reads for a message that it read before in another wording: the earlier or the sent one.

The law: the model is never blinded. Only the text of a rule's own span may come from the past, only as the rule's
policy allows, and only if the client left the span out or changed only its volatile parts. Anything uncertain is
rendered as the client sent it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvserve.canonical.message_layout import Layout, Part, canonical_blocks, lay_out, trimmed
from kvserve.canonical.rule import RuleSet
from kvserve.canonical.rules import DEFAULT_RULES
from kvserve.canonical.spans import RuleSpan
from kvserve.core import Block, Message, TextBlock, ThinkingBlock, ToolCallBlock


@dataclass(frozen=True, slots=True)
class Replayed:
    """The message to render. `fired`: rules that put the earlier text in place of the sent one; `as_sent`: rules whose
    spans differ from the earlier text and are rendered as sent."""

    message: Message
    fired: frozenset[str] = frozenset()
    as_sent: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Notes:
    """The rules applied so far, while one message is being joined."""

    fired: set[str] = field(default_factory=set)
    as_sent: set[str] = field(default_factory=set)

    def result(self, message: Message) -> Replayed:
        return Replayed(message, frozenset(self.fired), frozenset(self.as_sent))


def replay(
    fresh: Message,
    seen: Message,
    *,
    wrote: Message | None = None,
    in_history: bool,
    rules: RuleSet = DEFAULT_RULES,
    may_put_back: bool = True,
) -> Replayed:
    """`fresh`, with the parts of `seen` that the rules allow. Neither is changed.

    `wrote`: what the model itself wrote there, the only thinking that comes back. `in_history`: the model has already
    answered what follows this message. `may_put_back`: False if messages of this identity with another meaning
    (`Canonical.meaning`) are known: it is then unclear which of them left a span out, and none comes back. The result
    is `fresh` for messages of different identity.
    """
    if fresh == seen or fresh.role != seen.role or fresh.name != seen.name:
        return Replayed(fresh)
    fresh_layout, seen_layout = lay_out(fresh, rules), lay_out(seen, rules)
    if canonical_blocks(fresh_layout) != canonical_blocks(seen_layout):
        return Replayed(fresh)
    if fresh.role == "assistant":
        return _replay_assistant(fresh, seen, wrote, rules, in_history)
    return _SpanReplay(fresh, fresh_layout, seen_layout, rules, in_history, may_put_back).result()


# --- assistants: thinking and calls ----------------------------------------------------------------------------------


def _replay_assistant(
    fresh: Message, seen: Message, wrote: Message | None, rules: RuleSet, in_history: bool
) -> Replayed:
    """The replay of an assistant's message, whose thinking, outer white space, call ids and spelling of arguments may
    differ."""
    notes = _Notes()
    spoken = iter(
        [
            _replay_spoken(mine, theirs, rules, in_history, notes)
            for mine, theirs in zip(_spoken(fresh, rules), _spoken(seen, rules), strict=True)
        ]
    )
    thinking, seen_thinking = _thinking(fresh), _thinking(seen)
    is_models_own = bool(seen_thinking) and wrote is not None and seen_thinking == _thinking(wrote)
    restores = not thinking and is_models_own and rules.replays("thinking", in_history=in_history)
    if thinking != seen_thinking:
        (notes.fired if restores else notes.as_sent).add("thinking")
    if restores:
        order = [block for block in seen.blocks if isinstance(block, ThinkingBlock) or not _is_unspoken(block, rules)]
    else:
        order = list(fresh.blocks)
    blocks = tuple(block if _is_unspoken(block, rules) else next(spoken) for block in order)
    return notes.result(Message(fresh.role, blocks, fresh.name))


def _is_unspoken(block: Block, rules: RuleSet) -> bool:
    """Whether this block of an assistant's message has no canonical form."""
    if isinstance(block, TextBlock):
        return not (trimmed(block.text) if "answer_edges" in rules else block.text)
    return isinstance(block, ThinkingBlock)


def _spoken(message: Message, rules: RuleSet) -> list[Block]:
    return [block for block in message.blocks if not _is_unspoken(block, rules)]


def _thinking(message: Message) -> list[str]:
    return [block.text for block in message.blocks if isinstance(block, ThinkingBlock)]


def _replay_spoken(fresh: Block, seen: Block, rules: RuleSet, in_history: bool, notes: _Notes) -> Block:
    if not isinstance(fresh, ToolCallBlock) or not isinstance(seen, ToolCallBlock):
        if fresh != seen:
            notes.as_sent.add("answer_edges")
        return fresh
    if fresh.call_id != seen.call_id:
        notes.as_sent.add("call_ids")
    if fresh.arguments == seen.arguments:
        return fresh
    if not rules.replays("call_arguments", in_history=in_history):
        notes.as_sent.add("call_arguments")
        return fresh
    notes.fired.add("call_arguments")
    return ToolCallBlock(fresh.call_id, fresh.name, seen.arguments)


# --- other roles: spans ----------------------------------------------------------------------------------------------

type _Key = tuple[bool, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class _Item:
    """A unit that is replayed or put back whole at one place: a span, or a block that consists of spans (an empty block
    has none), which may be the server's words."""

    spans: tuple[RuleSpan, ...]
    text: str
    is_ours: bool = False

    @property
    def key(self) -> _Key:
        return self.is_ours, tuple(span.key for span in self.spans)


@dataclass(slots=True)
class _SpanPlace:
    """The items at one place of the canonical message, and the partner in `seen` of each item of `fresh`."""

    fresh: list[_Item] = field(default_factory=list)
    seen: list[_Item] = field(default_factory=list)
    partners: list[int | None] = field(default_factory=list)

    def pair(self) -> None:
        """Find partners: items with equal meaning, in order."""
        following = 0
        for item in self.fresh:
            found = next((i for i in range(following, len(self.seen)) if self.seen[i].key == item.key), None)
            self.partners.append(found)
            following = following if found is None else found + 1


_GAP = -1


class _SpanReplay:
    """The replay of a system, user or tool message. Places are (number of the canonical block, offset in its canonical
    text), or the gap before a block, for blocks without a canonical form."""

    def __init__(
        self,
        fresh: Message,
        fresh_layout: Layout,
        seen_layout: Layout,
        rules: RuleSet,
        in_history: bool,
        may_put_back: bool,
    ) -> None:
        self._fresh = fresh
        self._layout = fresh_layout
        self._rules = rules
        self._in_history = in_history
        self._puts_back = may_put_back
        self._notes = _Notes()
        self._places: dict[tuple[int, int], _SpanPlace] = {}
        for position, item in _items(fresh_layout):
            self._places.setdefault(position, _SpanPlace()).fresh.append(item)
        for position, item in _items(seen_layout):
            self._places.setdefault(position, _SpanPlace()).seen.append(item)
        for place in self._places.values():
            place.pair()
        self._edited = {
            span.rule.name
            for place in self._places.values()
            for item, partner in zip(place.fresh, place.partners, strict=True)
            if partner is None
            for span in item.spans
        }

    def result(self) -> Replayed:
        """The message to render."""
        self._notes.as_sent |= self._edited
        blocks: list[Block] = []
        number = 0
        for part in self._layout:
            if part.canonical is None:
                continue  # its place is the gap before the next block
            blocks += self._gap(number)
            blocks.append(self._kept(number, part))
            number += 1
        blocks += self._gap(number)
        return self._notes.result(Message(self._fresh.role, tuple(blocks), self._fresh.name))

    def _gap(self, number: int) -> list[Block]:
        said = self._said(self._places.get((number, _GAP)), may_insert=True)
        return [TextBlock(item.text, item.is_ours) for item in said]

    def _kept(self, number: int, part: Part) -> Block:
        offsets = sorted(offset for block, offset in self._places if block == number and offset != _GAP)
        if not isinstance(part.block, TextBlock) or not offsets:
            return part.block
        text = part.block.text
        raw = canonical = 0  # how far the text and its canonical form are written
        pieces: list[str] = []
        for offset in offsets:
            place = self._places[number, offset]
            if offset >= canonical:
                pieces.append(text[raw : raw + offset - canonical])
                raw, canonical = raw + offset - canonical, offset
            pieces += [item.text for item in self._said(place, may_insert=offset == canonical)]
            for item in place.fresh:
                raw = item.spans[0].end
                canonical = offset + len(item.spans[0].canonical)
        return replace(part.block, text="".join([*pieces, text[raw:]]))

    def _said(self, place: _SpanPlace | None, *, may_insert: bool) -> list[_Item]:
        """The items at one place. With an unknown item all of it stays as sent: the order of items put back beside it
        is unknown."""
        if place is None:
            return []
        replayed = {
            partner: self._chosen(item, place.seen[partner])
            for item, partner in zip(place.fresh, place.partners, strict=True)
            if partner is not None
        }
        if not may_insert or None in place.partners:
            self._leave_out(item for i, item in enumerate(place.seen) if i not in replayed)
            return [
                item if partner is None else replayed[partner]
                for item, partner in zip(place.fresh, place.partners, strict=True)
            ]
        said: list[_Item] = []
        for i, item in enumerate(place.seen):
            if i in replayed:
                said.append(replayed[i])
            elif self._may_put_back(item):
                self._notes.fired |= {span.rule.name for span in item.spans}
                said.append(item)
            else:
                self._leave_out((item,))
        return said

    def _chosen(self, fresh: _Item, seen: _Item) -> _Item:
        """Of two items with equal meaning `seen`, if every rule whose part changed allows it."""
        moved = _moved(fresh, seen)
        if not moved:
            return fresh
        if all(self._rules.replays(name, in_history=self._in_history) for name in moved):
            self._notes.fired |= moved
            return seen
        self._notes.as_sent |= moved
        return fresh

    def _may_put_back(self, item: _Item) -> bool:
        if not self._puts_back or not item.spans:
            return False
        return all(
            span.rule.name not in self._edited
            and not span.canonical
            and self._rules.replays(span.rule.name, in_history=self._in_history)
            for span in item.spans
        )

    def _leave_out(self, items: Iterable[_Item]) -> None:
        self._notes.as_sent |= {span.rule.name for item in items for span in item.spans}


def _items(layout: Layout) -> Iterable[tuple[tuple[int, int], _Item]]:
    number = 0
    for part in layout:
        if part.canonical is None:
            if isinstance(part.block, TextBlock):
                yield (number, _GAP), _Item(part.spans, part.block.text, part.block.is_ours)
            continue
        removed = 0
        for span in part.spans:
            yield (number, span.start - removed), _Item((span,), span.text)
            removed += span.end - span.start - len(span.canonical)
        number += 1


def _moved(fresh: _Item, seen: _Item) -> set[str]:
    """The rules whose part of the text differs in two items with equal meaning."""
    if fresh.text == seen.text:
        return set()
    names: set[str] = set()
    for mine, theirs in zip(fresh.spans, seen.spans, strict=True):
        volatile, seen_volatile = dict(mine.volatile), dict(theirs.volatile)
        names |= {
            name for name in volatile.keys() | seen_volatile.keys() if volatile.get(name) != seen_volatile.get(name)
        }
    return names or {span.rule.name for span in fresh.spans}
