"""How often hypothesis tries a law: moderately in every run, many times as often in `make long`. It knows no law."""

import os

_TIMES = int(os.environ.get("MORE_EXAMPLES", "1"))


def num_examples(in_every_run: int) -> int:
    """For `max_examples`: that many, times MORE_EXAMPLES of the environment."""
    return in_every_run * _TIMES
