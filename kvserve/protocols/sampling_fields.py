"""Parses sampling fields, stop conditions and what else the endpoints that generate share."""

import json
from collections.abc import Mapping
from dataclasses import replace

from kvserve.core import SamplingParams
from kvserve.errors import BadRequest
from kvserve.protocols.fields import (
    MAX_TOKEN_COUNT,
    Fields,
    Reader,
    child_path,
    flag,
    integer,
    list_of,
    mapping,
    number,
    text,
)

NO_LIMIT = MAX_TOKEN_COUNT
"""The limit of an answer that may fill the context."""

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 512
MAX_BIASED_TOKENS = 1024

_MAX_TOKEN_DIGITS = 10


def _read_top_k(value: object, path: str) -> int:
    return max(0, integer(-1, MAX_TOKEN_COUNT)(value, path))  # -1 is the other common spelling of "off"


def _read_logit_bias(value: object, path: str) -> tuple[tuple[int, float], ...]:
    """{"token id": bias} -> pairs ordered by id; of two spellings of one id the last counts."""
    entries = mapping(value, path).values
    if len(entries) > MAX_BIASED_TOKENS:
        raise BadRequest(f"{path}: expected at most {MAX_BIASED_TOKENS} tokens, got {len(entries)}.", param=path)
    biases: dict[int, float] = {}
    for key, bias in entries.items():
        where = child_path(path, key)
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_TOKEN_DIGITS):
            raise BadRequest(f"{where}: expected a token id such as {path}.1234.", param=where)
        biases[integer(0, MAX_TOKEN_COUNT)(int(key), where)] = number(-100, 100)(bias, where)
    return tuple(sorted(biases.items()))


SAMPLING_FIELDS: Mapping[str, Reader[object]] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": _read_top_k,
    "min_p": number(0, 1),
    "repetition_penalty": number(0, 10, above=True),
    "repetition_context_size": integer(1, MAX_TOKEN_COUNT),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "seed": integer(-(2**63), 2**64 - 1),
    "logit_bias": _read_logit_bias,
}
"""The wire's names are the noun's."""

_TOLERATED: Mapping[str, Reader[object]] = {
    "user": text,
    "store": flag,
    "service_tier": text,
    "metadata": mapping,
    "verbosity": text,
}
"""Known fields that change nothing here; only their types are checked."""


def read_sampling(fields: Fields, defaults: SamplingParams) -> SamplingParams:
    """`defaults` with the request's values. Raises BadRequest."""
    said = {name: fields.optional(name, reader) for name, reader in SAMPLING_FIELDS.items()}
    changes: dict[str, object] = {name: value for name, value in said.items() if value is not None}
    return replace(defaults, **changes)  # type: ignore[arg-type]  # the table above gives each field its type


def read_stop_strings(fields: Fields, name: str = "stop") -> tuple[str, ...]:
    """The stop strings in a field: one string or several. Duplicates count once; an empty string, which clients send
    for none, is ignored. Raises BadRequest."""

    def read(value: object, path: str) -> list[str]:
        stops = list_of(text)(value, path) if isinstance(value, list) else [text(value, path)]
        stops = [stop for stop in stops if stop]
        if len(stops) > MAX_STOP_STRINGS or any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
            raise BadRequest(
                f"{path}: expected at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_CHARACTERS} characters.",
                param=path,
            )
        return stops

    return tuple(dict.fromkeys(fields.optional(name, read) or ()))


def _read_limit(value: object, path: str) -> int:
    """A limit; clients of local servers send -1 for no limit but the context."""
    return NO_LIMIT if value == -1 and not isinstance(value, bool) else integer(1, MAX_TOKEN_COUNT)(value, path)


def read_max_tokens(fields: Fields, *names: str) -> int | None:
    """The limit under any of `names`; None without one. Raises BadRequest for two different limits."""
    limits = {name: fields.optional(name, _read_limit) for name in names}
    said = {name: limit for name, limit in limits.items() if limit is not None}
    if len(set(said.values())) > 1:
        raise BadRequest(f"{' and '.join(said)} are both given and differ: give one of them.", param=names[-1])
    return next(iter(said.values()), None)


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """(stream, include_usage).

    `stream_options` without `stream` is tolerated, as proxies add it to every request; it then changes nothing.
    """
    stream = fields.optional("stream", flag) or False
    options = fields.optional("stream_options", mapping)
    include_usage = (options and options.optional("include_usage", flag)) or False
    return stream, stream and include_usage


def read_speculation(fields: Fields) -> bool:
    """Whether the answer's next tokens may be drafted: unless `speculation` is false. Raises BadRequest."""
    return fields.optional("speculation", flag) is not False


def refuse_unsupported(fields: Fields, harmless: Mapping[str, tuple[object, ...]]) -> None:
    """Raises BadRequest for a field that asks for something unsupported. `harmless` maps each such field to the values
    that ask for nothing, as null always does."""
    for name, values in harmless.items():
        value, path = fields.locate(name)
        asks_nothing = (value == known and isinstance(value, bool) == isinstance(known, bool) for known in values)
        if value is None or any(asks_nothing):
            continue
        allowed = " or ".join(json.dumps(known) for known in (*values, None))
        raise BadRequest(f"{path} is not supported by this server: leave it out or send {allowed}.", param=path)


def check_tolerated(fields: Fields) -> None:
    """Raises BadRequest if a known field that changes nothing has the wrong type."""
    for name, reader in _TOLERATED.items():
        fields.optional(name, reader)
