"""From a command line to an exit code: a fast BLAS before anything that is slow, then the process. `start_llm.py` and
the command `kvserve` begin here.

It knows the order and nothing of a server.
"""

import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING

from kvserve.app.blas import preload_blas

if TYPE_CHECKING:
    from kvserve.observe.terminal import BannerFacts


def start(
    argv: Sequence[str],
    environ: MutableMapping[str, str],
    on_banner: "Callable[[BannerFacts], None] | None" = None,
) -> int:
    """Serve until a signal, with these flags; returns the exit code. `on_banner` is told what the banner says. The
    process may execute itself again, with the same arguments, before anything else happens."""
    try:
        try:
            preloading = preload_blas(argv, environ)
            from kvserve.app.process import main  # takes a while to import, and what was preloaded is executed again

            return main(argv, preloading, on_banner)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the help has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
