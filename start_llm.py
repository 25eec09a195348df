"""Starts the server: flags over environment over `.env`. Everything else is in `kvserve/app/process.py`."""

import os
import sys

from kvserve.app.process import main

if __name__ == "__main__":
    try:
        try:
            code = main(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the help has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
