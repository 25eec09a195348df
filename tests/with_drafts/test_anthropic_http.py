"""Anthropic's messages: `tests/test_anthropic_http.py` with drafts at every step."""

from tests.test_anthropic_http import *
