"""Which conversation a turn continues, and its messages as the model is to see them.

    1 canonicalise  canonical/  every message's identity: what is left when ids, clocks and telemetry are normalised
    2 find          sessions/   the deepest point of it that the model has read or written
    3 replay        canonical/  up to there each message as the model saw it, as far as its rules' policies allow
    4 remember      sessions/   afterwards: what the model read now, and what it wrote

It joins `canonical/` and `sessions/` for one model. Messages come from it for rendering only: which KV is reused is
decided later, by the model's own tokens, so nothing here can hide content by a wrong guess.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvserve.canonical.canonicalise import (
    Canonical,
    canonical_tools,
    canonicalise,
    chain,
    is_shortened_too_much,
    num_chars,
)
from kvserve.canonical.familiar import Familiar
from kvserve.canonical.layout import is_dropped, same_arguments
from kvserve.canonical.policies import changed, policies
from kvserve.canonical.rule import RuleSet
from kvserve.canonical.write_calls import with_write_content_digested
from kvserve.core import Message, MessageStart, RequestId, SessionHint, TokenSequence, ToolSpec, Turn, Written
from kvserve.sessions.archive import Archive, ArchiveTotals
from kvserve.sessions.beginnings import Beginning
from kvserve.sessions.explanation import RulesFired
from kvserve.sessions.lineage import Branch, SessionView, session_key
from kvserve.sessions.raw_prompts import RawPrompts
from kvserve.sessions.seen import Seen, Step, TurnRecord, pack_ids
from kvserve.sessions.stores import StoreLimits, Stores
from kvserve.sessions.whereabouts import Places
from kvserve.sessions.writings import same_words

EXACT = RuleSet(())
"""No rule at all: a message is known by exactly what was sent."""


@dataclass(frozen=True, slots=True)
class IdentitySettings:
    """What the operator decides: the rules, whether records of two session ids are kept apart, whether a key that lost
    more than a tenth of the prompt is given up, whether past `write` calls are rendered without their content, and how
    much is kept for how long."""

    rules: RuleSet
    is_partitioned: bool = True
    checks_shortening: bool = False
    digests_writes: bool = False
    limits: StoreLimits = StoreLimits()


@dataclass(frozen=True, slots=True)
class Reading:
    """A turn that was recognised: `messages` as the model is to see them, with the `tools`.

    `rendered` are the messages to render: the same, unless past `write` calls are to be shown without their content.

    `chains[i]` names the conversation up to and with message i. `known` is the deepest message that the model has seen,
    `before` the newest request that went through it. `writings` has one entry per assistant message: what the model
    wrote there, None where it did not. `replayed` names the rules through which the model reads what it read before,
    `as_sent` those whose spans moved and are rendered as sent; `num_rejected` messages equal what was seen canonically,
    but not for the model, and no rule says why.
    """

    messages: tuple[Message, ...]
    rendered: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    rules: RuleSet
    canonical: tuple[Canonical, ...]
    chains: tuple[bytes, ...]
    root: bytes
    tools_digest: bytes
    known: Seen | None = None
    before: TurnRecord | None = None
    writings: tuple[Written | None, ...] = ()
    fired: frozenset[str] = frozenset()
    replayed: frozenset[str] = frozenset()
    as_sent: frozenset[str] = frozenset()
    num_rejected: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_known_messages(self) -> int:
        """Messages at the beginning that the model has seen, in this form or another of the same identity."""
        if self.known is None:
            return 0
        return next(index + 1 for index in reversed(range(len(self.chains))) if self.chains[index] == self.known.chain)

    @property
    def lasting(self) -> tuple[Message, ...]:
        """What is rendered as the next request will repeat it: less the messages that have no part in identity."""
        pairs = zip(self.rendered, self.canonical, strict=True)
        return tuple(message for message, canonical in pairs if canonical.message is not None)

    @property
    def rules_fired(self) -> RulesFired:
        """What the rules did, for the explanation."""
        before = self.before.messages if self.before is not None else ()
        dropped = {index: rule for index, message in enumerate(before) if (rule := is_dropped(message, self.rules))}
        return RulesFired(
            self.replayed,
            self.as_sent,
            self.num_known_messages,
            self.num_rejected,
            dropped,
            policies=policies(self.rules),
            changed=changed(self.rules),
        )

    @property
    def num_normalised_chars(self) -> int:
        """Characters that the canonical key is shorter than the messages."""
        sent = sum(num_chars(message) for message in self.messages)
        return sent - sum(num_chars(canonical.message) for canonical in self.canonical)


@dataclass(frozen=True, slots=True)
class ConversationTotals:
    """What is kept of conversations, in RAM and in the archive on disk."""

    num_sessions: int
    num_branches: int
    num_messages: int
    num_bytes: int
    num_healing_entries: int
    archive: ArchiveTotals


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What one request put before the model, and what the model wrote; `written` None where nothing is to be kept.
    `num_computed_tokens`: of a request whose client left, how many tokens were computed; None for a complete one.
    `packed_prompt` are the prompt's ids as a record keeps them (`pack_ids`)."""

    request_id: RequestId
    session: SessionHint
    prompt: TokenSequence
    message_starts: tuple[MessageStart, ...]
    template_arguments: Mapping[str, object]
    written: Written | None
    packed_prompt: bytes
    num_computed_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Recognised:
    """One message on its way: as it is to be rendered, what the model wrote there, and what the rules did. `meaning`
    is that of what was seen where it is rendered as it was seen, None where what was sent counts."""

    message: Message
    written: Written | None = None
    replayed: frozenset[str] = frozenset()
    as_sent: frozenset[str] = frozenset()
    is_rejected: bool = False
    meaning: bytes | None = None


