"""What the tests of drafts share: a drafter that is led, rows that decode without an engine, and the law they hold:
with drafts an answer is the one without, and what is kept of it is what a cold row holds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from kvserve.core import Draft, GenerationDone, GenerationRequest, TokenDelta, TokenLogprobs
from kvserve.engine.batch_costs import BatchCosts, Hope
from kvserve.engine.decode import DecodePool
from kvserve.engine.decode_group import Decoder, ExtractedRow
from kvserve.engine.draft_nouns import DraftSupport
from kvserve.engine.draft_support import find_draft_support
from kvserve.engine.kv_buffers import flat_caches
from kvserve.engine.logits_processors import GrammarProcessor, LogprobReader, ThinkingLimiter
from kvserve.engine.model import LoadedModel
from kvserve.engine.pass_costs import MAX_PASS_TOKENS, PassCosts
from kvserve.engine.rows import RequestHandle, Row
from tests.engine.engines import prompt_of, request
from tests.starts import always_paying

NUM_TOKENS = 24
TOLERANCE = 1e-4
PROMPT = prompt_of(75, 3)
"""Longer than the windows of the tiny models, so that these are full."""

NEXT = prompt_of(4, 9)

type Spoilt = Callable[[int], bool]
"""Whether the token at this place of an answer is drafted wrongly."""

ACCEPTED: dict[str, Spoilt] = {
    "none": lambda place: True,
    "half": lambda place: place % 2 == 1,
    "most": lambda place: place % 5 == 3,
    "all": lambda place: False,
}


@dataclass(slots=True, eq=False)
class LedDrafter:
    """Knows an answer, and spoils some of it. `judged` has what it heard of its drafts."""

    answer: Sequence[int]
    is_spoilt: Spoilt = ACCEPTED["all"]
    width: int = 6
    judged: list[tuple[int, int]] = field(default_factory=list)
    num_followed: int = 0

    def follow(self, tokens: Sequence[int]) -> None:
        self.num_followed += len(tokens)

    def propose(self, max_num_tokens: int) -> Draft | None:
        first = self.num_followed
        right = self.answer[first : first + min(max_num_tokens, self.width)]
        tokens = [token ^ self.is_spoilt(first + place) for place, token in enumerate(right)]
        return Draft(tuple(tokens), (1.0,) * len(tokens), "conversation") if tokens else None

    def judge(self, draft: Draft, num_tried: int, num_accepted: int) -> None:
        self.judged.append((num_tried, num_accepted))


@dataclass(frozen=True, slots=True)
class Answered:
    """`left` is what the row held at its end, `seen` what its processors were shown at each place: how many tokens, and
    the last of them. Rows without processors have none."""

    tokens: tuple[int, ...]
    end: GenerationDone
    logprobs: tuple[TokenLogprobs | None, ...]
    left: ExtractedRow
    seen: tuple[tuple[int, ...], ...] = ()


@contextmanager
def drafts_tried() -> Iterator[None]:
    """Every draft is worth a pass, whatever the machine is doing."""

    def all_of(self: PassCosts, chances: Sequence[float], _tokens: int, num_again: int, *, goes_back: bool) -> int:
        return max(0, min(len(chances), self.max_width - 1 - num_again))

    def all_of_any(self: BatchCosts, hopes: Sequence[Hope], _tokens: int) -> int:
        return min(self.of(len(hopes)).max_width - 1, max(len(hope.chances) for hope in hopes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassCosts, "num_worth", all_of)
        patch.setattr(PassCosts, "is_worth_reading", lambda *_: True)
        patch.setattr(BatchCosts, "num_worth", all_of_any)
        patch.setattr(BatchCosts, "is_worth_reading", lambda *_: True)
        patch.setattr(BatchCosts, "may_leave_one_out", lambda *_: True)
        yield


_supports: dict[int, tuple[LoadedModel, DraftSupport]] = {}


def new_pool(model: LoadedModel) -> DecodePool:
    """A pool that knows what this model's caches allow, whatever passes take on a busy machine."""
    if id(model) not in _supports:
        with always_paying():
            _supports[id(model)] = (model, find_draft_support(model))
    pool = DecodePool(model, 4)
    pool._draft_support = _supports[id(model)][1]
    return pool


class BrokenStep(Exception):
    """A step failed, or sent rows back: a fault that was planted broke something, and no law noticed it."""


