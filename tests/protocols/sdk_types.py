"""Bodies against the SDKs' own types, strictly: a missing field, a wrong type or an unknown field is a fault.

The SDKs read answers leniently (any field may be missing, unknown ones are kept): reading with a client shows no fault.
"""

import json
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, TypeAliasType, Union, get_args, get_origin

EXTENSIONS: Mapping[str, frozenset[str]] = {
    # thinking, as all local servers send it
    "ChatCompletionMessage": frozenset({"reasoning_content"}),
    "ChoiceDelta": frozenset({"reasoning_content"}),
    # the context limit, and what an alias stands for
    "Model": frozenset({"max_model_len", "root"}),
    # the API sends these two, though the SDK's types lack them
    "Response": frozenset({"store"}),
    "ResponseCustomToolCall": frozenset({"status"}),
    # drafted tokens, as chat/completions counts them
    "OutputTokensDetails": frozenset({"accepted_prediction_tokens", "rejected_prediction_tokens"}),
}
"""What answers hold beyond the SDKs' types, by the type that holds it: nothing else may be."""

NULLS = frozenset({("Completion", "finish_reason")})
"""Fields that are null where the SDK's type has no null: the API itself sends it so, in every chunk but the last."""


def faults(kind: Any, body: Mapping[str, Any]) -> list[str]:
    """What is wrong with a body that should be of an SDK's type or union of types; empty where nothing is."""
    from pydantic import TypeAdapter, ValidationError

    kind = _member(kind, body)
    try:
        value = TypeAdapter(kind).validate_json(json.dumps(body), strict=True)
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}"
            for each in error.errors()
            if each["input"] is not None or (kind.__name__, each["loc"][-1]) not in NULLS
        ]
    return list(_unknown(value, ""))


def _member(kind: Any, body: Mapping[str, Any]) -> Any:
    """The one type of a union that the body says it is, so that its faults are told and not those of all others."""
    while isinstance(kind, TypeAliasType) or get_origin(kind) is Annotated:
        kind = kind.__value__ if isinstance(kind, TypeAliasType) else get_args(kind)[0]
    if get_origin(kind) not in (Union, UnionType):
        return kind
    for member in get_args(kind):
        if body.get("type") in get_args(member.model_fields["type"].annotation):
            return member
    raise AssertionError(f"{kind} has no {body.get('type')}")


def _unknown(value: object, path: str) -> Iterator[str]:
    """The fields that the types do not have, extensions aside."""
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        name = type(value).__name__
        for key in (value.model_extra or {}).keys() - EXTENSIONS.get(name, frozenset()):
            yield f"{path}.{key}: {name} has no such field"
        for key in type(value).model_fields:
            yield from _unknown(getattr(value, key), f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(item, f"{path}[{index}]")
