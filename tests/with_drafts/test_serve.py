"""Channels, calls, promised forms, stop strings and counts: `tests/requests/test_serve.py` with drafts
at every step."""

from tests.requests.test_serve import *
