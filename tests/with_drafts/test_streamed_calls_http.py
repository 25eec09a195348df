"""Calls as they are written: `tests/test_streamed_calls_http.py` with drafts at every step."""

from tests.test_streamed_calls_http import *
