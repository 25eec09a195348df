"""Reads forms of other families with a parser function that is handed in; knows only its tags and its answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvserve.core import ToolSpec
from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import END, CallForm, NotACall, ParsedCall, Scan
from kvserve.output.tool_parsers.hermes import read_arguments
from kvserve.output.tool_parsers.json_text import read_json, write_json

type ForeignParse = Callable[[str, list[dict[str, object]] | None], object]


@dataclass(frozen=True, slots=True)
class ForeignCallForm:
    """`parse(text, tools)` reads the text between the first `open_tag` and the next `close_tag`.

    It returns one call as a dict with `name` and `arguments`, or a list of them; any error means that the text is not a
    call. An empty `close_tag` means the end of the turn.
    """

    open_tag: str
    close_tag: str
    parse: ForeignParse

    def form(self) -> CallForm:
        """This form for the splitter."""
        return CallForm("foreign", self.open_tag, self._scan, inner_tags=(self.close_tag,))

    def _scan(self, tools: Sequence[ToolSpec], _: CallDraft) -> Scan:
        """Read the whole text; the draft stays empty, because the parser needs all of it."""
        chars: list[str] = []
        while True:
            char = yield
            chars.append(char)
            if self._ends(chars):
                body = "".join(chars)
                return self._read(body[: len(body) - len(self.close_tag)], tools)
            if char == END:
                raise NotACall("the call is not finished")

    def _ends(self, chars: list[str]) -> bool:
        if not self.close_tag:
            return chars[-1] == END
        size = len(self.close_tag)
        return chars[-1] == self.close_tag[-1] and "".join(chars[-size:]) == self.close_tag

    def _read(self, text: str, tools: Sequence[ToolSpec]) -> list[ParsedCall]:
        try:
            answer = self.parse(text, [_wire_tool(tool) for tool in tools] or None)
        except Exception as error:  # a border: foreign code may raise anything, and the text is content then
            raise NotACall(f"{type(error).__name__}: {error}") from error
        items = answer if isinstance(answer, list) else [answer]
        if not items:
            raise NotACall("no call")
        return [_call(item) for item in items]


def _call(item: object) -> ParsedCall:
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(name, str) or not name:
        raise NotACall("the parser found no name")
    arguments = read_arguments(item.get("arguments", {}))
    try:
        read_json(write_json(arguments))
    except (TypeError, ValueError, RecursionError) as error:
        raise NotACall("the arguments are not JSON") from error
    return ParsedCall(name, arguments)


def _wire_tool(tool: ToolSpec) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
