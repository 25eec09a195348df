"""Responses: `tests/test_responses_http.py` with drafts at every step."""

from tests.test_responses_http import *
