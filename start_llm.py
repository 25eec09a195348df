"""Starts the server: flags over environment over `.env`. Everything else is in `kvserve/app/start.py`; `kvserve serve`
is the same."""

import os
import sys

from kvserve.app.start import start

if __name__ == "__main__":
    sys.exit(start(sys.argv[1:], os.environ))
