"""All conversations of one model: recognises turns and remembers them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvserve.canonical.canonicalise import canonicalise, chain
from kvserve.canonical.message_cache import CanonicalMessageCache
from kvserve.core import Message, MessageStart, RequestId, SessionHint, TokenSequence, Turn, Written
from kvserve.core.keeping import Scope
from kvserve.explain.raw_prompts import RawPrompts, RawRecord
from kvserve.identity.earlier import EarlierRequests
from kvserve.identity.owner import Owner, belongs_to, is_telling_text
from kvserve.identity.reading import Identity, RecognisedTurn
from kvserve.identity.recognise import IdentitySettings, Recogniser
from kvserve.identity.shared_records import IsReadable, SharedRecords, SharedRecordTotals
from kvserve.sessions.archive import Archive, ArchiveTotals
from kvserve.sessions.digest_lru import DigestLru
from kvserve.sessions.hot_prefixes import HotPrefix
from kvserve.sessions.lineage import NAMED, Branch, SessionView, session_key
from kvserve.sessions.seen import PathNode, PathStep, TurnRecord, pack_ids
from kvserve.sessions.stores import Stores


@dataclass(frozen=True, slots=True)
class ConversationTotals:
    """What is kept of conversations, in RAM and in the archive on disk; `shared`: what went to other servers and came
    from them, where records travel."""

    num_sessions: int
    num_branches: int
    num_messages: int
    num_bytes: int
    num_healing_entries: int
    archive: ArchiveTotals
    shared: SharedRecordTotals | None = None


@dataclass(frozen=True, slots=True)
class ForgottenRecords:
    """How many sessions and messages were deleted. `is_done`: no file holds them any more."""

    num_sessions: int
    num_messages: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class RememberedTurn:
    """What one request put before the model and what the model wrote; `written` is None where nothing is to be kept.
    `num_computed_tokens`: how many tokens were computed, of a request whose client disconnected; None for a complete
    one. `packed_prompt`: the prompt's ids as a record keeps them (`pack_ids`)."""

    request_id: RequestId
    session: SessionHint
    prompt: TokenSequence
    message_starts: tuple[MessageStart, ...]
    template_arguments: Mapping[str, object]
    written: Written | None
    packed_prompt: bytes
    num_computed_tokens: int | None = None


