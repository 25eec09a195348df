"""Finds what an answer's own ids are of the end of a text: of its words behind thinking that a template drops."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile

from kvserve.prompt.tokenizer import Tokenizer


def own_end(tokenizer: Tokenizer, ids: Sequence[int], text: str, shown: str) -> tuple[int, ...]:
    """The last of `ids`, which say `text`, that say what `shown` ends with too, white space at both ends aside; the
    first of them begins with a word or a tag."""
    words = text.rstrip()
    pairs = zip(reversed(words), reversed(shown.rstrip()), strict=False)
    num_chars = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) + len(text) - len(words)
    starts = range(len(ids))
    first = bisect_left(starts, True, key=lambda start: len(tokenizer.decode(ids[start:])) <= num_chars)
    while first < len(ids) and not tokenizer.decode(ids[first : first + 1])[:1].strip():
        first += 1
    own = tuple(ids[first:])
    return own if text.endswith(tokenizer.decode(own)) else ()


def reads_as(
    tokenizer: Tokenizer, encode: Callable[[str], tuple[int, ...]], lead: str, ids: Sequence[int], closing: str
) -> bool:
    """Whether ids between two texts say what all of it says as one text: some tokenizers begin every text with a blank,
    and leave the first one of a text out again."""
    parts = (*encode(lead), *ids, *(encode(closing) if closing else ()))
    return tokenizer.decode(parts) == tokenizer.decode(encode(lead + tokenizer.decode(ids) + closing))
