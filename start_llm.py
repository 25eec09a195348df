"""Starts the server: flags over environment over `.env`. Everything else is in `kvserve/app/process.py` and, before it,
in `kvserve/app/blas.py`."""

import os
import sys

from kvserve.app.blas import preload_blas

if __name__ == "__main__":
    try:
        try:
            preloading = preload_blas(sys.argv[1:], os.environ)
            from kvserve.app.process import main  # takes a while to import, and what was preloaded is executed again

            code = main(sys.argv[1:], preloading)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the help has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
