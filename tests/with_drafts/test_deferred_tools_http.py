"""Tools that are searched for: `tests/test_deferred_tools_http.py` with drafts at every step."""

from tests.test_deferred_tools_http import *
