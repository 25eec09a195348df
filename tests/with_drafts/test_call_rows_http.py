"""Forced calls in forms that were learned from templates: `tests/test_call_rows_http.py` with drafts at every step."""

from tests.test_call_rows_http import *
