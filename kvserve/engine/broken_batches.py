"""What becomes of rows whose generator raised: which enter again from their tokens, and which one is to blame. It knows
no generator and runs no pass.
"""

from collections.abc import Sequence

from kvserve.engine.borders import client_error, is_out_of_memory
from kvserve.engine.decode_group import DecodeResult, had_room
from kvserve.engine.kv_size import KvSize
from kvserve.engine.rows import Row


def sent_back(rows: Sequence[Row], error: Exception, sizes: KvSize, *, is_excused: bool) -> DecodeResult:
    """What is left to do for rows that have lost their generator to an error; `is_excused`: none is to blame."""
    error.with_traceback(None)  # its frames have the arrays of the batch
    is_short = is_out_of_memory(error)
    if is_short:
        _blame_for_memory(rows, error, sizes, is_excused=is_excused)
    again: list[Row] = []
    failed: list[Row] = []
    for row in rows:
        row.trouble = error
        if not is_short and not is_excused:
            row.num_generator_failures += 1
            row.failure = row.failure or (error if row.num_generator_failures > 1 else None)
        (failed if row.failure is not None else again).append(row)
    return DecodeResult(failed=tuple(failed), evicted=tuple(again), is_short_of_memory=is_short)


def _blame_for_memory(rows: Sequence[Row], error: Exception, sizes: KvSize, *, is_excused: bool) -> None:
    """Note on these rows that an allocation failed while they computed. The first time none is to blame; after that
    the longest one, which takes most of the memory, so that the others can continue."""
    is_last = had_room(rows, error) and not is_excused
    for row in rows:
        row.num_memory_failures += 1
    if is_last:
        longest = max(rows, key=lambda row: row.num_tokens)
        longest.failure = longest.failure or client_error(error, sizes.peak(longest.num_tokens))
