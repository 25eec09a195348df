"""Finds where free text ends: at tags in a row, or at a key with the tags around it, read character by character.

It knows tags and keys, no form that has them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvserve.output.tool_parsers.form import END, NOT_IN_KEYS, SPACE, Chain, NotACall, Reader, skip_space


@dataclass(frozen=True, slots=True)
class NextKey:
    """What stands between a value and the next one: `tags`, a key, and one of `leads`, with nothing between the three.

    A key stands on one line and holds no angle bracket; without `may_be_empty` it has a character.
    """

    tags: Chain
    leads: tuple[Chain, ...]
    may_be_empty: bool = False


@dataclass(frozen=True, slots=True)
class FoundKey:
    """The next key, and the characters of the source from its beginning to the end of the lead behind it."""

    name: str
    source: str


class UnfinishedKey(NotACall):
    """The turn ended in a key behind a value, or in the lead behind that key; `source` is the text from the key on."""

    def __init__(self, source: str) -> None:
        super().__init__("the key is not finished")
        self.source = source


@dataclass(frozen=True, slots=True)
class _ChainPlace:
    """Text from `start` on that may be `chain`: the tags before `index` and `offset` characters of that tag matched."""

    start: int
    chain: Chain
    index: int = 0
    offset: int = 0
    num_last: int = 0
    """How many characters are read behind the tag before the last."""
    key: tuple[int, int] | None = None
    """Where the key begins and ends that the chain is the lead of; what precedes the key begins at `start`."""

    @property
    def is_end(self) -> bool:
        return self.index == len(self.chain)

    @property
    def lacks_end(self) -> bool:
        return self.index == len(self.chain) - 1

    def after(self, char: str) -> "_ChainPlace | None":
        """The place behind `char`; None if the chain does not continue with it."""
        tag = self.chain[self.index]
        num_last = self.num_last + self.lacks_end
        if char != tag[self.offset]:
            is_between = self.offset == 0 and self.index and char in SPACE
            return self._at(self.index, self.offset, num_last) if is_between else None
        is_whole = self.offset + 1 == len(tag)
        return self._at(self.index + is_whole, 0 if is_whole else self.offset + 1, num_last)

    def _at(self, index: int, offset: int, num_last: int) -> "_ChainPlace":
        """Another place of the same text, without `replace`: this is done for each character that a model writes."""
        return _ChainPlace(self.start, self.chain, index, offset, num_last, self.key)


@dataclass(frozen=True, slots=True)
class _KeyPlace:
    """Text from `start` on that is the tags before a key, and from `key_start` on one that may go on."""

    start: int
    key_start: int


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """The chain that was read, and how many characters were read behind its last tag but one. None are where the text
    ended before its last tag; with `lacks_end` that tag is missing, and all of these are other text. With a `key` the
    chain is the lead behind it."""

    chain: Chain
    num_last: int
    lacks_end: bool = False
    key: FoundKey | None = None


@dataclass(frozen=True, slots=True)
class _Lacking:
    """A chain that stood in the text without its last tag, and where it began and ended."""

    chain: Chain
    start: int
    end: int


@dataclass(slots=True)
class _Ends:
    """All places at once at which a text may be at its end."""

    next_key: NextKey | None
    beginnings: tuple[Chain, ...]
    """What a text may end with, or what precedes a key: each begins where its first character stands."""
    places: list[_ChainPlace] = field(default_factory=list)
    key: _KeyPlace | None = None
    """A key holds no tags that precede one, so the last of several is it."""

    @property
    def start(self) -> int | None:
        """Where the first of the places begins, if there are any."""
        starts = [place.start for place in self.places]
        return min([*starts, self.key.start] if self.key is not None else starts, default=None)

    @property
    def unfinished_key(self) -> tuple[int, int] | None:
        """Where the tags before an unfinished key begin, and it itself."""
        lead = next((place for place in self.places if place.key is not None), None)
        if lead is not None and lead.key is not None:
            return lead.start, lead.key[0]
        return (self.key.start, self.key.key_start) if self.key is not None else None

    def move(self, char: str, now: int) -> _ChainPlace | None:
        """Read the character at `now`; the place of what ends with it."""
        here = [*self.places, *self._leads(char, now)]
        here += [_ChainPlace(now, chain) for chain in self.beginnings if chain[0][0] == char]
        if char in NOT_IN_KEYS:
            self.key = None
        self.places, ended = [], None
        for place in here:
            moved = place.after(char)
            if moved is None:
                continue
            if not moved.is_end:
                self.places.append(moved)
            elif self._precedes_key(moved):
                self.key = _KeyPlace(moved.start, now + 1)
            else:
                ended = ended or moved
        return ended

    def _precedes_key(self, place: _ChainPlace) -> bool:
        return self.next_key is not None and place.key is None and place.chain == self.next_key.tags

    def _leads(self, char: str, now: int) -> list[_ChainPlace]:
        """The leads that begin with `char` at `now`, behind a key."""
        if self.next_key is None or self.key is None:
            return []
        if now == self.key.key_start and not self.next_key.may_be_empty:
            return []
        key = (self.key.key_start, now)
        return [_ChainPlace(self.key.start, lead, key=key) for lead in self.next_key.leads if lead[0][0] == char]


def text_before(
    chains: Sequence[Chain],
    put: Callable[[str], None],
    *,
    may_lack_end: Sequence[Chain] = (),
    next_key: NextKey | None = None,
) -> Reader[ChainEnd]:
    """Free text up to the first of `chains`, or to a whole `next_key`, and that; `put` gets each piece as soon as it is
    certain.

    A tag without the rest of its chain is text, and so are tags behind which no key stands. If the turn ends first,
    `put` gets the remaining text and NotACall is raised, and UnfinishedKey where a key had begun; chains that
    `may_lack_end` are then whole without their last tag, also where other text follows the first of them: from there on
    `put` gets nothing before it is known.
    """
    beginnings = (*chains, *((next_key.tags,) if next_key is not None else ()))
    firsts = frozenset(chain[0][0] for chain in beginnings)
    held, num_put = "", 0
    ends = _Ends(next_key, beginnings)
    lacking: _Lacking | None = None
    while True:
        char = yield
        if char == END:
            return _last_end(ends, lacking, may_lack_end, held, num_put, put)
        if not ends.places and ends.key is None and lacking is None and char not in firsts:
            num_put += 1
            put(char)
            continue
        now = num_put + len(held)
        end = ends.move(char, now)
        held += char
        if end is not None:
            put(held[: end.start - num_put])
            return ChainEnd(end.chain, end.num_last, key=_found_key(end, held, num_put))
        lacks = (each for each in ends.places if each.lacks_end and each.chain in may_lack_end)
        if lacking is None and (lack := next(lacks, None)) is not None:
            lacking = _Lacking(lack.chain, lack.start, now + 1)
        known = (ends.start, lacking.start if lacking is not None else None)
        start = min((start for start in known if start is not None), default=now + 1)
        if start > num_put:
            put(held[: start - num_put])
            held, num_put = held[start - num_put :], start


def _found_key(place: _ChainPlace, held: str, num_put: int) -> FoundKey | None:
    if place.key is None:
        return None
    start, end = (index - num_put for index in place.key)
    return FoundKey(held[start:end], held[start:])


def _last_end(
    ends: _Ends,
    lacking: _Lacking | None,
    may_lack_end: Sequence[Chain],
    held: str,
    num_put: int,
    put: Callable[[str], None],
) -> ChainEnd:
    """What ends a text at the end of the turn, of which `held` is not put. Raises NotACall, UnfinishedKey."""
    end = next((place for place in ends.places if place.chain in may_lack_end and place.lacks_end), None)
    if end is not None:
        put(held[: end.start - num_put])
        return ChainEnd(end.chain, 0)
    if lacking is not None:
        put(held[: lacking.start - num_put])
        return ChainEnd(lacking.chain, num_put + len(held) - lacking.end, lacks_end=True)
    if (unfinished := ends.unfinished_key) is not None:
        start, key_start = unfinished
        put(held[: start - num_put])
        raise UnfinishedKey(held[key_start - num_put :])
    put(held)
    raise NotACall("the text is not finished")


def end_of_call(endings: Sequence[Chain]) -> Reader[Chain | None]:
    """The ending behind complete arguments; None if the turn ends first."""
    char = yield from skip_space((yield))
    places = [_ChainPlace(0, chain) for chain in endings]
    while char != END:
        places = [moved for place in places if (moved := place.after(char)) is not None]
        if not places:
            raise NotACall(f"unexpected {char!r} behind the arguments")
        if (end := next((place for place in places if place.is_end), None)) is not None:
            return end.chain
        char = yield
    return None
