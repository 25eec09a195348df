"""Log-probabilities: `tests/test_logprobs_http.py` with drafts at every step."""

from tests.test_logprobs_http import *
