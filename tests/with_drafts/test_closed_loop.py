"""Closed loops of chats: `tests/test_closed_loop.py` with drafts at every step."""

from tests.test_closed_loop import *
