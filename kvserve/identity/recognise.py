"""Recognises the conversation that a turn continues, and gives its messages as the model is to see them. It stores
nothing but telemetry values and the order of tools, which are no user's words, and digests of requests without a
record.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvserve.canonical.canonicalise import (
    Canonical,
    canonical_tools,
    canonicalise,
    chain,
    is_shortened_too_much,
    num_chars,
)
from kvserve.canonical.message_cache import CanonicalMessageCache
from kvserve.canonical.message_layout import same_arguments
from kvserve.canonical.rule import RuleSet
from kvserve.canonical.substitutions import with_shared_values, with_write_content_digested
from kvserve.core import Message, Turn, Written
from kvserve.identity.earlier import EarlierRequests
from kvserve.identity.later_tools import PlacedTools, PlacementFacts, place_tools, unplaced
from kvserve.identity.owner import Owner, Wrote, is_shown, num_shown
from kvserve.identity.reading import Identity, RecognisedTurn, RuleEffects, with_meanings
from kvserve.sessions.seen import PathNode, TurnRecord
from kvserve.sessions.stores import StoreLimits, Stores
from kvserve.sessions.written_messages import same_words

EXACT = RuleSet(())
"""No rule: a message's identity is exactly what was sent."""


@dataclass(frozen=True, slots=True)
class IdentitySettings:
    """The operator's settings: the rules; whether sessions share no records; whether a key that lost more than a tenth
    of the prompt is given up; whether past `write` calls are rendered without content; how much is kept for how long.
    """

    rules: RuleSet
    is_partitioned: bool = True
    checks_shortening: bool = False
    digests_writes: bool = False
    limits: StoreLimits = StoreLimits()


class _Recognised(NamedTuple):
    """One message: as it is rendered, what the model wrote there, and what the rules did. `meaning`: that of what was
    seen, where it is rendered as seen; None where what was sent counts. One is made per message of the history in each
    request, and a tuple takes a third of the time of a frozen dataclass."""

    message: Message
    written: Written | None = None
    replayed: frozenset[str] = frozenset()
    as_sent: frozenset[str] = frozenset()
    is_rejected: bool = False
    meaning: bytes | None = None


