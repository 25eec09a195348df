"""Starts the server: flags over environment over `.env`. Everything else is in `kvserve/process.py`."""

import sys

from kvserve.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
