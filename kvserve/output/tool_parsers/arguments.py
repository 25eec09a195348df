"""Converts argument values between bare text (GLM, Qwen-coder) and JSON, by the tool's schema.

These forms write strings as they are and everything else in a spelling: JSON, or Python's words (`None`) and objects.
So text is a string if the schema says string, a value in any spelling if it says another type, and, if it allows both
or says nothing, a value of an allowed type in the form's own spelling, else a string. Only then can a string be
mistaken: one that reads like such a value.

A value that can only be a string goes to the call's draft as it arrives, any other value when it is finished.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from kvserve.core import JSON_SPELLING, Spelling, ToolSpec
from kvserve.output.tool_parsers.chains import ChainEnd, NextKey, UnfinishedKey, text_before
from kvserve.output.tool_parsers.draft import CallDraft
from kvserve.output.tool_parsers.form import SPACE, Chain, NotACall, ParsedCall, Reader
from kvserve.output.tool_parsers.json_text import escaped, read_json, write_json
from kvserve.output.tool_parsers.own_text import read_own
from kvserve.output.tool_parsers.python_text import read_python

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
STRING = frozenset({"string"})
PYTHON_SPELLING = Spelling("True", "False", "None", is_python=True)
_MAX_DEPTH = 32
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_MAX_NUMBER_CHARS = 64


@dataclass(frozen=True, slots=True)
class OwnLines:
    """Whether one line end before a value, and one behind it, belongs to the form."""

    before: bool
    behind: bool


NO_LINES = OwnLines(before=False, behind=False)


class TypedArguments:
    """Reads the arguments of one call of the tool `name`."""

    def __init__(
        self,
        name: str,
        tools: Sequence[ToolSpec],
        draft: CallDraft,
        lines: OwnLines = NO_LINES,
        spelling: Spelling = JSON_SPELLING,
    ) -> None:
        self._name = name
        self._spelling = spelling
        self._schema = parameters_of(name, tools)
        self._draft = draft
        self._lines = lines
        self._values: dict[str, object] = {}
        self._occurs_twice = False

    @property
    def keys(self) -> frozenset[str]:
        """The keys that the tool's schema names, none where it allows others in so many words."""
        return closed_keys(self._schema)

    def open(self) -> None:
        """Note that the call is certain, before its first key."""
        self._draft.open(self._name)

    def break_off(self) -> None:
        """Begin the key that is not finished; its text stays held."""
        self._draft.write_before('"' if self._values else '{"')

    def read(
        self,
        key: str,
        *,
        more: NextKey,
        last: Sequence[Chain],
        may_lack_end: Sequence[Chain] = (),
        is_string: bool | None = None,
    ) -> Reader[ChainEnd]:
        """Reads the value of `key` up to the next key and its lead, or to one of the chains `last`. `is_string`: what
        the form itself says of the value."""
        value = self.begin(key, is_string=is_string)
        try:
            end = yield from text_before(last, value.put, may_lack_end=may_lack_end, next_key=more)
        except UnfinishedKey as cut:
            self.go_on(key, value, cut.source)
            self.break_off()
            raise
        except NotACall:
            value.break_off()
            raise
        if end.key is not None:
            self.go_on(key, value, end.key.source)
        else:
            self.keep(key, value, is_more=False)
        return end

    def begin(self, key: str, *, is_string: bool | None = None) -> "ArgumentValue":
        """Begins the value of `key`. `is_string`: what the form itself says of it."""
        self._draft.open(self._name)
        self._occurs_twice |= key in self._values
        if self._draft.is_open and self._occurs_twice:
            raise NotACall("an argument occurs twice")
        self._draft.write(f"{'' if self._values else '{'}{write_json(key)}: ")
        types = types_of(property_schema(self._schema, key), self._schema)
        if is_string is not None:
            said = STRING if is_string else JSON_TYPES - STRING
            types = types & said or said
        return ArgumentValue(self._draft, types, self._lines, self._spelling)

    def keep(self, key: str, value: "ArgumentValue", *, is_more: bool) -> None:
        """Keep a value that is whole; `is_more`: another argument follows."""
        self._values[key] = value.finish()
        if is_more:
            self._draft.write(", ")

    def go_on(self, key: str, value: "ArgumentValue", ahead: str) -> None:
        """Keep the value of `key`, behind which the next key stands in `ahead`; that stays held."""
        self.keep(key, value, is_more=True)
        self._draft.hold_again(ahead)

    def call(self) -> ParsedCall:
        """The whole call.

        Raises:
            NotACall: a key occurs twice; taking either value would drop the other.
        """
        if self._occurs_twice:
            raise NotACall("an argument occurs twice")
        self._draft.write("}" if self._values else "{}")
        return ParsedCall(self._name, self._values)


