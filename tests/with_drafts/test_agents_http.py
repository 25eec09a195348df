"""Agents with a history: `tests/agents_api/test_http.py` with drafts at every step."""

from tests.agents_api.test_http import *
