"""A turn as it was recognised. Values only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvserve.canonical.canonicalise import Canonical, num_chars
from kvserve.canonical.message_layout import is_dropped
from kvserve.canonical.rule import RuleSet
from kvserve.canonical.rules import changed_policies
from kvserve.core import Message, ToolSpec, Written
from kvserve.explain.explanation import RulesFired
from kvserve.identity.owner import Owner
from kvserve.sessions.seen import PathStep, TurnRecord
from kvserve.sessions.tool_layouts import NO_TOOLS, ToolLayout


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a turn's messages: `canonical`, one by one, under `rules`; `chains[i]` names the owner's
    conversation up to and with message i."""

    owner: Owner
    rules: RuleSet
    canonical: tuple[Canonical, ...]
    chains: tuple[bytes, ...]
    tools_digest: bytes

    def meaning(self, index: int) -> bytes:
        """What tells message `index` from others of the same identity: its meaning, or where several clients share
        records every word that may not be sent again."""
        canonical = self.canonical[index]
        return canonical.meaning if self.owner.is_one_client else canonical.wording


@dataclass(frozen=True, slots=True)
class RuleEffects:
    """What the rules did: which took something out of identity (`fired`), which made the model read again what it read
    before (`replayed`), and whose spans moved and are rendered as sent (`as_sent`). `num_rejected` messages have the
    identity of what was seen, but differ for the model, and no rule explains it."""

    fired: frozenset[str] = frozenset()
    replayed: frozenset[str] = frozenset()
    as_sent: frozenset[str] = frozenset()
    num_rejected: int = 0


@dataclass(frozen=True, slots=True)
class RecognisedTurn:
    """A recognised turn: `messages` as the model is to see them, with the `tools` in front.

    `rendered`: the messages to render, with the tools that came `later` where they came (`tool_layout`) and, if so set,
    past `write` calls without their content. `num_known_messages` at the beginning were seen by the model, in this form
    or another of the same identity; `before` is the newest request that passed through the last of them.
    `written_messages`: per assistant message what the model wrote there, None where it did not.
    """

    messages: tuple[Message, ...]
    rendered: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    identity: Identity
    written_messages: tuple[Written | None, ...]
    effects: RuleEffects = RuleEffects()
    num_known_messages: int = 0
    before: TurnRecord | None = None
    notes: tuple[str, ...] = ()
    later: tuple[ToolSpec, ...] = ()
    tool_layout: ToolLayout = NO_TOOLS

    @property
    def all_tools(self) -> tuple[ToolSpec, ...]:
        """The tools in the order in which the model reads them."""
        return (*self.tools, *self.later)

    @property
    def lasting(self) -> tuple[Message, ...]:
        """The rendered messages that the next request will repeat: those with identity."""
        pairs = zip(self.rendered, self.identity.canonical, strict=True)
        return tuple(message for message, canonical in pairs if canonical.message is not None)

    @property
    def rules_fired(self) -> RulesFired:
        """What the rules did, for the explanation."""
        rules, before = self.identity.rules, self.before.messages if self.before is not None else ()
        dropped = {index: rule for index, message in enumerate(before) if (rule := is_dropped(message, rules))}
        return RulesFired(
            self.effects.replayed,
            self.effects.as_sent,
            self.num_known_messages,
            self.effects.num_rejected,
            dropped,
            policies=rules.policies,
            changed=changed_policies(rules),
        )

    @property
    def num_normalised_chars(self) -> int:
        """How many characters the canonical key is shorter than the messages."""
        sent = sum(num_chars(message) for message in self.messages)
        return sent - sum(num_chars(canonical.message) for canonical in self.identity.canonical)

    def steps(self) -> Iterator[PathStep]:
        """What the model reads, message by message, without the messages that have no identity."""
        written_messages, identity = iter(self.written_messages), self.identity
        for index, (message, place) in enumerate(zip(self.messages, identity.chains, strict=True)):
            written = next(written_messages) if message.role == "assistant" else None
            if identity.canonical[index].message is not None:
                yield PathStep(place, message, written, identity.meaning(index))


def with_meanings(canonical: Sequence[Canonical], meanings: Sequence[bytes | None]) -> tuple[Canonical, ...]:
    """The canonical messages, with the meaning of what the model reads where it is given, as a message includes what
    was put back into it."""
    return tuple(
        each
        if meaning is None or meaning == each.meaning == each.wording
        else replace(each, meaning=meaning, wording=meaning)
        for each, meaning in zip(canonical, meanings, strict=True)
    )
