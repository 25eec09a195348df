"""Argument values that are written as bare text (GLM, Qwen-coder): text to JSON value and back by the tool's schema.

Both forms write strings as they are and everything else as JSON. So text is read as a string where the schema says
string, as JSON where it says something else, and, where it allows both or says nothing, as JSON if it is a JSON value
of an allowed type other than string. Only there can a string be taken for something else: one that reads like JSON.
"""

from collections.abc import Mapping, Sequence

from kvserve.core import ToolSpec
from kvserve.output.tool_parsers.form import SPACE, NotACall, ParsedCall
from kvserve.output.tool_parsers.json_text import read_json, write_json

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_PYTHON_LITERALS: Mapping[str, tuple[object, str]] = {
    "True": (True, "boolean"),
    "False": (False, "boolean"),
    "None": (None, "null"),
}
_MAX_DEPTH = 32


def typed_call(name: str, values: Sequence[tuple[str, str]], tools: Sequence[ToolSpec]) -> ParsedCall:
    """The call whose arguments were written as `values`, typed by the schema of the tool `name`.

    Raises:
        NotACall: a key stands there twice; taking either value would drop the other.
    """
    schema = parameters_of(name, tools)
    arguments = {key: read_argument(text, types_of(property_schema(schema, key), schema)) for key, text in values}
    if len(arguments) < len(values):
        raise NotACall("an argument occurs twice")
    return ParsedCall(name, arguments)


def parameters_of(name: str, tools: Sequence[ToolSpec]) -> Mapping[str, object]:
    """The schema of the tool's arguments; empty if there is no such tool."""
    return next((tool.parameters for tool in tools if tool.name == name), {})


def property_schema(schema: Mapping[str, object], key: str) -> object:
    """The schema of one argument; empty where nothing is said of it."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties", {})


def types_of(schema: object, root: object) -> frozenset[str]:
    """The JSON types that `schema` allows, references resolved inside `root`; all of them where it does not say."""
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
                known[reference] = _types(_resolve(reference, root), root, known, depth + 1)
            types &= known[reference]
    for keyword in ("anyOf", "oneOf", "allOf"):
        match schema.get(keyword):
            case [_, *_] as parts:
                each = [_types(part, root, known, depth + 1) for part in parts]
                types &= frozenset.intersection(*each) if keyword == "allOf" else frozenset.union(*each)
    return types | {"integer"} if "number" in types else types


def _resolve(reference: str, root: object) -> object:
    target = root if reference.startswith("#") else None
    for step in reference[1:].split("/")[1:]:
        if not isinstance(target, Mapping):
            return None
        target = target.get(step.replace("~1", "/").replace("~0", "~"))
    return target


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


def read_argument(text: str, types: frozenset[str]) -> object:
    """The value that `text` stands for where `types` are allowed."""
    if types == {"string"}:
        return text
    exact = "string" in types
    if exact and text and (text[0] in SPACE or text[-1] in SPACE):
        return text
    if not exact and text.strip() in _PYTHON_LITERALS and _PYTHON_LITERALS[text.strip()][1] in types:
        return _PYTHON_LITERALS[text.strip()][0]
    try:
        value = read_json(text)
        fits = not isinstance(value, str) and bool(type_names(value) & types)
    except ValueError:
        return text
    return value if fits or not exact else text


def write_argument(value: object) -> str:
    """A string as it is, anything else as JSON; `<` is escaped in JSON, so that no tag can stand in it."""
    return value if isinstance(value, str) else write_json(value).replace("<", "\\u003c")
