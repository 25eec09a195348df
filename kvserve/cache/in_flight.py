"""Which prefill in progress a new request waits for instead of computing the same tokens. Pure; it knows offsets only.

in flight   |----- computed -----|~~~~~ to come ~~~~~|
new         |-- usable --|                  ^ the prompts part here: the new request starts from there
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.cache.checkpoints import last_cut
from kvserve.cache.token_run import TokenRun, common_end, image_around, pack
from kvserve.core import TokenSequence

MIN_GAIN_TOKENS = 64
"""Below this a checkpoint costs more than the tokens that it saves."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A request in prefill: it has computed `num_done_tokens` and stored `num_stored_tokens` of its prompt.

    `prompt` is packed once per request. `stops` are offsets at which it will store what it has.
    """

    prompt: TokenRun
    num_done_tokens: int
    num_stored_tokens: int
    stops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until `rows[row]` has stored `offset` tokens; `is_new_stop`: it does not plan to stop there yet."""

    row: int
    offset: int
    is_new_stop: bool


def plan_wait(
    tokens: TokenSequence,
    num_usable_tokens: int,
    rows: Sequence[InFlight],
    *,
    needs_checkpoints: bool,
    cut_tokens: int = 1,
) -> Wait | None:
    """The request whose prefill will give this prompt the longest start beyond `num_usable_tokens`; None: start now.

    `rows` are in prefill and none of them waits, so waits never form a circle. Ask again when the wait is over, when
    the awaited request has ended, and for other requests that wait. It waits for a multiple of `cut_tokens`.
    """
    run = pack(tokens)
    best: Wait | None = None
    for number, row in enumerate(rows):
        wait = _wait_for(number, row, run, needs_checkpoints, cut_tokens)
        if wait is None or wait.offset - num_usable_tokens < MIN_GAIN_TOKENS:
            continue
        if best is None or wait.offset > best.offset:
            best = wait
    return best


def _wait_for(number: int, row: InFlight, run: TokenRun, needs_checkpoints: bool, cut_tokens: int) -> Wait | None:
    # Neither request prefills its last token, so the state behind it never exists in a prefill.
    limit = min(len(run), len(row.prompt)) - 1
    offset = common_end(run, row.prompt, 0, limit) if limit > 0 else 0
    if (image := image_around(run.images, offset)) is not None:
        offset = image.start
    offset = last_cut(offset, cut_tokens)
    if needs_checkpoints and offset < row.num_done_tokens:
        # The state at `offset` was overwritten unless it was stored: then the lookup has found it.
        return None
    if offset <= row.num_stored_tokens:
        return None
    is_new_stop = offset >= row.num_done_tokens and offset not in row.stops
    return Wait(number, offset, is_new_stop)