class ArgumentValue:
    """One value as it is written."""

    def __init__(self, draft: CallDraft, types: frozenset[str], lines: OwnLines, spelling: Spelling) -> None:
        self._draft = draft
        self._spelling = spelling
        self._types = types
        self._lines = lines
        self._text: list[str] = []
        self._waiting = ""
        self._is_string = types == {"string"}
        if self._is_string:
            draft.write('"')

    def put(self, text: str) -> None:
        """Add `text` to the value."""
        if text and self._lines.before and not self._text:
            self._text.append("")  # one line end before the value was looked for
            text = text.removeprefix("\n")
        self._text.append(text)
        # a longer beginning decides nothing that a shorter one did not
        if self._draft.is_open and text and (self._is_string or len(self._waiting) <= _MAX_NUMBER_CHARS):
            self._waiting += text
            self._write_certain()

    def _write_certain(self) -> None:
        certain = self._waiting.removesuffix("\n") if self._lines.behind else self._waiting
        if not self._is_string and certain and must_be_string(certain, self._types, self._spelling):
            self._is_string = True
            self._draft.write('"')
        if self._is_string:
            self._draft.write(escaped(certain))
            self._waiting = self._waiting[len(certain) :]

    def finish(self) -> object:
        """The whole value."""
        text = "".join(self._text)
        if self._lines.behind:
            text = text.removesuffix("\n")
        value = read_argument(text, self._types, self._spelling)
        self._draft.write('"' if self._is_string else write_json(value))
        return value

    def break_off(self) -> None:
        """Write an unfinished value as the beginning of a string."""
        self._draft.write(escaped(self._waiting) if self._is_string else '"' + escaped("".join(self._text)))


def closed_keys(schema: Mapping[str, object]) -> frozenset[str]:
    """The keys that a schema names, none where it allows others in so many words."""
    properties = schema.get("properties")
    is_open = schema.get("additionalProperties", False) is not False
    return frozenset(properties if isinstance(properties, Mapping) and not is_open else ())


def parameters_of(name: str, tools: Sequence[ToolSpec]) -> Mapping[str, object]:
    """The schema of the tool's arguments; empty if there is no such tool."""
    return next((tool.parameters for tool in tools if tool.name == name), {})


