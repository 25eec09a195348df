"""Whether two models have the same tokenizer, so that one may draft for the other: token by token, not by their number.
It knows tokenizers, no models.
"""

from collections.abc import Iterator, Mapping

import tokenizers

from kvserve.prompt.tokenizer import Tokenizer

PROBES = (
    "Hello, world! It's 12,345.67 o'clock\u2014isn't it?",
    "def f(x):\n\treturn  [x**2 for _ in range(10)]  # \u00e9\u00df\u4e2d\u6587\U0001f600\n\n",
    " leading, trailing \r\n\r\n  and   inner   blanks ",
)
"""Texts that tokenizers with one vocabulary still take apart in different ways: by their merges, how they split, and
what they do with blanks, digits, accents and what stands for itself."""


def first_difference(own: Tokenizer, other: Tokenizer) -> str | None:
    """The first thing in which another tokenizer is not this one, for a person; None where both are the same."""
    return next(_differences(own, other), None)


def _differences(own: Tokenizer, other: Tokenizer) -> Iterator[str]:
    vocabulary, others = _vocabulary(own.backend), _vocabulary(other.backend)
    yield from _other_ids("the token", vocabulary, others)
    added, other_added = _added(own.backend), _added(other.backend)
    for token, flags in sorted(added.items()):
        if other_added.get(token) != flags:
            yield f"the added token {token!r} is {_flags(flags)} here and {_flags(other_added.get(token))} there"
    for token in sorted(other_added.keys() - added.keys()):
        yield f"the added token {token!r} is {_flags(None)} here and {_flags(other_added[token])} there"
    for text in PROBES:
        if (here := own.encode(text)) != (there := other.encode(text)):
            yield f"{text!r} is {_ids(here, there)} here and {_ids(there, here)} there"


def _other_ids(what: str, vocabulary: Mapping[str, int], others: Mapping[str, int]) -> Iterator[str]:
    """Tokens that have another id, or none, in the order of their ids."""
    if vocabulary == others:
        return
    for token, id in sorted(vocabulary.items(), key=lambda item: item[1]):
        if others.get(token) != id:
            yield f"{what} {token!r} has the id {id} here and {others.get(token, 'none')} there"
    for token, id in sorted(others.items(), key=lambda item: item[1]):
        if token not in vocabulary:
            yield f"{what} {token!r} has no id here and {id} there"


def _vocabulary(backend: tokenizers.Tokenizer) -> Mapping[str, int]:
    found: Mapping[str, int] = backend.get_vocab(with_added_tokens=True)
    return found


type _Flags = tuple[int, bool, bool, bool, bool, bool]


def _added(backend: tokenizers.Tokenizer) -> Mapping[str, _Flags]:
    """What decides how an added token is found in a text, by its text."""
    return {
        token.content: (id, token.special, token.lstrip, token.rstrip, token.single_word, token.normalized)
        for id, token in backend.get_added_tokens_decoder().items()
    }


def _flags(flags: _Flags | None) -> str:
    if flags is None:
        return "none"
    names = ("special", "lstrip", "rstrip", "single_word", "normalized")
    set_ones = [name for name, is_set in zip(names, flags[1:], strict=True) if is_set]
    return f"{flags[0]} ({', '.join(set_ones) or 'plain'})"


def _ids(ids: tuple[int, ...], others: tuple[int, ...]) -> str:
    """The ids from the first that is another one on, a few of them."""
    same = next((place for place, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1]), len(others))
    return f"{list(ids[same : same + 4])} (behind {same} ids)"
