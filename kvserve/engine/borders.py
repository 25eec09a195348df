"""Where failures end in the engine: each border is named after what a failure costs there, and its caller says who
hears of it; and allocations that fail: how they are told from other failures, what is given up for a second try, and
what a client hears after it. It knows no model, no cache and no disk.

MLX raises RuntimeError: "[malloc] Unable to allocate N bytes." where the system gives nothing, "[metal::malloc]
Resource limit (N) exceeded." for too many buffers, "[metal::malloc] Attempting to allocate N bytes which is greater
than the maximum allowed buffer size of M bytes." for one buffer that no free memory would make possible, and "[METAL]
Command buffer execution failed: Insufficient Memory (...)" where the device itself runs out. On a CPU its allocator
does not look whether it was given anything, and the process ends: there is nothing to be caught.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from kvserve.engine.rows import Row, expected_tokens
from kvserve.errors import KvserveError, MemoryExhausted

ALL_BYTES = 2**60
"""More than there is: all KV that no row uses is evicted."""

_TEXTS = re.compile(r"\[(metal::|cuda::)?malloc|Unable to allocate|Insufficient Memory|out of memory", re.IGNORECASE)
_TOO_LARGE = "maximum allowed buffer size"


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def is_helped_by_room(error: Exception) -> bool:
    """Whether it may not fail again once memory is free: no buffer may be larger than the device allows."""
    return is_out_of_memory(error) and _TOO_LARGE not in str(error)


def client_error(error: Exception, num_bytes: float) -> Exception:
    """What the client of a row that needs so many bytes of KV hears of an error; any but a failed allocation as it
    is."""
    if isinstance(error, KvserveError) or not is_out_of_memory(error):
        return error
    return MemoryExhausted(
        f"This request needs about {num_bytes / 2**30:.2f} GiB of KV memory, and the device had no room for it beside "
        f"{mx.get_active_memory() / 2**30:.2f} GiB in use ({str(error).strip().splitlines()[0][:200]}).",
        retry_after_seconds=60,
    )


class ShortMemory:
    """What the engine does where an allocation fails: it gives up all KV that no row uses, once."""

    def __init__(
        self, make_room: Callable[[float], None], peak_bytes: Callable[[int], float], report: Callable[[str], None]
    ) -> None:
        """`make_room` evicts kept KV until so many bytes fit, `peak_bytes` says what a row of so many tokens needs."""
        self._make_room = make_room
        self._peak_bytes = peak_bytes
        self._report = report

    def with_second_try[T](self, work: Callable[[], T]) -> T:
        """What `work` returns; where an allocation fails in it, what it returns once memory is free. It is called twice
        then, so it must change nothing before it allocates. Raises what it raises."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_helped_by_room(error):
                raise
        self.free()  # out of the handler: the error has the frames, and so the arrays, in which it came up
        return work()

    def free(self) -> None:
        """Give up all KV that no row uses, and MLX's own cache of free buffers."""
        mx.clear_cache()
        try:
            self._make_room(ALL_BYTES)
        except (RuntimeError, MemoryError) as error:
            # A record of which a row needs a part is cut to size by copying that part; then it stays as it is.
            if not is_out_of_memory(error):
                raise
        mx.clear_cache()

    def may_begin_again(self, row: Row, error: Exception) -> bool:
        """Whether a row whose prefill raised may begin once more, from what is kept of it: after an allocation that
        failed, once. Memory is free then. The error lets go of its arrays."""
        error.with_traceback(None)
        if not is_helped_by_room(error) or row.num_memory_failures:
            return False
        row.num_memory_failures += 1
        again = f"request {row.request.request_id} is computed again from what is kept of it"
        self._report(f"Memory ran out in a prefill ({error}); kept KV that nobody uses was given up, and {again}.")
        self.free()
        return True

    def client_error(self, row: Row, error: Exception) -> Exception:
        """What a row's client hears of what its work raised."""
        return client_error(error, self._peak_bytes(expected_tokens(row)))


def described(error: Exception) -> str:
    """What a person reads of an unforeseen error."""
    return f"{type(error).__name__}: {error}"


@contextmanager
def engine_outlives(
    report: Callable[[str], None], trouble: str, then: Callable[[str], None] = lambda _reason: None
) -> Iterator[None]:
    """Work of the engine that no row can be blamed for: what it raises is reported as `trouble`, and `then` is called,
    as clients that wait must hear of the end."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the engine must outlive its own defects
        report(f"{trouble}: {described(error)}")
        then(described(error))


@contextmanager
def costs_no_row(report: Callable[[str], None], trouble: str) -> Iterator[None]:
    """Work on what is kept: what it raises is reported as `trouble`, and the rows continue with what there is."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, answers and neighbours have nothing to do with it
        report(f"{trouble}: {described(error)}")


@contextmanager
def row_fails_alone(row: Row, memory: ShortMemory, leave: Callable[[], None]) -> Iterator[None]:
    """Work for one row: its client hears of what it raises, then the row leaves."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - what one row cannot do touches no other
        row.fail(memory.client_error(row, error))
        leave()


@contextmanager
def costs_the_disk_only(tell: Callable[[str], None]) -> Iterator[None]:
    """Work with the KV on disk: what it raises is reported, and the rows continue without what the disk would have
    given or taken."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a defect here costs what the disk has, never a row or its room
        tell(described(error))


def guarded[**P, T](row: Row, call: Callable[P, T], instead: Callable[P, T]) -> Callable[P, T]:
    """Run a row's own code inside a step that it shares: an exception marks the row, the batch's step goes on."""

    def call_guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        if row.failure is None:
            try:
                return call(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - a row's failure must stay its own
                row.failure = error
        return instead(*args, **kwargs)

    return call_guarded


def finding[T](trial: Callable[[], T]) -> T | Exception:
    """What a trial gives, or why it failed: what cannot be done is not used, and who tries says so. The error lets go
    of the arrays of its frames."""
    try:
        return trial()
    except Exception as error:  # noqa: BLE001 - a class, family or checkpoint that is not known may raise anything
        return error.with_traceback(None)