def row_of(each: GenerationRequest, constraints: Sequence[GrammarProcessor | ThinkingLimiter] = ()) -> Row:
    logprobs = LogprobReader(each.num_top_logprobs) if each.num_top_logprobs is not None else None
    return Row(RequestHandle(each), lambda: None, tuple(constraints), logprobs=logprobs)


def entered(pool: DecodePool, model: LoadedModel, row: Row) -> None:
    """Let a row decode as the scheduler does."""
    caches, ids = model.new_caches(), row.tokens()[:-1]
    model.module(mx.array([ids]), cache=caches)
    mx.eval([cache.state for cache in caches])
    if pool.make_way(row).failed:
        raise BrokenStep(row.failure or row.trouble)
    pool.enter(row, caches)


def answered(row: Row, left: ExtractedRow) -> Answered:
    """What the client of a row that is over has heard."""
    events = [event for batch in row.handle.batches(0) for event in batch]
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    end = events[-1]
    assert isinstance(end, GenerationDone), end
    return Answered(tuple(each.token for each in deltas), end, tuple(each.logprobs for each in deltas), left)


def run(pool: DecodePool, *rows: Row) -> list[Answered]:
    """Step until these rows are over."""
    left: dict[Row, ExtractedRow] = {}
    while len(left) < len(rows):
        step = pool.step()
        if step.failed or step.evicted:
            raise BrokenStep([row.failure or row.trouble for row in (*step.failed, *step.evicted)])
        left |= {each.row: each for each in step.finished}
    return [answered(row, left[row]) for row in rows]


def decoded(
    model: LoadedModel, each: GenerationRequest, constraints: Sequence[GrammarProcessor | ThinkingLimiter] = ()
) -> Answered:
    """A row by itself."""
    return decoded_together(model, [each], [constraints])[0]


def decoded_together(
    model: LoadedModel,
    requests: Sequence[GenerationRequest],
    constraints: Sequence[Sequence[GrammarProcessor | ThinkingLimiter]] | None = None,
) -> list[Answered]:
    """Rows that enter one after the other before the first step."""
    pool, seen = new_pool(model), dict[Row, list[tuple[int, ...]]]()
    rows = [row_of(*pair) for pair in zip(requests, constraints or [()] * len(requests), strict=True)]
    with drafts_tried(), listened(seen):
        for row in rows:
            entered(pool, model, row)
        found = run(pool, *rows)
    pool.discard()
    pairs = zip(found, (seen.get(row, []) for row in rows), strict=True)
    return [replace(each, seen=tuple(own[: len(each.tokens)])) for each, own in pairs]


_said: dict[tuple[int, GenerationRequest], tuple[LoadedModel, Answered]] = {}


def said_plainly(
    model: LoadedModel, each: GenerationRequest, constraints: Sequence[GrammarProcessor | ThinkingLimiter] = ()
) -> Answered:
    """What a row without drafts says by itself; without constraints it is computed once."""
    if constraints:
        return decoded(model, each, constraints)
    if (id(model), each) not in _said:
        _said[id(model), each] = model, decoded(model, each)
    return _said[id(model), each][1]


@contextmanager
def listened(seen: dict[Row, list[tuple[int, ...]]]) -> Iterator[None]:
    """`seen` gets what the processors of each row are shown."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "of", partial(_listening, seen, Decoder.of))
        yield


def _listening(
    seen: dict[Row, list[tuple[int, ...]]], real: Callable[..., Decoder], row: Row, vocab_size: int
) -> Decoder:
    """A row's own way to draw; where it has processors another one notes what they are shown."""
    decoder, own = real(row, vocab_size), seen.setdefault(row, [])

    def listen(tokens: mx.array, logits: mx.array) -> mx.array:
        own.append((len(tokens), *tokens[-3:].tolist()))  # type: ignore[arg-type, union-attr]
        return logits

    return replace(decoder, processors=[*decoder.processors, listen]) if decoder.processors else decoder


def with_drafts(each: GenerationRequest, plain: Answered, spoilt: str | Spoilt = "all") -> GenerationRequest:
    """The same request, whose drafter knows the answer, and more than is handed out of it."""
    is_spoilt = ACCEPTED[spoilt] if isinstance(spoilt, str) else spoilt
    return replace(each, drafter=LedDrafter([*plain.tokens, *each.stop_tokens, *PROMPT[:9]], is_spoilt))


