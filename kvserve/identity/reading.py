"""A turn as it was recognised. Values only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvserve.canonical.canonicalise import Canonical, num_chars
from kvserve.canonical.message_layout import is_dropped
from kvserve.canonical.policies import changed, policies
from kvserve.canonical.rule import RuleSet
from kvserve.core import Message, ToolSpec, Written
from kvserve.explain.explanation import RulesFired
from kvserve.identity.owner import Owner
from kvserve.sessions.seen import Step, TurnRecord
from kvserve.sessions.tool_layouts import NO_TOOLS, ToolLayout


@dataclass(frozen=True, slots=True)
class Identity:
    """What the messages are known by: `canonical`, one by one, under `rules`; `chains[i]` names the conversation of the
    owner up to and with message i."""

    owner: Owner
    rules: RuleSet
    canonical: tuple[Canonical, ...]
    chains: tuple[bytes, ...]
    tools_digest: bytes

    def meaning(self, index: int) -> bytes:
        """What tells message `index` from others of its identity: where several clients share their records every word
        that is not sent again, else what it means."""
        canonical = self.canonical[index]
        return canonical.meaning if self.owner.is_one_client else canonical.wording


@dataclass(frozen=True, slots=True)
class RuleEffects:
    """What the rules did: those that took something out of identity (`fired`), through which the model reads what it
    read before (`replayed`), and whose spans moved and are rendered as sent (`as_sent`). `num_rejected` messages equal
    what was seen canonically, but not for the model, and no rule says why."""

    fired: frozenset[str] = frozenset()
    replayed: frozenset[str] = frozenset()
    as_sent: frozenset[str] = frozenset()
    num_rejected: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """A turn that was recognised: `messages` as the model is to see them, with the `tools` in front.

    `rendered` are the messages to render: the same, unless past `write` calls are to be shown without their content,
    with the tools that came `later` where they came; `tool_layout` has the places.
    `num_known_messages` at the beginning were seen by the model, in this form or another of the same identity; `before`
    is the newest request that went through the last of them. `writings` has one entry per assistant message: what the
    model wrote there, None where it did not.
    """

    messages: tuple[Message, ...]
    rendered: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    identity: Identity
    writings: tuple[Written | None, ...]
    effects: RuleEffects = RuleEffects()
    num_known_messages: int = 0
    before: TurnRecord | None = None
    notes: tuple[str, ...] = ()
    later: tuple[ToolSpec, ...] = ()
    tool_layout: ToolLayout = NO_TOOLS

    @property
    def all_tools(self) -> tuple[ToolSpec, ...]:
        """The tools of the request, in the order in which the model reads them."""
        return (*self.tools, *self.later)

    @property
    def lasting(self) -> tuple[Message, ...]:
        """What is rendered as the next request will repeat it: less the messages that have no part in identity."""
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
            policies=policies(rules),
            changed=changed(rules),
        )

    @property
    def num_normalised_chars(self) -> int:
        """Characters that the canonical key is shorter than the messages."""
        sent = sum(num_chars(message) for message in self.messages)
        return sent - sum(num_chars(canonical.message) for canonical in self.identity.canonical)

    def steps(self) -> Iterator[Step]:
        """What the model reads, message by message, less what has no part in identity."""
        writings, identity = iter(self.writings), self.identity
        for index, (message, place) in enumerate(zip(self.messages, identity.chains, strict=True)):
            written = next(writings) if message.role == "assistant" else None
            if identity.canonical[index].message is not None:
                yield Step(place, message, written, identity.meaning(index))


def with_meanings(canonical: Sequence[Canonical], meanings: Sequence[bytes | None]) -> tuple[Canonical, ...]:
    """The canonical messages, with the meaning of what the model reads instead of what was sent where there is one:
    what was put back belongs to a message."""
    return tuple(
        each
        if meaning is None or meaning == each.meaning == each.wording
        else replace(each, meaning=meaning, wording=meaning)
        for each, meaning in zip(canonical, meanings, strict=True)
    )
