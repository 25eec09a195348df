"""How far a long piece of work is. It knows bytes, not what is done with them."""

from collections.abc import Callable

type TellBytes = Callable[[int, int], None]
"""Takes how many bytes are done, and of how many."""