def assert_same(found: Answered, plain: Answered) -> None:
    """The same was said, and ended for the same reason."""
    assert found.tokens == plain.tokens
    assert found.seen == plain.seen
    assert (found.end.reason, found.end.num_generated_tokens) == (plain.end.reason, plain.end.num_generated_tokens)
    for ours, theirs in zip(found.logprobs, plain.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert abs(ours.logprob - theirs.logprob) <= TOLERANCE
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def assert_kept(model: LoadedModel, left: ExtractedRow, *, may_have_moved: bool = False) -> None:
    """What a row leaves behind are its own tokens and no others, and a row that goes on from it is a cold one.

    One token more may be there, a stop token behind the answer that it ended: among the tokens, or only as a row of
    leaves that can be cut, where states were put back to before it. Fewer may be there of a row that is not over, whose
    states went back: the last ones go through the model with its next pass. `may_have_moved`: of a row that is handed
    its last token on its way to another generator that one is not there.
    """
    said, num_tokens = left.row.tokens(), len(left.tokens)
    is_stopped = left.row.is_over and len(left.row.generated) < left.row.request.max_tokens
    if is_stopped and num_tokens > len(said):
        assert left.tokens[-1] in left.row.request.stop_tokens
        assert left.tokens[:-1] == said
    else:
        assert left.tokens == said[:num_tokens]
        goes_back = any(type(leaf) is ArraysCache for leaf in flat_caches(left.caches))
        most_missing = MAX_PASS_TOKENS - 1 if goes_back and not left.row.is_over else 0
        assert len(said) - num_tokens <= max(most_missing, may_have_moved and left.row.is_over)
    for leaf in flat_caches(left.caches):
        if type(leaf) is KVCache and is_stopped and leaf.offset == len(said) + 1 > num_tokens:
            leaf.trim(1)
        assert getattr(leaf, "offset", num_tokens) == num_tokens, type(leaf)
    warm = model.module(mx.array([NEXT]), cache=left.caches)[0, -1]
    caches = model.new_caches()
    model.module(mx.array([left.tokens]), cache=caches)
    cold = model.module(mx.array([NEXT]), cache=caches)[0, -1]
    assert mx.abs(warm - cold).max().item() <= TOLERANCE * 10


def check_law(model: LoadedModel, each: GenerationRequest, accepted: Sequence[str] = tuple(ACCEPTED)) -> None:
    """With drafts of every acceptance the answer is the one without, and so is what is kept of it; also where what is
    drafted behind its end is what the model would go on with."""
    plain = decoded(model, each)
    assert_kept(model, plain.left)
    if not accepted:
        return
    longer = decoded(model, replace(each, max_tokens=each.max_tokens + 6))
    for name in accepted:
        found = decoded(model, with_drafts(each, longer, name))
        assert_same(found, plain)
        assert_kept(model, found.left)


def check_together(
    model: LoadedModel,
    requests: Sequence[GenerationRequest],
    accepted: Sequence[str | None],
    constraints: Callable[[int], Sequence[GrammarProcessor | ThinkingLimiter]] = lambda _: (),
) -> list[Answered]:
    """Each row says beside the others what it says alone and plainly, and leaves what a cold row holds. `accepted`: how
    much of each row's drafts is right, None for a row without. `constraints` makes those of a row."""
    places = range(len(requests))
    plain = [said_plainly(model, requests[place], constraints(place)) for place in places]
    drafted = [
        with_drafts(each, said, spoilt) if spoilt is not None else each
        for each, said, spoilt in zip(requests, plain, accepted, strict=True)
    ]
    found = decoded_together(model, drafted, [constraints(place) for place in places])
    for ours, theirs in zip(found, plain, strict=True):
        assert_same(ours, theirs)
        assert_kept(model, ours.left)
    return found


def ways_of_drawing() -> dict[str, GenerationRequest]:
    """Requests that draw in every way that a row may have of its own."""
    return {
        "greedy": request(PROMPT, NUM_TOKENS),
        "seeded": request(PROMPT, NUM_TOKENS, temperature=1.0, seed=7, top_p=0.9, min_p=0.01),
        "penalties": request(
            PROMPT,
            NUM_TOKENS,
            frequency_penalty=0.7,
            presence_penalty=0.3,
            repetition_penalty=1.1,
            logit_bias=((305, 2.0),),
        ),
        "logprobs": replace(request(PROMPT, NUM_TOKENS, temperature=0.8, seed=3), num_top_logprobs=3),
    }