class Conversations:
    """Everything that one model has read and written, by content. Safe for several threads."""

    def __init__(self, settings: IdentitySettings, archive: Archive | None = None) -> None:
        """With an `archive` it begins with what was kept there, and outlives the process in it."""
        self._settings = settings
        self._familiar = Familiar(settings.rules, settings.limits.familiar_bytes)
        self._stores = Stores(settings.limits, archive)
        self._healing, self._turns, self._index = self._stores.healing, self._stores.turns, self._stores.index
        self._openings: Places[bytes] = Places()
        self.raw_prompts = RawPrompts()
        self.was_cleared = False

    def read(self, turn: Turn) -> Reading:
        """Recognise a turn. In cache mode `prefix` nothing of earlier turns is looked at: it is rendered as sent."""
        known = self._familiar.recall(turn.messages)
        messages = tuple(each.message for each in known)
        rules, canonical, notes = self._canonical(messages, tuple(each.canonical for each in known))
        root = (self.partition(turn.session) or "").encode()
        reading = Reading(
            messages=messages,
            rendered=messages,
            tools=turn.tools,
            rules=rules,
            canonical=canonical,
            chains=chain(root, canonical),
            root=root,
            tools_digest=canonical_tools(turn.tools, rules),
            writings=tuple(None for message in messages if message.role == "assistant"),
            fired=frozenset().union(*(each.fired for each in canonical)),
            notes=notes,
        )
        if turn.session.cache_mode == "full":
            reading = self._replayed(reading, turn.session)
        if self._settings.digests_writes:
            return replace(reading, rendered=with_write_content_digested(reading.messages))
        return replace(reading, rendered=reading.messages)

    def partition(self, session: SessionHint) -> str | None:
        """Whose records and limits a request has: its session's, if sessions are kept apart."""
        return session.session_id if self._settings.is_partitioned else None

    def remember(self, reading: Reading, exchanged: Exchanged) -> Branch | None:
        """The model has read this turn, and written what it wrote: the branch that it belongs to.

        None where there is nothing to know it by: messages without identity, and no answer.
        """
        until = self._stores.until(exchanged.session.ttl_seconds)
        packed, now = exchanged.packed_prompt, self._stores.now()
        self._stores.beginnings.count(packed, exchanged.message_starts, exchanged.prompt.images, now=now, until=until)
        messages, steps = reading.messages, list(_steps(reading))
        written = exchanged.written
        if written is not None:
            answer = canonicalise(written.message, reading.rules)
            answered = chain(reading.root, (*reading.canonical, answer))[-1]
            messages = (*messages, written.message)
            steps.append(Step(answered, written.message, written, answer.meaning))
            self._healing.remember(answered, written, until)
        if not steps:
            return None
        answers = () if written is None else (answer,)
        self._openings.put(_openings(reading.root, (*reading.canonical, *answers)), steps[-1].chain)
        starts = tuple(start.offset for start in exchanged.message_starts)
        emitted = written.ids if written is not None else ()
        self._turns.remember(
            TurnRecord(
                request_id=exchanged.request_id,
                session=exchanged.session.session_id,
                leaf=self._turns.extend(None, steps, until),
                messages=messages,
                tools=reading.tools,
                tools_digest=reading.tools_digest,
                packed_ids=exchanged.packed_prompt + pack_ids(emitted),
                num_prompt_tokens=len(exchanged.prompt),
                starts=starts,
                template_arguments=exchanged.template_arguments,
                fired=reading.fired,
                images=exchanged.prompt.images,
                num_computed_tokens=exchanged.num_computed_tokens,
            ),
            is_lasting=until is not None,
        )
        num_tokens = len(exchanged.prompt) + len(emitted)
        chains = (*reading.chains, *([steps[-1].chain] if written is not None else []))
        return self._index.advance(
            session_key(exchanged.session.session_id, exchanged.prompt.ids),
            chains,
            num_tokens=num_tokens,
            ends=_ends(starts, len(chains), num_tokens),
            now=self._stores.now(),
            until=until,
        )

    def most_used_beginnings(self, num: int) -> tuple[Beginning, ...]:
        """What prompts have begun with most often, up to the first user's words."""
        return self._stores.beginnings.most_used(num)

    def totals(self) -> ConversationTotals:
        """What is kept now."""
        turns, lineage = self._turns.totals(), self._index.totals(self._stores.now())
        return ConversationTotals(
            num_sessions=lineage.num_sessions,
            num_branches=lineage.num_branches,
            num_messages=turns.num_nodes,
            num_bytes=turns.num_bytes + turns.num_record_bytes + self.raw_prompts.num_bytes,
            num_healing_entries=len(self._healing),
            archive=self._stores.archive_totals(),
        )

    def sessions(self) -> tuple[SessionView, ...]:
        """The sessions with their branches, least recently used first."""
        return self._index.sessions(self._stores.now())

    def clear(self) -> None:
        """Forget every conversation."""
        self.was_cleared = True
        self._openings.clear()
        self.raw_prompts.clear()
        self._familiar.clear()
        self._stores.clear()

    def flush(self) -> bool:
        """Wait until all that is to last is on disk; False where it could not be in time."""
        return self._stores.flush()

    def close(self) -> None:
        """Write down what is left to be; the last that is asked of it."""
        self._stores.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    def _canonical(
        self, messages: Sequence[Message], canonical: tuple[Canonical, ...]
    ) -> tuple[RuleSet, tuple[Canonical, ...], tuple[str, ...]]:
        """The canonical messages and the rules they came from: none at all where they took too much away."""
        if self._settings.checks_shortening:
            sent = sum(num_chars(message) for message in messages)
            if is_shortened_too_much(sent, sum(num_chars(each.message) for each in canonical)):
                note = "the canonical key would be over 10 % shorter than the prompt: the prompt itself is the key"
                return EXACT, tuple(canonicalise(message, EXACT) for message in messages), (note,)
        return self._settings.rules, canonical, ()

    def _replayed(self, reading: Reading, session: SessionHint) -> Reading:
        """The reading with all that is known of its conversation."""
        known = self._turns.find(reading.chains)
        seen = {node.chain: node for node in known.ancestry()} if known is not None else {}
        newest = _newest(reading.messages)
        recognised = [
            self._recognised(reading, index, seen.get(reading.chains[index]), in_history=index < newest)
            for index in range(len(reading.messages))
        ]
        tools = reading.tools
        if "tools_order" in reading.rules:
            tools = self._turns.tools_as_seen(reading.tools_digest, tools, self._stores.until(session.ttl_seconds))
        reordered = frozenset({"tools_order"}) if tools != reading.tools else frozenset()
        return replace(
            reading,
            messages=tuple(each.message for each in recognised),
            canonical=tuple(map(_as_read, reading.canonical, recognised)),
            tools=tools,
            known=known,
            before=self._before(reading, known, session.session_id),
            writings=tuple(each.written for each in recognised if each.message.role == "assistant"),
            fired=reading.fired | reordered,
            replayed=reordered.union(*(each.replayed for each in recognised)),
            as_sent=frozenset().union(*(each.as_sent for each in recognised)),
            num_rejected=sum(each.is_rejected for each in recognised),
        )

    def _before(self, reading: Reading, known: Seen | None, session: str | None) -> TurnRecord | None:
        """What the request is compared with: where its first message is new already, the conversation whose first words
        are the same under another system prompt."""
        if known is None and (leaf := self._openings.find(_openings(reading.root, reading.canonical))) is not None:
            known = self._turns.find([leaf])
        return self._turns.record_for(known, session)

    def _recognised(self, reading: Reading, index: int, seen: Seen | None, *, in_history: bool) -> _Recognised:
        message = reading.messages[index]
        if reading.canonical[index].message is None:
            return _Recognised(message)
        if seen is None:
            return self._healed(reading, index)
        may_put_back = not self._turns.is_contested(seen)
        result = self._familiar.replay(
            message, seen.message, in_history=in_history, rules=reading.rules, may_put_back=may_put_back
        )
        is_explained = bool(result.fired or result.as_sent) or same_words(result.message, seen.message)
        meaning = seen.meaning if result.message == seen.message else None
        return _Recognised(result.message, seen.written, result.fired, result.as_sent, not is_explained, meaning)

    def _healed(self, reading: Reading, index: int) -> _Recognised:
        """An assistant's message whose path is forgotten, but not what the model wrote there."""
        message, place = reading.messages[index], reading.chains[index]
        may_heal = all(
            name in reading.rules and reading.rules.replays(name, in_history=True)
            for name in ("thinking", "call_arguments")
        )
        if message.role != "assistant" or not may_heal:
            return _Recognised(message)
        healed = self._healing.heal(message, place, same_arguments)
        return _Recognised(healed, self._healing.find(place), frozenset({"healing"} if healed is not message else ()))


