"""Where failures end in the engine: each border is named after what a failure costs there, and its caller says who
hears of it. It knows no model, no cache and no disk.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvserve.engine.out_of_memory import ShortMemory
from kvserve.engine.rows import Row


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
    """What a trial at load gives, or why it failed: what cannot be done is not used, and a note says so. The error lets
    go of the arrays of its frames."""
    try:
        return trial()
    except Exception as error:  # noqa: BLE001 - a class, family or checkpoint that is not known may raise anything
        return error.with_traceback(None)
