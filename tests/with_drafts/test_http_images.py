"""Answers about images: `tests/test_http_images.py` with drafts at every step."""

from tests.test_http_images import *