class Conversations:
    """All conversations of one model, found by content. Thread-safe."""

    def __init__(
        self, settings: IdentitySettings, archive: Archive | None = None, *, awaits_archive: bool = False
    ) -> None:
        """Begins with the rows of `archive` and writes to it; `awaits_archive`: there will be one from `attach` on."""
        self._parts_sessions = settings.is_partitioned
        self._familiar = CanonicalMessageCache(settings.rules, settings.limits.familiar_bytes)
        self._stores = Stores(settings.limits, archive, awaits_archive=awaits_archive)
        self._earlier = EarlierRequests()
        self._earlier.recall(self._stores.turns.records())
        self._recogniser = Recogniser(settings, self._familiar, self._stores, self._earlier)
        self.raw_prompts = RawPrompts()
        self.shared: SharedRecords | None = None
        self._was_emptied = False
        self._forgotten: DigestLru[bool] = DigestLru()

    @property
    def archive_folder(self) -> Path | None:
        """Where what is remembered is written; None where it is not, or not yet."""
        return self._stores.archive_folder

    @property
    def awaits_archive(self) -> bool:
        """Whether what is remembered will be written down, and is not yet."""
        return self._stores.awaits_archive

    def attach(self, archive: Archive) -> None:
        """Write to this archive from now on, also what was remembered since the start; rows that it holds replace that.
        Where there is an archive already, this one is closed."""
        if self._stores.attach(archive):
            self._earlier.clear()
            self._earlier.recall(self._stores.turns.records())

    def detach(self) -> None:
        """Begin anew in RAM, without an archive: its rows are another model's, as those of other servers are."""
        self.shared = None
        self._stores.detach()
        self._earlier.clear()
        self.raw_prompts.clear()

    def read(self, turn: Turn) -> RecognisedTurn:
        """Recognise a turn. Cache mode `prefix` uses nothing of earlier turns: the turn is rendered as sent."""
        return self._recogniser.read(turn)

    def bring(self, turn: Turn, is_readable: IsReadable) -> RecognisedTurn:
        """`read`, with what other servers know of the conversation taken in before. Answers with a token that is not
        `is_readable` are unknown. Waits for half a second at most."""
        shared, until = self.shared, self._stores.until(turn.session.ttl_seconds)
        if shared is None or until is None:
            return self._recogniser.read(turn)
        return self._recogniser.read(turn, lambda reading: shared.bring(reading, self._stores, until, is_readable))

    def owner(self, session: SessionHint) -> Owner:
        """Whose records a request finds and adds to."""
        return Owner.of(session, parts_sessions=self._parts_sessions)

    def raw_before(self, text: str, owner: Owner) -> RawRecord | None:
        """The raw prompt that this one is compared with; its text is shown to the client, so it is one of that
        client's."""
        return self.raw_prompts.nearest(text, owner.name, shown_by=None if owner.is_one_client else is_telling_text)

    def remember(self, reading: RecognisedTurn, exchanged: RememberedTurn) -> Branch | None:
        """Remember what the model read of this turn and what it wrote; returns the branch that the turn belongs to.

        None where no message has identity and there is no answer, and for a request without a record: of that one only
        digests are noted, in RAM, so that no other client's words are put back into its next request.
        """
        stores, identity, session = self._stores, reading.identity, exchanged.session
        if session.leaves_no_record:
            self._note_unrecorded(identity, exchanged)
            return None
        until = stores.until(session.ttl_seconds)
        stores.hot_prefixes.count(
            exchanged.packed_prompt,
            exchanged.message_starts,
            exchanged.prompt.images,
            now=stores.now(),
            until=until,
            owner=str(identity.owner.principal),
        )
        steps, written = list(reading.steps()), exchanged.written
        if written is not None:
            identity = _with_answer(identity, written.message)
            steps.append(_answer_step(identity, written))
            stores.healing.remember(steps[-1].chain, written, until, owner=identity.owner.name)
        if not steps:
            return None
        messages = (*reading.messages, *([written.message] if written is not None else []))
        self._earlier.put(identity, steps, exchanged.packed_prompt)
        leaf = stores.turns.extend(None, steps, until, owner=identity.owner.name)
        starts = tuple(start.offset for start in exchanged.message_starts)
        emitted = written.ids if written is not None else ()
        stores.turns.remember(
            TurnRecord(
                request_id=exchanged.request_id,
                session=identity.owner.session_name,
                leaf=leaf,
                messages=messages,
                tools=reading.all_tools,
                tools_digest=identity.tools_digest,
                packed_ids=exchanged.packed_prompt + pack_ids(emitted),
                num_prompt_tokens=len(exchanged.prompt),
                starts=starts,
                template_arguments=exchanged.template_arguments,
                fired=reading.effects.fired,
                images=exchanged.prompt.images,
                num_computed_tokens=exchanged.num_computed_tokens,
                tool_layout=reading.tool_layout,
            ),
            is_lasting=until is not None,
        )
        self._tell(identity, leaf, is_lasting=until is not None)
        num_tokens = len(exchanged.prompt) + len(emitted)
        return stores.index.advance(
            session_key(identity.owner.session_name, exchanged.prompt.ids),
            identity.chains,
            num_tokens=num_tokens,
            ends=_ends(starts, len(identity.chains), num_tokens),
            now=stores.now(),
            until=until,
        )

    def _tell(self, identity: Identity, leaf: PathNode, *, is_lasting: bool) -> None:
        """Have what was read and written where other servers look for it, if it may be written down at all."""
        if self.shared is None or not is_lasting:
            return
        path = leaf.path()
        pairs = zip(identity.chains, identity.canonical, strict=True)
        own = {place: each for place, each in pairs if each.message is not None}
        places = [node.chain for node in path]
        layouts, conflicts = self._stores.turns.tool_layouts(places), self._stores.conflicts(places)
        self.shared.tell(
            identity.owner,
            [(node, own[node.chain], each) for node, each in zip(path, conflicts, strict=True)],
            [(path[index].chain, layout) for index, layout in layouts],
            self._stores.now(),
        )

    def _note_unrecorded(self, identity: Identity, exchanged: RememberedTurn) -> None:
        """Note that a client without a record was given this answer, as others may have been."""
        if exchanged.written is not None and not identity.owner.is_one_client:
            identity = _with_answer(identity, exchanged.written.message)
            answer = _answer_step(identity, exchanged.written)
            self._stores.turns.note_unrecorded([answer])
            self._earlier.put(identity, [answer], exchanged.packed_prompt)

    def most_used_prefixes(self, num: int) -> tuple[HotPrefix, ...]:
        """The prefixes that prompts began with most often, up to the first user message."""
        return self._stores.hot_prefixes.most_used(num)

    def totals(self) -> ConversationTotals:
        """What is kept now."""
        turns, lineage = self._stores.turns.totals(), self._stores.index.totals(self._stores.now())
        return ConversationTotals(
            num_sessions=lineage.num_sessions,
            num_branches=lineage.num_branches,
            num_messages=turns.num_nodes,
            num_bytes=turns.num_bytes + turns.num_record_bytes + self.raw_prompts.num_bytes,
            num_healing_entries=len(self._stores.healing),
            archive=self._stores.archive_totals(),
            shared=shared.totals() if (shared := self.shared) is not None else None,
        )

    def sessions(self) -> tuple[SessionView, ...]:
        """The sessions with their branches, least recently used first."""
        return self._stores.index.sessions(self._stores.now())

    def forget(self, *, session: str | None = None, principal: str | None = None) -> ForgottenRecords:
        """Delete what belongs to a session, whichever principal's, or to a principal (`str(Principal)`), or to both
        where both are given. Memos of messages, which know no owners, are cleared."""
        scope = Scope(session, principal)
        is_gone = partial(belongs_to, scope=scope)
        stores = self._stores
        stores.hot_prefixes.forget(lambda owner: principal in (None, owner))  # their owner is a principal
        stores.healing.forget(is_gone)
        self.raw_prompts.forget(is_gone)
        self.clear_memos()
        num_sessions = stores.index.forget(lambda key: key.startswith(NAMED) and is_gone(key.removeprefix(NAMED)))
        num_messages = stores.turns.forget(is_gone)
        self._forgotten.put([_digest(scope)], True)
        return ForgottenRecords(num_sessions, num_messages, is_done=stores.erase())

    def was_forgotten(self, owner: Owner) -> bool:
        """Whether the records of this owner were deleted since the start, alone or with all others."""
        principal = str(owner.principal)
        scopes = Scope(owner.session), Scope(principal=principal), Scope(owner.session, principal)
        return self._was_emptied or self._forgotten.find([_digest(scope) for scope in scopes]) is not None

    def clear_memos(self) -> None:
        """Clear the messages that are remembered only for speed."""
        self._familiar.clear()

    def clear(self) -> None:
        """Delete every conversation."""
        self._was_emptied = True
        self._earlier.clear()
        self.raw_prompts.clear()
        self._familiar.clear()
        self._stores.clear()

    def flush(self) -> bool:
        """Wait until all changes are on disk; False where that took too long."""
        return self._stores.flush()

    def close(self) -> None:
        """Write what is left; the last call."""
        self._stores.close()


def _digest(scope: Scope) -> bytes:
    """A digest of the scope, so that deleted names are not kept."""
    return hashlib.sha256(repr((scope.session, scope.principal)).encode("utf-8", "surrogatepass")).digest()


def _with_answer(identity: Identity, answer: Message) -> Identity:
    """The identity of the conversation with the answer at its end."""
    canonical = (*identity.canonical, canonicalise(answer, identity.rules))
    return replace(identity, canonical=canonical, chains=chain(identity.owner.root, canonical))


def _answer_step(identity: Identity, written: Written) -> PathStep:
    """The answer at the end of a conversation as a step of what the model wrote."""
    return PathStep(identity.chains[-1], written.message, written, identity.meaning(-1))


def _ends(starts: Sequence[int], num_messages: int, num_tokens: int) -> list[int]:
    """Where each message ends in model tokens; roughly, where a template writes several messages as one."""
    return [starts[index + 1] if index + 1 < len(starts) else num_tokens for index in range(num_messages)]
