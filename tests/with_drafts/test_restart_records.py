"""Conversations that go on after a restart: `tests/test_restart_records.py` with drafts at every step."""

from tests.test_restart_records import *
