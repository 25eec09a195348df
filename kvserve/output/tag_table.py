"""The tags for which a stream of text is searched, and their beginnings."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvserve.output import harmony
from kvserve.output.formats import OutputFormat

type OnTag = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TagTable:
    """Each tag with its handler, the beginnings of tags, and a pattern of text in which no tag can start.

    The pattern excludes line ends, which decide where a line begins and what is formatting.
    """

    tags: dict[str, OnTag]
    beginnings: frozenset[str]
    max_tag_chars: int
    plain: re.Pattern[str]

    @classmethod
    def of(cls, tags: dict[str, OnTag]) -> "TagTable":
        """The table of `tags`."""
        beginnings = frozenset(tag[:size] for tag in tags for size in range(1, len(tag)))
        firsts = "".join(re.escape(char) for char in sorted({tag[0] for tag in tags} | {"\n"}))
        return cls(tags, beginnings, max(map(len, tags), default=0), re.compile(f"[^{firsts}]+"))


@dataclass(frozen=True, slots=True)
class Handlers:
    """The handler of each kind of tag."""

    call: OnTag
    following: OnTag
    stray_close: OnTag
    header: OnTag
    message_end: OnTag
    silent: OnTag
    think_open: OnTag
    think_close: OnTag


@dataclass(frozen=True, slots=True)
class TagTables:
    """The tables of one answer, by whether text is reasoning and by the tags that may follow a call there."""

    tags: Mapping[bool, dict[str, OnTag]]
    following: OnTag
    _made: dict[tuple[bool, Sequence[str]], TagTable] = field(default_factory=dict)

    @classmethod
    def of(cls, output_format: OutputFormat, handlers: Handlers, *, allow_calls: bool) -> "TagTables":
        """The tables of a format. Without `allow_calls` calls are text."""
        return cls(_tags(output_format, handlers, allow_calls), handlers.following)

    def get(self, reasoning: bool, following: tuple[str, ...]) -> TagTable:
        """The table for this state."""
        table = self._made.get((reasoning, following))
        if table is None:
            table = TagTable.of(self.tags[reasoning] | dict.fromkeys(following, self.following))
            self._made[reasoning, following] = table
        return table


def _tags(output_format: OutputFormat, handlers: Handlers, allow_calls: bool) -> dict[bool, dict[str, OnTag]]:
    forms = output_format.tool_forms if allow_calls else ()
    calls: dict[str, OnTag] = {form.open_tag: handlers.call for form in forms}
    strays: dict[str, OnTag] = {form.stray_close: handlers.stray_close for form in forms if form.stray_close}
    if output_format.channels == "harmony":
        headers: dict[str, OnTag] = dict.fromkeys((harmony.START, harmony.CHANNEL), handlers.header)
        ends: dict[str, OnTag] = dict.fromkeys(harmony.ENDS, handlers.message_end)
        content = {harmony.RECIPIENT: handlers.header, **headers, **ends, **strays, **calls}
        return {True: headers | ends, False: content}
    bare = {form.open_tag for form in forms if form.at_start}
    reasoning = {tag: handle for tag, handle in calls.items() if tag not in bare}
    content = strays | calls | dict.fromkeys(output_format.silent_tags, handlers.silent)
    if output_format.thinking is not None:
        content[output_format.thinking.opening] = handlers.think_open
        content[output_format.thinking.closing] = handlers.think_close
        # a tag is taken as soon as it stands there, so none may begin another one
        closings = output_format.between or (output_format.thinking.closing,)
        reasoning |= dict.fromkeys(closings, handlers.think_close)
    return {True: reasoning, False: content}