def _openings(root: bytes, canonical: Sequence[Canonical]) -> list[bytes]:
    """Digests of a conversation's first words, whatever system prompt stands before them: the user's, and the user's
    with the answer to them."""
    said = [each for each in canonical if each.message is not None and each.message.role in ("user", "assistant")][:2]
    digests = [b"".join(each.digest for each in said[:count]) for count in range(1, len(said) + 1)]
    return [hashlib.sha256(root + digest).digest() for digest in digests]


def _as_read(sent: Canonical, recognised: _Recognised) -> Canonical:
    """What a message is known by, with the meaning of what the model reads: what was put back belongs to it."""
    meaning = recognised.meaning
    return sent if meaning is None or meaning == sent.meaning else replace(sent, meaning=meaning)


def _steps(reading: Reading) -> Iterator[Step]:
    """What the model read, message by message, less what has no part in identity."""
    writings = iter(reading.writings)
    for message, canonical, place in zip(reading.messages, reading.canonical, reading.chains, strict=True):
        written = next(writings) if message.role == "assistant" else None
        if canonical.message is not None:
            yield Step(place, message, written, canonical.meaning)


def _newest(messages: Sequence[Message]) -> int:
    """The index behind the last assistant's message: what follows has not been answered yet."""
    return next((index + 1 for index in reversed(range(len(messages))) if messages[index].role == "assistant"), 0)


def _ends(starts: Sequence[int], num_messages: int, num_tokens: int) -> list[int]:
    """Where each message ends in model tokens; about there where a template writes several messages as one."""
    return [starts[index + 1] if index + 1 < len(starts) else num_tokens for index in range(num_messages)]
