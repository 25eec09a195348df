"""A lock of an open file or folder, which ends with the process that has it."""

import errno
import fcntl
import time

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
"""What a volume without locks says. EBADF: a network share has no exclusive lock on what is open for reading only."""

POLL_SECONDS = 0.002


def wait_for_lock(descriptor: int, operation: int, seconds: float) -> bool:
    """Whether the lock could be had within so many seconds, or the volume has none. Raises the errors of `try_lock`."""
    until = time.monotonic() + seconds
    while try_lock(descriptor, operation) is False:
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def try_lock(descriptor: int, operation: int) -> bool | None:
    """Whether the lock (`fcntl.LOCK_SH` or `fcntl.LOCK_EX`) was taken; None on a volume without locks. Raises another
    OSError."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True
