"""A row: one request inside the engine, the handle through which its client hears of it, and what the prefix cache
reads off it: its tokens, whose entry it becomes, where its messages end and where it stops. No arrays.

`RequestHandle` is shared between threads: the engine writes events, any thread may cancel. `Row` belongs to the engine
thread alone.
"""

import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from kvserve.cache.checkpoints import MessageEnd, PromptOutline, Stop
from kvserve.cache.token_run import pack
from kvserve.core import (
    Drafting,
    GenerationDone,
    GenerationEvent,
    GenerationFailed,
    GenerationRequest,
    GenerationTiming,
    MessageStart,
    PrefillProgress,
    Reuse,
    StopReason,
    TokenDelta,
    TokenSequence,
    Unshared,
)
from kvserve.engine.logits_processors import GrammarProcessor, LogprobReader, ThinkingLimiter
from kvserve.engine.row_drafts import RowDrafts
from kvserve.engine.token_dispatcher import Dispatch, call_now
from kvserve.errors import EngineFailure, KvserveError

type Reader = Callable[[], bool]
"""Reads what has arrived, on a thread that is not its own; False: its own one has to go on. It neither blocks nor
raises."""

DECODING_POLL_SECONDS = 1.0
"""The longest wait for the next token of an answer that has begun: every token is an occasion to look at the client, so
that looks in between would only cost the model's threads their processors."""


class RequestHandle:
    """The client's end of a row: events come out, a cancellation goes in."""

    def __init__(self, request: GenerationRequest, dispatch: Dispatch = call_now) -> None:
        """`dispatch` takes what delivers an event to its client's thread, and calls it in order."""
        self.request = request
        self._dispatch = dispatch
        self._news = threading.Condition()
        self._arrived: deque[GenerationEvent] = deque()
        self._has_begun = False
        self._reader: Reader | None = None
        self._is_read_elsewhere = False
        self._is_lost = False
        self._cancelled = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask the engine to drop the row before its next step. Idempotent, from any thread."""
        self._cancelled.set()

    def put(self, event: GenerationEvent, *, may_wait: bool = False) -> None:
        """Deliver one event, soon or (`may_wait`) with the next one; called by the engine thread only."""
        self._dispatch(partial(self._deliver, event), may_wait=may_wait)

    def lose(self, error: KvserveError) -> None:
        """The last event, from any thread: the engine's may never come back. Whatever it still puts is dropped."""
        self._deliver(GenerationFailed(error), is_last=True)

    def batches(self, poll_seconds: float) -> Iterator[list[GenerationEvent]]:
        """Yield all events that have arrived since the last look, an empty list after `poll_seconds` without one, or
        `DECODING_POLL_SECONDS` where that is longer and tokens have begun to come.

        Ends after the list that holds the row's last event. One consumer.
        """
        while True:
            batch = self._take(poll_seconds)
            yield batch
            if batch and isinstance(batch[-1], GenerationDone | GenerationFailed):
                return

    def wait(self, seconds: float, read: Reader) -> None:
        """Wait for an event, as long as `batches` would. Tokens that arrive meanwhile are left to `read`, which is
        called on the thread that brings them: it wakes once for all streams, their own threads once for each."""
        with self._news:
            if self._arrived:
                return
            self._reader = read
            self._news.wait(self._longest_wait(seconds))
            self._reader = None
            while self._is_read_elsewhere:
                self._news.wait()

    def _deliver(self, event: GenerationEvent, *, is_last: bool = False) -> None:
        with self._news:
            if self._is_lost:
                return
            self._is_lost = is_last
            self._arrived.append(event)
            read = self._reader if isinstance(event, TokenDelta) else None
            if read is None:
                self._reader = None
                self._news.notify_all()
                return
            self._is_read_elsewhere = True
        goes_on = read()
        with self._news:
            self._is_read_elsewhere = False
            if not goes_on or self._reader is None:
                self._reader = None
                self._news.notify_all()

    def _take(self, poll_seconds: float) -> list[GenerationEvent]:
        with self._news:
            if not self._arrived and poll_seconds:
                self._news.wait(self._longest_wait(poll_seconds))
            batch = list(self._arrived)
            self._arrived.clear()
        if batch:  # a row whose batch broke begins again, with progress
            self._has_begun = isinstance(batch[-1], TokenDelta)
        return batch

    def _longest_wait(self, seconds: float) -> float:
        return max(seconds, DECODING_POLL_SECONDS) if self._has_begun else seconds


