"""Starts the server: flags over environment over `.env`. Everything else is in `kvserve/app.py`."""

import sys

from kvserve.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
