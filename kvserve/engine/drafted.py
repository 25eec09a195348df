"""Decoding one row whose next tokens are guessed: a generator with room for one row, which puts the pending token and a
draft through the model in one pass (speculative decoding: Leviathan et al. 2023; drafts without a model: Saxena 2023).

At each place of the draft the row's own processors and sampler draw, in order, for as long as they draw what was
drafted: so what is drawn is the model's, and nobody has seen a token that is not the row's. Then the caches come back
(`retreat`). Where nothing is drafted a step is the one of `SoloGenerator`: the next pass is described before the token
of the last one is read. So the first token of a draft may be the pending one, and it is dropped where that is another.

Between two steps `tokens` are all that was handed out, and the caches hold these but for the `behind`, which go through
the model at the beginning of the next pass.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import KVCache, TokenBuffer

from kvserve.core import Draft
from kvserve.engine.kv_buffers import flat_caches, num_slots, with_leaves
from kvserve.engine.pass_costs import PassCosts
from kvserve.engine.prefill import reserve
from kvserve.engine.quantised import TOKEN_AXIS, PackedCache
from kvserve.engine.retreat import Retreat, Way
from kvserve.engine.row_drafts import RowDrafts
from kvserve.engine.sampling import LogitsProcessor, Sampler
from kvserve.engine.solo import CLEAR_EVERY_TOKENS, Response
from kvserve.engine.verified import draw, drawn_in_order, right_of


@dataclass(slots=True, eq=False)
class DraftedRow:
    """The row that decodes. `pending` (1,) comes next; `known` is it where it has been read. `num_left` tokens may be
    handed out yet. `stop_at`: no draft goes beyond so many tokens of KV. `is_private`: its sampler draws one token a
    call. `has_failed` says whether one of its own processors raised.

    It has begun once the last prompt token has gone through the model.
    """

    caches: list[Any]
    tokens: list[int]
    pending: mx.array
    num_left: int
    sampler: Sampler
    processors: Sequence[LogitsProcessor]
    drafts: RowDrafts
    is_private: bool = False
    stop_at: int | None = None
    has_failed: Callable[[], bool] = lambda: False
    known: int | None = None
    behind: list[int] = field(default_factory=list)
    has_begun: bool = False
    is_even: bool = False
    """Whether the last step was a plain one, so that the time of this one is that of a pass."""
    began_at: float | None = None
    """When the pass under way began, of one token, where the row's last one was done by then."""
    left_at: float = 0.0
    """When the token before the pending one was read, of a plain step: its pass was done, and that of the pending one
    began."""
    context: Any = field(init=False)  # TokenBuffer, which is not typed

    def __post_init__(self) -> None:
        self.context = TokenBuffer(self.tokens)  # type: ignore[no-untyped-call]

    @property
    def num_held(self) -> int:
        """Tokens that the caches hold."""
        return len(self.tokens) - len(self.behind)

    def read(self) -> int:
        """The pending token; waits for it."""
        if self.known is None:
            self.known = _waited_for(self.pending)
        return self.known

    def draw(self, taken: mx.array, logits: mx.array) -> mx.array:
        """What follows `taken` (1,), by these logits (1, vocabulary): a token (1,), not computed."""
        return draw(taken, logits, self.context, self.processors, self.sampler)


