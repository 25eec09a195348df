"""Servers that stop in the middle of answers: `tests/test_stopped_answers.py` with drafts at every step."""

from tests.test_stopped_answers import *
