"""Closed loops of Anthropic's and of Responses' clients: `tests/test_closed_loop_protocols.py` with drafts
at every step."""

from tests.test_closed_loop_protocols import *
