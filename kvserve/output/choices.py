"""Finds the values that a JSON schema enumerates, itself or through references and alternatives.

It knows schemas, no form of calls and no grammar.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvserve.core import JsonObject
from kvserve.output.enforced import Enforced, allowed
from kvserve.output.tool_parsers.arguments import choices_of, resolve, type_names, types_of

OF_TEXTS = ("minLength", "maxLength", "pattern", "format")
OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_LISTS = ("items", "prefixItems", "minItems", "maxItems")
OF_OBJECTS = ("properties", "required", "additionalProperties")
OF_SCHEMAS = ("$ref", "anyOf", "oneOf", "allOf")
UNSAID_OF_LISTS = ("additionalItems",)
UNSAID_OF_OBJECTS = ("patternProperties", "minProperties", "maxProperties")
"""Keywords that `%json` holds, and rules of our own do not."""

RESTRICTING = (
    *(*OF_TEXTS, *OF_NUMBERS, *OF_LISTS, *OF_OBJECTS, *OF_SCHEMAS),
    *(*UNSAID_OF_LISTS, *UNSAID_OF_OBJECTS),
)
"""What a schema may say of its values besides their type and an enumeration."""

ONLY_TYPES = frozenset(("type", "title", "description", "default", "examples"))
"""Keywords of a schema that allows or forbids by its type alone."""

_FEW: Mapping[object, tuple[object, ...]] = {"null": (None,), "boolean": (True, False)}
"""The values of types that have few."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The values of which one must be said; `untried` are keywords of the schema that some of them may not obey."""

    values: tuple[object, ...]
    untried: tuple[str, ...] = ()


def enumerated(schema: Mapping[str, object], root: JsonObject) -> Choices | None:
    """The values that a schema enumerates and that obey what else it says; None where it enumerates none. References
    are found in `root`."""
    return _Enumerations(root, {}).of(schema)


@dataclass(frozen=True, slots=True)
class _Enumerations:
    """`known` has what references were found to enumerate; one that is being looked at enumerates nothing."""

    root: JsonObject
    known: dict[str, Choices | None]

    def of(self, schema: Mapping[str, object]) -> Choices | None:
        found = self._own(schema) if choices_of(schema) is not None else self._of_others(schema)
        if found is None:
            return None
        types = types_of(schema, self.root)
        return Choices(tuple(each for each in found.values if type_names(each) & types), found.untried)

    def _own(self, schema: Mapping[str, object]) -> Choices:
        values = tuple(choices_of(schema) or ())
        beside = [key for key in (*RESTRICTING, *(("const",) if "enum" in schema else ())) if key in schema]
        if not beside:
            return Choices(values)
        shared = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        said = allowed(Enforced({**shared, **schema}, is_strict=False), values)
        return Choices(values, tuple(beside)) if said is None else Choices(tuple(said))

    def _of_others(self, schema: Mapping[str, object]) -> Choices | None:
        """What a reference, or alternatives, enumerate, where nothing else is said."""
        restricting = [key for key in RESTRICTING if key in schema]
        if len(restricting) != 1:
            return None
        match restricting[0], schema[restricting[0]]:
            case "$ref", str(reference):
                return self._referred(reference)
            case "anyOf" | "oneOf", [*parts]:
                found = list(self._each(parts))
            case "allOf", [part]:
                found = list(self._each([part]))
            case _:
                return None
        said = [each for each in found if each is not None]
        if not said or len(said) < len(found):
            return None
        values = {(type(value), repr(value)): value for each in said for value in each.values}
        return Choices(tuple(values.values()), tuple(key for each in said for key in each.untried))

    def _each(self, parts: list[object]) -> Iterator[Choices | None]:
        for part in parts:
            if not isinstance(part, Mapping):
                yield None
            elif part.keys() <= ONLY_TYPES and isinstance(part.get("type"), str) and part["type"] in _FEW:
                yield Choices(_FEW[part["type"]])
            else:
                yield self.of(part)

    def _referred(self, reference: str) -> Choices | None:
        if reference not in self.known:
            self.known[reference] = None
            found = resolve(reference, self.root)
            self.known[reference] = self.of(found) if isinstance(found, Mapping) else None
        return self.known[reference]