@dataclass(slots=True, eq=False)
class Row:
    """What the engine knows of one request. Times are `time.monotonic()` seconds, None until they happen.

    `on_end` frees its place, before its client hears of the end and may come again.
    `has_waited_for_row`: another row was computing what this one begins with, `has_come_from_disk`: it was read,
    `has_come_from_shared`: the shared cache gave it, `unshared`: why it gave no more.
    `answer_kept_from`: where the KV begins that was kept of its answer meanwhile, None as long as there is none.
    `progressed_at`: when it got its place, or something was computed for it or came from the disk last, and as much
    later as prompts stood still for streams since. `decoding_from`: when its prompt was computed, None while it is to
    be, also again; `seconds_decoded`: how long it decoded before that. `waits_again`: it was in a batch, and waits for
    room; `was_put_back`: it did so once, before its first token too.
    `first_token_seconds`: in about how long its first token comes, as far as is known. `num_overtaken`: how many rows
    that came later got a place before it.
    `num_memory_failures`: how often an allocation failed while it computed.
    `restorable_bytes`: so much of the kept KV it may use, beside what all rows hold. `moved_bytes`: where that is less
    than what is kept of it, so much moves out of the tree to it.
    `is_forgotten`: its owner was forgotten meanwhile, and nothing of it is kept. `logprobs` reads those of its
    tokens, None where its client does not ask; `drafts` is None where nothing is drafted. `trouble` is what its
    generator raised last, `failure` what the row itself is to blame for. `serial` names it among several ranks.
    """

    handle: RequestHandle
    on_end: Callable[[], None]
    constraints: tuple[GrammarProcessor | ThinkingLimiter, ...] = ()
    submitted_at: float = field(default_factory=time.monotonic)
    prefill_started_at: float | None = None
    first_token_at: float | None = None
    progressed_at: float = field(default_factory=time.monotonic)
    decoding_from: float | None = None
    first_token_seconds: float | None = None
    num_overtaken: int = 0
    num_cached_tokens: int = 0
    reuse: Reuse = Reuse()
    has_waited_for_row: bool = False
    has_come_from_disk: bool = False
    has_come_from_shared: bool = False
    unshared: Unshared | None = None
    answer_kept_from: int | None = None
    restorable_bytes: float = math.inf
    moved_bytes: float = 0.0
    is_forgotten: bool = False
    seconds_decoded: float = 0.0
    waits_again: bool = False
    was_put_back: bool = False
    generated: list[int] = field(default_factory=list)
    num_generator_failures: int = 0
    num_memory_failures: int = 0
    trouble: Exception | None = None
    failure: Exception | None = None
    is_over: bool = False
    serial: int = 0
    logprobs: LogprobReader | None = None
    drafts: RowDrafts | None = field(init=False)

    def __post_init__(self) -> None:
        drafter, grammars = self.request.drafter, [each for each in self.constraints if type(each) is GrammarProcessor]
        grammar = grammars[0] if grammars else None
        self.drafts = RowDrafts(self.request, drafter, grammar) if drafter is not None else None

    @property
    def request(self) -> GenerationRequest:
        return self.handle.request

    @property
    def has_begun(self) -> bool:
        """Whether it has computed: what it finds when it enters again may be its own."""
        return self.prefill_started_at is not None

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the row holds when it decodes: prompt and generated."""
        return len(self.request.prompt) + len(self.generated)

    def tokens(self) -> list[int]:
        """Prompt and generated ids: what a row re-enters from when its generator was discarded."""
        return [*self.request.prompt.ids, *self.generated]

    def begin_decoding(self) -> None:
        """Note that its prompt is computed; nothing where it was before."""
        self.decoding_from = self.decoding_from or time.monotonic()

    def decoding_seconds(self, now: float) -> float:
        """How long it decodes, and did before; its prompt does not count, nor what is computed of it again, nor any
        waiting."""
        return self.seconds_decoded + (now - self.decoding_from if self.decoding_from is not None else 0.0)

    def leave_batch(self) -> None:
        """Note that it has left its batch to enter again: what it lacks of its prompt is computed before it decodes."""
        self.seconds_decoded, self.decoding_from = self.decoding_seconds(time.monotonic()), None
        self.note_progress()

    def wait_again(self) -> None:
        """The same where it enters when there is room."""
        self.leave_batch()
        self.waits_again = self.was_put_back = True

    def end_wait(self) -> None:
        """Note that it has its place: it enters, for the first time or again."""
        self.waits_again = False
        self.note_progress()

    def note_progress(self) -> None:
        """Note that something was done for it just now."""
        self.progressed_at = time.monotonic()

    @property
    def answer_start(self) -> int:
        """Where the KV begins that is computed for its answer: the prompt's last token gives the first one."""
        return len(self.request.prompt) - 1

    def note_kept(self, start: int, end: int) -> None:
        """Note that the KV of its tokens `[start, end)` is kept; the prompt's part of it is not the answer's."""
        if self.answer_kept_from is None and start < end and end > len(self.request.prompt):
            self.answer_kept_from = max(start, self.answer_start)

    def report_progress(self, num_done_tokens: int) -> None:
        num_prompt_tokens = len(self.request.prompt)
        seconds = self.first_token_seconds if num_done_tokens < self.num_tokens - 1 else None  # it is there at once
        self.handle.put(
            PrefillProgress(num_done_tokens, num_prompt_tokens, self.num_cached_tokens, self.reuse, seconds)
        )

    def deliver(self, token: int) -> None:
        """Pass a generated token on to the client."""
        is_first = self.first_token_at is None
        if is_first:
            self.first_token_at = time.monotonic()
        logprobs = self.logprobs.take(self.num_tokens, token) if self.logprobs is not None else None
        self.generated.append(token)
        self.handle.put(TokenDelta(token, logprobs), may_wait=not is_first)

    def finish(self, reason: StopReason, *, num_hidden_tokens: int = 0) -> None:
        """Tell the client that the row is over; `num_hidden_tokens` were generated but not delivered (a stop token)."""
        self._end()
        now = time.monotonic()
        started = self.prefill_started_at or now
        first = self.first_token_at or now
        num_generated_tokens = len(self.generated) + num_hidden_tokens
        self.handle.put(
            GenerationDone(
                reason=reason,
                num_prompt_tokens=len(self.request.prompt),
                num_cached_tokens=self.num_cached_tokens,
                num_generated_tokens=num_generated_tokens,
                timing=GenerationTiming(started - self.submitted_at, first - started, now - first),
                drafting=self.drafts.drafting(num_generated_tokens) if self.drafts is not None else Drafting(),
            )
        )

    def fail(self, error: Exception) -> None:
        """Tell the client that the row failed; what is not ours already becomes an EngineFailure."""
        if not isinstance(error, KvserveError):
            error = EngineFailure(f"The model failed on this request: {type(error).__name__}: {error}")
        self._end()
        self.handle.put(GenerationFailed(error))

    def _end(self) -> None:
        self.is_over = True
        if self.drafts is not None:
            self.drafts.end(self.generated)
        self.on_end()


