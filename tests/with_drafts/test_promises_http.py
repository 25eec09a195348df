"""Strict tools, schemas and limits of thinking: `tests/test_promises_http.py` with drafts at every step."""

from tests.test_promises_http import *
