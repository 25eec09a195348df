"""Translates field names in errors that are raised behind the protocols, where fields have chat/completions' names.

A schema that no grammar can enforce, or a prompt that is too long, is found in code that does not know the protocol.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvserve.errors import RequestError

_SCHEMA = "response_format.json_schema.schema"
_PARAMETERS = re.compile(r"tools\[([0-9]+)\]\.function\.parameters")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """A request's own names of its messages, of its content's schema, and of the schema of each tool of its turn."""

    messages: str = "messages"
    schema: str = _SCHEMA
    parameters: Sequence[str] = ()

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Gives a passing RequestError the client's name of its field."""
        try:
            yield
        except RequestError as error:
            name = self._name_of(error.param or "")
            if error.param is not None and name is not None:
                error.message, error.param = error.message.replace(error.param, name), name
            raise

    def _name_of(self, param: str) -> str | None:
        if param == "messages":
            return self.messages
        if param == _SCHEMA:
            return self.schema
        tool = _PARAMETERS.fullmatch(param)
        return self.parameters[int(tool[1])] if tool is not None and int(tool[1]) < len(self.parameters) else None