ANSWER_ALLOWANCE_TOKENS = 2048
"""An answer's share in a row's bytes at admission. Agents ask for 32,000 tokens and use a few hundred of them, so
reserving the whole `max_tokens` would leave most of the memory idle."""


def owner_of(row: Row) -> str:
    """Whose entry a row becomes: a branch of its owner's begins with its own system prompt and first user message."""
    prompt, starts = row.request.prompt, row.request.message_starts
    ends = (following.offset for start, following in pairwise(starts) if start.is_user)
    beginning = hashlib.sha256(pack(prompt, 0, next(ends, len(prompt))).ids).hexdigest()
    return f"{row.request.owner}/{beginning[:16]}"


def user_of(row: Row) -> str:
    """By whose name it is noted what a row used; "" where that owner was forgotten."""
    return "" if row.is_forgotten else row.request.owner


def request_owner(entry_owner: str) -> str:
    """The `owner` of the requests whose entry this is."""
    return entry_owner.rpartition("/")[0]


def tokens_of(row: Row) -> TokenSequence:
    """All tokens of a row: a row that enters a second time has generated some already."""
    prompt = row.request.prompt
    return TokenSequence((*prompt.ids, *row.generated), prompt.images) if row.generated else prompt


def admitted_tokens(row: Row) -> int:
    """How many tokens a row is admitted with, and has room for: its prompt and the usual share of an answer."""
    return len(row.request.prompt) + min(row.request.max_tokens, ANSWER_ALLOWANCE_TOKENS)


def expected_tokens(row: Row) -> int:
    """The same, or what it has already where that is more: a row that enters again has generated some."""
    return max(admitted_tokens(row), row.num_tokens + 1)


def outline(tokens: TokenSequence, starts: Sequence[MessageStart], *, needs_checkpoints: bool) -> PromptOutline:
    """What the plan needs to know of a prompt. A message ends where the next one begins; without checkpoints no stop
    depends on it, and a long history's ends are not put together."""
    ends = tuple(
        MessageEnd(following.offset, "user" if start.is_user else "assistant", start.is_user)
        for start, following in pairwise(starts if needs_checkpoints else ())
    )
    first_user = next((start.offset for start in starts if start.is_user), 0)
    is_led = bool(starts) and first_user > starts[0].offset
    return PromptOutline(len(tokens), ends, first_user if is_led else None, tokens.images)


def with_stop(stops: tuple[Stop, ...], packed_from: int | None, first: int, last: int) -> tuple[Stop, ...]:
    """The stops of a prefill from `first` to `last`, and the one where its KV is converted: no segment has both
    forms."""
    if packed_from is None or not first < packed_from <= last or any(stop.offset == packed_from for stop in stops):
        return stops
    return tuple(sorted((*stops, Stop(packed_from, "stride")), key=lambda stop: stop.offset))