def property_schema(schema: Mapping[str, object], key: str) -> object:
    """The schema of one argument; empty without one."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties", {})


def types_of(schema: object, root: object) -> frozenset[str]:
    """The JSON types that `schema` allows, references resolved inside `root`; all of them if it names none."""
    return _types(schema, root, {}, 0)


def _types(schema: object, root: object, known: dict[str, frozenset[str]], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return JSON_TYPES
    types = JSON_TYPES
    match schema.get("type"):
        case str(declared):
            types &= {declared}
        case list(declared):
            types &= {name for name in declared if isinstance(name, str)}
    if "const" in schema:
        types &= type_names(schema["const"])
    match schema.get("enum"):
        case list(values):
            types &= frozenset[str]().union(*map(type_names, values))
    match schema.get("$ref"):
        case str(reference):
            if reference not in known:
                known[reference] = JSON_TYPES
                known[reference] = _types(resolve(reference, root), root, known, depth + 1)
            types &= known[reference]
    for keyword in ("anyOf", "oneOf", "allOf"):
        match schema.get(keyword):
            case [_, *_] as parts:
                each = [_types(part, root, known, depth + 1) for part in parts]
                types &= frozenset.intersection(*each) if keyword == "allOf" else frozenset.union(*each)
    return types | {"integer"} if "number" in types else types


def resolve(reference: str, root: object) -> object:
    """The schema that a reference names inside `root`; None if there is none."""
    start, *steps = reference.split("/")
    target = root if start == "#" else None
    for step in map(unquote, steps):
        match target:
            case Mapping():
                target = target.get(step.replace("~1", "/").replace("~0", "~"))
            case list() if step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            case _:
                return None
    return target


def choices_of(schema: Mapping[str, object]) -> Sequence[object] | None:
    """The values that a schema enumerates; None where it does not."""
    match (schema.get("enum"), "const" in schema):
        case ([_, *_] as choices, _):
            return choices
        case (_, True):
            return [schema["const"]]
    return None


def type_names(value: object) -> frozenset[str]:
    """The JSON types of `value`: a whole number is both `integer` and `number`."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"number", "integer"})
    if isinstance(value, float):
        return frozenset({"number"})
    names = {str: "string", type(None): "null", list: "array"}
    return frozenset({names.get(type(value), "object")})


def read_argument(text: str, types: frozenset[str], spelling: Spelling = JSON_SPELLING) -> object:
    """The value of `text` if `types` are allowed."""
    if types == {"string"}:
        return text
    if "string" not in types:
        return _read_other(text, types, spelling)
    if text and (text[0] in SPACE or text[-1] in SPACE):
        return text
    for word, meant in _words(spelling):
        if text == word:
            return meant if type_names(meant) & types else text
    try:
        value = read_python(text) if spelling.is_python else read_json(text)
    except ValueError:
        return text
    is_word = value is None or isinstance(value, bool)  # in another spelling than the form's
    return text if is_word or isinstance(value, str) or not type_names(value) & types else value


def _read_other(text: str, types: frozenset[str], spelling: Spelling) -> object:
    """The value of a text that should be no string, in whatever spelling; the text itself where it is in none."""
    for each in dict.fromkeys((spelling, PYTHON_SPELLING)):
        for word, value in _words(each):
            if text.strip() == word and type_names(value) & types:
                return value
    readers: list[Callable[[str], object]] = [read_json, *([read_python] if spelling.is_python else [])]
    if spelling.is_own:
        readers.append(lambda text: read_own(text, spelling))
    for read in readers:
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _words(spelling: Spelling) -> tuple[tuple[str, bool | None], ...]:
    return (spelling.null, None), (spelling.true, True), (spelling.false, False)


def must_be_string(text: str, types: frozenset[str], spelling: Spelling = JSON_SPELLING) -> bool:
    """Whether every value that begins with `text`, which is not empty, is read as a string where `types` are allowed.
    False also where that is not looked for, in a long number."""
    if "string" not in types:
        return False
    match text[0]:
        case "{":
            return "object" not in types
        case "[":
            return "array" not in types
        case "-" | "0" | "1" | "2" | "3" | "4" | "5" | "6" | "7" | "8" | "9":
            is_long = len(text) > _MAX_NUMBER_CHARS
            return not types & {"number", "integer"} or (not is_long and not _NUMBER_CHARS.issuperset(text))
    return not any(word.startswith(text) and type_names(value) & types for word, value in _words(spelling))


def write_argument(value: object, spelling: Spelling = JSON_SPELLING) -> str:
    """A string as it is, anything else in its spelling; `<` is escaped there, so that no tag can stand in it."""
    if isinstance(value, str):
        return value
    return spelling.written(value).replace("<", "\\x3c" if spelling.is_python else "\\u003c")
