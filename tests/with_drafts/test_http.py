"""Clients that leave, rows that fail, many at once: `tests/test_http.py` with drafts at every step."""

from tests.test_http import *