class DraftedGenerator:
    """Decodes one row at a time; rows of several generators take turns. Every method but `close` may run the model."""

    def __init__(
        self, module: Callable[..., Any], ways: Sequence[Way], costs: PassCosts, send: Callable[[], None]
    ) -> None:
        """`module(tokens (1, n), cache=caches)` gives logits (1, n, vocabulary). `send` is called where a pass is
        waited for before the next one is described: clients may have what came before."""
        self._module = module
        self._send = send
        self._ways = ways
        self._costs = costs
        self._row: DraftedRow | None = None
        self._uid = -1
        self._uids = count()

    def insert(self, row: DraftedRow) -> int:
        """Take a row in, whose `pending` is its last token and whose caches hold all `tokens` before it; its uid."""
        if self._row is not None:
            raise ValueError("This generator decodes a row already.")
        self._row, self._uid = row, next(self._uids)
        return self._uid

    def next(self) -> tuple[list[Any], list[Response]]:
        """The row's next tokens. Its first call puts the last prompt token through the model and answers nothing.

        The first list is always empty: it is where `BatchGenerator` reports prefills.
        """
        if (row := self._row) is None:
            return [], []
        with mx.stream(generation_stream):
            _make_room(row)
            if (found := self._draft_for(row)) is not None:
                drawn = self._verify(row, *found)
            elif row.known is not None and row.has_begun and self._ends_before(row, row.known):
                return [], [self._ended_before(row, row.known)]
            else:
                drawn = self._step(row)
        if not row.has_begun:
            row.has_begun = True
            return [], []
        return [], self._responses(row, drawn)

    def drawn_token(self, uid: int) -> mx.array | None:
        """What the row's next step will hand out; None before its last prompt token has gone through the model."""
        row = self._row
        return row.pending[0] if row is not None and uid == self._uid and row.has_begun else None

    def catch_up(self) -> None:
        """Let the caches hold all that was handed out."""
        if (row := self._row) is not None and row.behind:
            with mx.stream(generation_stream):
                logits = self._module(mx.array([row.behind]), cache=row.caches)
                mx.eval(logits[:, -1, :1], [leaf.state for leaf in flat_caches(row.caches)])
            row.behind = []

    def leaves_before(self) -> tuple[list[int], list[Any]]:
        """The uid and the leaves of a row that has begun, before the next step; nothing of another."""
        row = self._row
        return ([self._uid], flat_caches(row.caches)) if row is not None and row.has_begun else ([], [])

    def extract_cache(self, uids: Sequence[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Rows' caches between two steps, as views where tokens can be told apart, and the tokens that these hold."""
        row = self._row
        if row is None or self._uid not in uids:
            return {}
        return {self._uid: (with_leaves(row.caches, _looked_at), row.tokens[: row.num_held])}

    def remove(self, uids: Sequence[int], return_prompt_caches: bool = False) -> dict[int, tuple[list[Any], list[int]]]:
        """Take rows out between two steps; with `return_prompt_caches` their caches and the tokens these hold."""
        row = self._row
        if row is None or self._uid not in uids:
            return {}
        self._row = None
        return {self._uid: (row.caches, row.tokens[: row.num_held])} if return_prompt_caches else {}

    def close(self) -> None:
        """Let go of the row."""
        self._row = None

    # --- a step -----------------------------------------------------------------------------------------------------

    def _step(self, row: DraftedRow) -> list[int]:
        """Put the pending token through the model and begin to compute the one after it; the pending one."""
        started, was_known = perf_counter(), row.known is not None
        width, taken = len(row.behind) + 1, row.pending
        inputs = mx.concatenate([mx.array(row.behind, dtype=taken.dtype), taken]) if row.behind else taken
        logits = self._module(inputs[None], cache=row.caches)[:, -1, :]
        self._costs.note_described(perf_counter() - started)
        if row.behind:
            row.drafts.seconds_saved -= self._costs.seconds_more(width, len(row.tokens))
        row.behind = []
        row.pending = row.draw(taken, logits)
        mx.async_eval(row.pending)  # type: ignore[no-untyped-call]
        row.began_at = perf_counter() if was_known and width == 1 else None
        token = row.known if row.known is not None else _waited_for(taken)
        row.known = None
        if row.is_even and not was_known and width == 1:
            self._note_plain(row, row.left_at, started)
        row.is_even, row.left_at = not was_known, perf_counter()
        row.tokens.append(token)
        return [token]

    def _note_plain(self, row: DraftedRow, began_at: float, asked_at: float) -> None:
        """Learn from a pass that began then and was read just now, where it was waited for most of its time: behind
        another row's prefill, or what a draft took, it would long be done."""
        seconds = perf_counter() - began_at
        if perf_counter() - asked_at > seconds / 2:
            self._costs.note(1, len(row.tokens), seconds)
            row.drafts.note_step(seconds)

    def _verify(self, row: DraftedRow, draft: Draft, tokens: Sequence[int], num_given: int) -> list[int]:
        """Put the pending token and drafted ones through the model; the tokens that are handed out for it."""
        started, pending = perf_counter(), row.read()
        inputs = [*row.behind, pending, *tokens]
        retreat = Retreat.before(flat_caches(row.caches), self._ways)
        logits = self._module(mx.array([inputs]), cache=row.caches)[0, len(row.behind) :]
        drawn = self._drawn(row, logits, tokens, started, len(inputs))
        num_accepted = len(drawn) - 1
        handed_out = [pending, *drawn[:-1]]
        row.tokens += handed_out
        num_kept = len(row.behind) + len(handed_out)
        again = [*row.behind, *handed_out]
        num_held = retreat.back(len(inputs), num_kept) if num_kept < len(inputs) else num_kept
        row.behind = again[num_held:]
        row.known, row.pending = drawn[-1], mx.array(drawn[-1:], dtype=mx.uint32)
        row.is_even = False
        row.drafts.judge(draft, num_given + len(tokens), num_given + num_accepted, num_given=num_given)
        return handed_out

    def _drawn(self, row: DraftedRow, logits: mx.array, draft: Sequence[int], started: float, width: int) -> list[int]:
        """What is drawn by logits (tokens, vocabulary) at each place, for as long as that was drafted, and the token
        that is drawn instead, or behind all of it."""
        if row.is_private or row.processors:
            mx.eval(logits)
            drawn = drawn_in_order(row.draw, row.pending, draft, logits, row.has_failed)
        else:
            drawn = right_of(row.draw(row.pending, logits).tolist(), draft)  # type: ignore[arg-type]
        seconds = perf_counter() - started  # with its draws, as a plain step has its own
        self._costs.note(width, len(row.tokens), seconds)
        plain_seconds = self._costs.seconds(1, len(row.tokens)) or 0.0
        row.drafts.seconds_saved += len(drawn) * plain_seconds - seconds
        return drawn

    def _responses(self, row: DraftedRow, tokens: Sequence[int]) -> list[Response]:
        """A response for each token; with the row's last one it leaves. A draft has no token behind that one."""
        responses: list[Response] = []
        for token in tokens:
            row.num_left -= 1
            is_stop = token in row.drafts.request.stop_tokens
            finish_reason = "stop" if is_stop else "length" if row.num_left <= 0 else None
            if finish_reason is not None:
                self._row = None
                return [*responses, Response(self._uid, token, finish_reason, row.caches, row.tokens)]
            responses.append(Response(self._uid, token))
        if len(row.tokens) // CLEAR_EVERY_TOKENS > (len(row.tokens) - len(tokens)) // CLEAR_EVERY_TOKENS:
            mx.clear_cache()
        return responses

    def _ends_before(self, row: DraftedRow, token: int) -> bool:
        """Whether later prompts do not have this stop token, and caches cannot be cut back from behind it. Where they
        can, the row ends as one without drafts does: what is kept must not depend on how long passes take."""
        return row.drafts.is_other_stop(token) and not {"hold", "window"}.isdisjoint(self._ways)

    def _ended_before(self, row: DraftedRow, stop: int) -> Response:
        """The end of a row with a stop token that later prompts do not have: its caches hold all before it."""
        self.catch_up()
        self._row = None
        return Response(self._uid, stop, "stop", row.caches, row.tokens, holds_token=False)

    # --- drafts -----------------------------------------------------------------------------------------------------

    def _draft_for(self, row: DraftedRow) -> tuple[Draft, list[int], int] | None:
        """A draft, those of its tokens that are worth a pass, which follow the pending one, and how many before these
        were drawn already; None where a plain step is as good. Reads the pending token where it has to."""
        if not row.has_begun or (most := self._most_tokens(row)) < 1:
            return None
        if row.known is None:
            row.drafts.follow(row.tokens)
            draft = row.drafts.propose(None, most + 1)
            if draft is not None:
                if not (num_worth := self._num_worth(row, draft.chances[1:])):
                    return None
                chance, *chances = draft.chances[: num_worth + 1]
                if not self._costs.is_worth_reading(chance, chances, len(row.tokens)):
                    return None
                if row.read() == draft.tokens[0]:
                    return draft, list(draft.tokens[1 : 1 + num_worth]), 1
                row.drafts.judge(draft, 1, 0, num_given=1)
            elif row.drafts.wants_pending:
                self._wait(row)
            else:
                return None
        pending = row.read()
        if pending in row.drafts.request.stop_tokens:
            return None
        row.drafts.follow(row.tokens, pending)
        draft = row.drafts.propose(pending, most)
        if draft is None or not (num_worth := self._num_worth(row, draft.chances)):
            return None
        return draft, list(draft.tokens[:num_worth]), 0

    def _wait(self, row: DraftedRow) -> None:
        """Read the pending token; its pass tells what a plain step takes where it was one."""
        self._send()
        asked_at = perf_counter()
        row.read()
        if row.began_at is not None:
            self._note_plain(row, row.began_at, asked_at)

    def _num_worth(self, row: DraftedRow, chances: Sequence[float]) -> int:
        costs, goes_back = self._costs, "hold" in self._ways
        return costs.num_worth(chances, len(row.tokens), len(row.behind), goes_back=goes_back)

    def _most_tokens(self, row: DraftedRow) -> int:
        """How many tokens may be drafted: no more than the answer may have, fit into the buffers, or end where the form
        of the KV changes."""
        most = min(self._costs.max_width - 1 - len(row.behind), row.num_left - 1)
        num_used = len(row.tokens) + 1
        if row.stop_at is not None and num_used <= row.stop_at:
            most = min(most, row.stop_at - num_used)
        slots = _num_slots(row.caches)
        return most if slots is None else min(most, slots - num_used)


def _waited_for(token: mx.array) -> int:
    """A token (1,), once the pass that it comes from is computed."""
    return int(token.item())  # type: ignore[arg-type]


def _num_slots(caches: Sequence[Any]) -> int | None:
    """For how many tokens the buffers have room that are written in place; None where there are none."""
    for leaf in flat_caches(caches):
        if type(leaf) is KVCache and (keys := leaf.keys) is not None:
            return int(keys.shape[2])
        if isinstance(leaf, PackedCache) and leaf.rows:
            return int(leaf.rows[0].shape[TOKEN_AXIS])
    return None


def _make_room(row: DraftedRow) -> None:
    """Let the buffers grow where they have no room for the pending token."""
    slots = _num_slots(row.caches)
    if slots is not None and slots < len(row.tokens) + 1:
        reserve(row.caches, num_slots(len(row.tokens) + 1))


def _looked_at(leaf: Any) -> Any:
    """What a cache holds now, whatever is written later: rows of tokens as views, so that they can be written in place
    once nobody looks any more."""
    if type(leaf) is KVCache:
        twin: Any = KVCache()  # type: ignore[no-untyped-call]
        if (keys := leaf.keys) is not None and (values := leaf.values) is not None:
            twin.keys, twin.values = keys[..., : leaf.offset, :], values[..., : leaf.offset, :]
        twin.offset = leaf.offset
        return twin
    if isinstance(leaf, PackedCache):
        return PackedCache(leaf.scheme, tuple(array[..., : leaf.offset, :] for array in leaf.rows), leaf.offset)
    return deepcopy(leaf)
