"""Tools that are added to a conversation: `tests/test_added_tools_http.py` with drafts at every step."""

from tests.test_added_tools_http import *
