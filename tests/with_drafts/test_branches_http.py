"""Several agents in a session, clients that go back or leave: `tests/test_branches_http.py` with drafts
at every step."""

from tests.test_branches_http import *
