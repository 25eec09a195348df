"""The order in which a set of tools first came. It knows when two tools are one as values, not how they are written."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from kvserve.core import ToolSpec


class ToolOrders:
    """The first order of at most `max_sets` sets, least recently used first. Its owner holds the lock."""

    def __init__(self, max_sets: int) -> None:
        self._max_sets = max_sets
        self._first: OrderedDict[tuple[bytes, tuple[str, ...]], tuple[ToolSpec, ...]] = OrderedDict()

    def as_seen(self, digest: bytes, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """The set as it first came. The digest is never trusted alone: the tools are compared as values."""
        key = digest, tuple(sorted(map(_spec_text, tools)))
        first = self._first.setdefault(key, tuple(tools))
        self._first.move_to_end(key)
        if len(self._first) > self._max_sets:
            self._first.popitem(last=False)
        return first

    def clear(self) -> None:
        """Forget all orders."""
        self._first.clear()


def _spec_text(tool: ToolSpec) -> str:
    """Equal for equal tools; unlike `==` it tells true, 1 and 1.0 apart."""
    value = [tool.name, tool.description, tool.parameters, tool.strict]
    return json.dumps(value, sort_keys=True, default=_as_dict)


def _as_dict(value: object) -> dict[object, object]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"no value of JSON: {type(value).__name__}")
