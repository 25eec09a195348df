"""Random JSON schemas, many of them with keywords that no grammar holds, or broken ones."""

from hypothesis import strategies as st

LOOK_AROUND: dict[str, object] = {"type": "string", "pattern": "^(?!a)b"}

_words = st.sampled_from(["a", "b", "c"])
ODD_KEYWORDS: dict[str, st.SearchStrategy[object]] = {
    "uniqueItems": st.just(True),
    "not": st.just({"type": "null"}),
    "if": st.just({"properties": {"a": {"const": 1}}}),
    "then": st.just({"required": ["b"]}),
    "contains": st.just({"type": "string"}),
    "dependentRequired": st.just({"a": ["b"]}),
    "propertyNames": st.just({"maxLength": 3}),
    "unevaluatedProperties": st.just(False),
    "$comment": st.just("hello"),
    "format": st.sampled_from(["weird", "date"]),
    "x-anything": st.just({"pattern": "(?=x)"}),
}
"""Keywords that are dropped, known to nobody, or only words."""


def _strings() -> st.SearchStrategy[dict[str, object]]:
    patterns = st.sampled_from(["(?=x)", "^(?!a)", r"\bfoo\b", r"(a)\1", "^[ab]+$", "["])
    sizes = {"minLength": st.integers(0, 3), "maxLength": st.integers(0, 3)}
    return st.fixed_dictionaries({"type": st.just("string")}, optional={"pattern": patterns, **sizes})


def _numbers() -> st.SearchStrategy[dict[str, object]]:
    bounds = {"minimum": st.integers(-5, 5), "maximum": st.integers(-5, 5), "multipleOf": st.sampled_from([0, 2, 3])}
    return st.fixed_dictionaries({"type": st.sampled_from(["integer", "number"])}, optional=bounds)


def _holders(inner: st.SearchStrategy[dict[str, object]]) -> st.SearchStrategy[dict[str, object]]:
    references = st.sampled_from(["#/$defs/here", "#/$defs/gone", "other.json"]).map(lambda to: {"$ref": to})
    part = inner | references
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(_words, part, min_size=1, max_size=3)},
        optional={"required": st.lists(_words, max_size=2, unique=True), "additionalProperties": st.just(False)},
    )
    arrays = st.fixed_dictionaries({"type": st.just("array"), "items": part}, optional={"maxItems": st.integers(0, 2)})
    choices = st.fixed_dictionaries({"anyOf": st.lists(part, min_size=1, max_size=2)})
    either = st.fixed_dictionaries({"oneOf": st.lists(part, min_size=1, max_size=2)})
    return st.tuples(objects | arrays | choices | either, _some_odd()).map(lambda both: both[1] | both[0])


@st.composite
def _some_odd(draw: st.DrawFn) -> dict[str, object]:
    names = draw(st.lists(st.sampled_from(sorted(ODD_KEYWORDS)), max_size=2, unique=True))
    return {name: draw(ODD_KEYWORDS[name]) for name in names}


_leaves: st.SearchStrategy[dict[str, object]] = st.one_of(
    _strings(),
    _numbers(),
    st.just({"enum": ["x", 1, None]}),
    st.just({"enum": []}),
    st.just({"const": {"a": "b"}}),
    st.just({"type": "boolean"}),
    st.just({"type": "objekt"}),
)
_bodies = st.recursive(_leaves, _holders, max_leaves=6)
schemas = st.builds(lambda body, here: body | {"$defs": {"here": here}}, _bodies, _leaves)