class Recogniser:
    """Recognises turns by what the stores hold. Thread-safe."""

    def __init__(
        self, settings: IdentitySettings, familiar: CanonicalMessageCache, stores: Stores, earlier: EarlierRequests
    ) -> None:
        self._settings = settings
        self._familiar = familiar
        self._stores = stores
        self._earlier = earlier

    def read(self, turn: Turn, bring: Callable[[RecognisedTurn], None] = lambda _: None) -> RecognisedTurn:
        """Recognise a turn. Cache mode `prefix` uses nothing of earlier turns: the turn is rendered as sent. `bring`
        may add to what is known of the conversation before it is looked up."""
        is_full = turn.session.cache_mode == "full"
        sent, shared = self._with_shared_values(turn) if is_full else (turn.messages, frozenset())
        reading, tools = self._as_sent(turn, sent), unplaced(turn.tools)
        if not turn.session.leaves_no_record:
            bring(reading)
        if turn.session.leaves_no_record and not reading.identity.owner.is_one_client:
            # nothing is put back into a request that leaves no record
            self._stores.turns.note_unrecorded(reading.steps())
        elif is_full:
            reading, tools = self._replayed(reading, turn, shared)
        rendered = reading.messages
        if self._settings.digests_writes:
            rendered = with_write_content_digested(rendered)
        if turn.tool_choice.mode != "none":
            rendered = tools.in_messages(rendered)
        return replace(reading, rendered=rendered, tools=tools.front, later=tools.later, tool_layout=tools.layout)

    def _with_shared_values(self, turn: Turn) -> tuple[tuple[Message, ...], frozenset[str]]:
        """The messages, and the rules that put telemetry into them which another request sent first."""
        until = self._stores.until(turn.session.ttl_seconds)
        pairs = [
            with_shared_values(
                message, self._settings.rules, lambda key, text: self._stores.telemetry.first(key, text, until)
            )
            for message in turn.messages
        ]
        return tuple(message for message, _ in pairs), frozenset().union(*(fired for _, fired in pairs))

    def _as_sent(self, turn: Turn, sent: Sequence[Message]) -> RecognisedTurn:
        """The turn as it was sent, of which nothing is known yet."""
        known = self._familiar.recall(sent)
        messages = tuple(each.message for each in known)
        rules, canonical, notes = self._canonical(messages, tuple(each.canonical for each in known))
        owner = Owner.of(turn.session, parts_sessions=self._settings.is_partitioned)
        return RecognisedTurn(
            messages=messages,
            rendered=messages,
            tools=turn.tools,
            identity=Identity(
                owner=owner,
                rules=rules,
                canonical=canonical,
                chains=chain(owner.root, canonical),
                tools_digest=canonical_tools(turn.tools, rules),
            ),
            written_messages=tuple(None for message in messages if message.role == "assistant"),
            effects=RuleEffects(fired=frozenset().union(*(each.fired for each in canonical))),
            notes=notes,
        )

    def _canonical(
        self, messages: Sequence[Message], canonical: tuple[Canonical, ...]
    ) -> tuple[RuleSet, tuple[Canonical, ...], tuple[str, ...]]:
        """The canonical messages and their rules: none where the rules removed too much."""
        if self._settings.checks_shortening:
            sent = sum(num_chars(message) for message in messages)
            if is_shortened_too_much(sent, sum(num_chars(each.message) for each in canonical)):
                note = "the canonical key would be over 10 % shorter than the prompt: the prompt itself is the key"
                return EXACT, tuple(canonicalise(message, EXACT) for message in messages), (note,)
        return self._settings.rules, canonical, ()

    # --- what is known of it ------------------------------------------------------------------------------------------

    def _replayed(
        self, reading: RecognisedTurn, turn: Turn, shared: frozenset[str]
    ) -> tuple[RecognisedTurn, PlacedTools]:
        """The turn with what is known of its conversation, as far as the request shows that it is its client's, and
        where its tools are placed."""
        identity, messages = reading.identity, reading.messages
        known = self._stores.turns.find(identity.chains)
        seen = {node.chain: node for node in known.ancestry()} if known is not None else {}
        is_one_client = identity.owner.is_one_client
        num_own = len(messages) if is_one_client else num_shown(messages, identity.chains, self._wrote_on(seen))
        newest = _newest(messages)
        recognised = [
            self._recognised(
                reading, index, seen.get(identity.chains[index]), index < num_own, in_history=index < newest
            )
            for index in range(len(messages))
        ]
        tools = reading.tools
        if "tools_order" in identity.rules:
            until = self._stores.until(turn.session.ttl_seconds)
            tools = self._stores.turns.tools_as_seen(identity.tools_digest, tools, until)
        impersonal = shared | ({"tools_order"} if tools != reading.tools else set())
        canonical = with_meanings(identity.canonical, [each.meaning for each in recognised])
        num_known = _num_known(identity.chains, seen)
        placed = unplaced(tools)
        if "tools_added" in identity.rules and tools and not turn.session.leaves_no_record:
            facts = self._placement_facts(reading, min(num_known, num_own), newest)
            placed = place_tools(tools, facts, keeps_order="tools_order" not in identity.rules)
        if placed.later and turn.tool_choice.mode != "none":
            impersonal |= {"tools_added"}
        reading = replace(
            reading,
            messages=tuple(each.message for each in recognised),
            identity=replace(identity, canonical=canonical),
            written_messages=tuple(each.written for each in recognised if each.message.role == "assistant"),
            effects=RuleEffects(
                fired=reading.effects.fired | impersonal,
                replayed=impersonal.union(*(each.replayed for each in recognised)),
                as_sent=frozenset().union(*(each.as_sent for each in recognised)),
                num_rejected=sum(each.is_rejected for each in recognised),
            ),
            num_known_messages=num_known,
            before=self._before(reading, known),
            notes=(*reading.notes, *placed.notes),
        )
        return reading, placed

    def _placement_facts(self, reading: RecognisedTurn, num_known: int, newest: int) -> PlacementFacts:
        """The messages and the tool layouts of the part that is known and shown to be its client's."""
        identity = reading.identity
        layouts = self._stores.turns.tool_layouts(identity.chains[:num_known])
        return PlacementFacts(reading.messages, identity.canonical, identity.chains, layouts, num_known, newest)

    def _wrote_on(self, seen: Mapping[bytes, PathNode]) -> Wrote:
        """What the model wrote at the places of a known path, also where a client's echo, into which nothing was put
        back, was read since."""
        healing = self._stores.healing
        return lambda place: (seen[place].written or healing.find(place)) if place in seen else None

    def _before(self, reading: RecognisedTurn, known: PathNode | None) -> TurnRecord | None:
        """The request that this one is compared with; its words are shown to the client, so it is that client's. Where
        the first message is new, the conversation with the same first words under another system prompt; where clients
        share records, the request whose answer this one sends back."""
        identity, turns = reading.identity, self._stores.turns
        if not identity.owner.is_one_client:
            leaf = self._earlier.by_answers(identity)
            given = turns.find([leaf]) if leaf is not None else None
            return turns.record_at(given) if given is not None and self._was_given(reading, given) else None
        if known is None and (leaf := self._earlier.by_first_words(identity)) is not None:
            known = turns.find([leaf])
        return turns.record_for(known, identity.owner.session_name)

    def _was_given(self, reading: RecognisedTurn, given: PathNode) -> bool:
        """Whether the request shows that its client, and no other, was given the answers of this path."""
        path = list(given.ancestry())
        sent = [message for message in reading.messages if message.role == "assistant"]
        wrote = [seen.written.message for seen in path if seen.written is not None]
        return is_shown(sent, wrote) and not any(map(self._stores.turns.is_contested, path))

    # --- messages -----------------------------------------------------------------------------------------------------

    def _recognised(
        self, reading: RecognisedTurn, index: int, seen: PathNode | None, is_own: bool, *, in_history: bool
    ) -> _Recognised:
        message = reading.messages[index]
        if reading.identity.canonical[index].message is None or not is_own:
            return _Recognised(message)
        if seen is None:
            return self._healed(reading, index)
        may_put_back = not self._stores.turns.is_contested(seen)
        if not may_put_back and not reading.identity.owner.is_one_client:
            return _Recognised(message, seen.written)  # it is unknown whose words the model read here
        result = self._familiar.replay(
            message,
            seen.message,
            wrote=seen.written.message if seen.written is not None else None,
            in_history=in_history,
            rules=reading.identity.rules,
            may_put_back=may_put_back,
        )
        is_as_seen = result.message is seen.message or result.message == seen.message
        is_explained = is_as_seen or bool(result.fired or result.as_sent) or same_words(result.message, seen.message)
        meaning = seen.meaning if is_as_seen else None
        return _Recognised(result.message, seen.written, result.fired, result.as_sent, not is_explained, meaning)

    def _healed(self, reading: RecognisedTurn, index: int) -> _Recognised:
        """An assistant message whose path was evicted, restored from what the model wrote there."""
        identity, message = reading.identity, reading.messages[index]
        rules, place = identity.rules, identity.chains[index]
        may_heal = all(
            name in rules and rules.replays(name, in_history=True) for name in ("thinking", "call_arguments")
        )
        if message.role != "assistant" or not may_heal:
            return _Recognised(message)
        healed = self._stores.healing.heal(message, place, same_arguments)
        return _Recognised(
            healed, self._stores.healing.find(place), frozenset({"healing"} if healed is not message else ())
        )


def _num_known(chains: Sequence[bytes], seen: Mapping[bytes, PathNode]) -> int:
    return next((index + 1 for index in reversed(range(len(chains))) if chains[index] in seen), 0)


def _newest(messages: Sequence[Message]) -> int:
    """The index after the last assistant message: what follows was not answered yet."""
    return next((index + 1 for index in reversed(range(len(messages))) if messages[index].role == "assistant"), 0)
