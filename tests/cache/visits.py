"""What an operation on the tree looks at, counted: nodes that it goes to, and tokens that it compares."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvserve.cache import token_run
from kvserve.cache.node import Node


@dataclass
class Visits:
    """Counts since the last `of`, on the thread that asks: the disk's own goes its way."""

    num_nodes: int = 0
    num_tokens: int = 0

    def of(self, call: Callable[[], object]) -> "Visits":
        """What a call looks at."""
        self.num_nodes = self.num_tokens = 0
        call()
        return Visits(self.num_nodes, self.num_tokens)


def counting(monkeypatch: pytest.MonkeyPatch) -> Visits:
    """Counts from now on each look from a node to its parent or its children, and each id that is compared."""
    visits, thread = Visits(), threading.get_ident()
    equal_ids = token_run._num_equal_ids

    def count_ids(one: bytes, other: bytes) -> int:
        if threading.get_ident() == thread:
            visits.num_tokens += len(one) // token_run.ID_BYTES
        return equal_ids(one, other)

    def counted(name: str) -> property:
        slot: Any = Node.__dict__[name]

        def read(node: Node) -> Any:
            if threading.get_ident() == thread:
                visits.num_nodes += 1
            return slot.__get__(node)

        return property(read, slot.__set__)

    for name in ("parent", "children"):
        monkeypatch.setattr(Node, name, counted(name))
    monkeypatch.setattr(token_run, "_num_equal_ids", count_ids)
    return visits
