"""Reuse against an oracle: `tests/test_reuse_oracle.py` with drafts at every step."""

from tests.test_reuse_oracle import *
