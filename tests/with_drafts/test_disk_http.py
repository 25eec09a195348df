"""KV on disk and servers that start again: `tests/test_disk_http.py` with drafts at every step."""

from tests.test_disk_http import *
