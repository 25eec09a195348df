"""Thinking that nobody asked for: `tests/test_unasked_thinking_http.py` with drafts at every step."""

from tests.test_unasked_thinking_http import *
