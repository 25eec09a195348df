"""Draws chat templates from the space of the real ones (shared/templates), with the tokens that each needs.

The simplest of each choice stands first, so that what fails is shown on the plainest template.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from tests.prompt.drawn_templates import (
    CALL_ARGUMENTS,
    CALL_ID,
    CALL_NAME,
    ROLES,
    Calls,
    Drawn,
    Frame,
    Results,
    Thinking,
    TokenKind,
    Tools,
    said,
)

type Draw = st.DrawFn

BRACKETS = (("<|", "|>"), ("<", ">"), ("[", "]"), ("<｜", "｜>"), ("]~", "["), ("@", ""))
"""Of tags; behind the last one a tag may be the beginning of another."""

_NAMES = st.text("ab_", min_size=1, max_size=3)
_ENDS = ("", "\n", "\n\n")
_WORDS = (ROLES, ("sys", "human", "ai", "sight"), ("system", "user", "model", "user"))


@dataclass
class _Tags:
    """Tags of one family, no two alike; `kinds` of those that were drawn so far."""

    draw: Draw
    kinds: dict[str, TokenKind]

    def new(self, *kinds: TokenKind, closes: str = "") -> str:
        """A new tag of one of these kinds; `closes` is another one's, whose name it has behind a slash."""
        left, right = self.draw(st.sampled_from(BRACKETS))
        fresh = _NAMES.map(lambda name: f"{left}{name}{right}").filter(lambda tag: tag not in self.kinds)
        tag = f"{closes[0]}/{closes[1:]}" if closes and self.draw(st.booleans()) else self.draw(fresh)
        self.kinds[tag] = self.draw(st.sampled_from(kinds))
        return tag

    def pair(self, *kinds: TokenKind) -> tuple[str, str]:
        opening = self.new(*kinds)
        return opening, self.new(self.kinds[opening], closes=opening)


type _Framed = tuple[tuple[Frame, Frame, Frame, Frame], tuple[str, ...]]
"""The frames of the four roles, and the tokens that end an answer."""


def _behind(draw: Draw, tags: _Tags) -> tuple[str, str, str]:
    """What stands behind an answer, behind every other message, and the token that ends an answer ("": none)."""
    space = draw(st.sampled_from(_ENDS))
    ends = draw(st.sampled_from(["all", "answers", "none"]))
    if ends == "none":
        return space, space, ""
    end = tags.new("special", "special", "added")
    return end + space, end + space if ends == "all" else draw(st.sampled_from(_ENDS)), end


def _opened(draw: Draw, tags: _Tags) -> _Framed:
    """One token opens every message, then come the role's word and what ends the header."""
    opener, words = tags.new("special"), draw(st.sampled_from(_WORDS))
    middle = draw(st.sampled_from(["", "", "tag", "tag"])) and tags.new("special", "text")
    middle += draw(st.sampled_from(_ENDS if middle else _ENDS[1:]))
    answer, other, end = _behind(draw, tags)
    frames = [Frame(opener + word + middle, answer if role == 2 else other) for role, word in enumerate(words)]
    return (frames[0], frames[1], frames[2], frames[3]), (end or opener,)


def _by_roles(draw: Draw, tags: _Tags) -> _Framed:
    """Each role has a token of its own."""
    space, own = draw(st.sampled_from(_ENDS)), [tags.new("special") for _ in ROLES]
    answer, other, end = _behind(draw, tags)
    frames = [Frame(token + space, answer if role == 2 else other) for role, token in enumerate(own)]
    return (frames[0], frames[1], frames[2], frames[3]), (end,) if end else (own[1], own[3])


def _wrapped(draw: Draw, tags: _Tags) -> _Framed:
    """All but the answers stand between tags."""
    pairs = [Frame(*tags.pair("special")) for _ in range(3)]
    end = tags.new("special")
    return (pairs[0], pairs[1], Frame("", end), pairs[2]), (end,)


def _in_words(draw: Draw, tags: _Tags) -> _Framed:
    """Roles are text, and only an answer's end is a token."""
    end = tags.new("special")
    titles = [f"### {word.capitalize()}:\n" for word in ROLES]
    frames = [Frame(title, f"{end}\n" if title.startswith("### A") else "\n\n") for title in titles]
    return (frames[0], frames[1], frames[2], frames[3]), (end,)


_SHAPES: tuple[Callable[[Draw, _Tags], _Framed], ...] = (_opened, _opened, _by_roles, _wrapped, _in_words)

_KINDS: tuple[TokenKind, ...] = ("special", "added", "text")


def _thinking(draw: Draw, tags: _Tags) -> Thinking:
    opening, closing = "<think>", "</think>"
    is_own = draw(st.booleans())
    if is_own:
        opening, closing = tags.pair(*_KINDS)
    else:
        tags.kinds |= dict.fromkeys((opening, closing), draw(st.sampled_from(_KINDS)))
    return Thinking(
        opening,
        closing,
        inner=draw(st.sampled_from(["\n", ""])),
        behind=draw(st.sampled_from(["\n\n", "\n", ""])),
        # what closes thinking of their own nobody could know
        shown=draw(st.sampled_from(["always", "after a question", "last", *([] if is_own else ["never"])])),  # type: ignore[arg-type]
        opens=draw(st.booleans()),
        has_switch=draw(st.booleans()),
        # before an opening tag without brackets no header could be told from it
        fills=draw(st.booleans()) and opening[0] in "<[",
        splits=draw(st.booleans()),
        field=draw(st.sampled_from(["reasoning_content", "thinking", "reasoning"])),
    )


_PAIR = "{%- for k, v in c.arguments.items() -%}"
_VALUE = "{{- v if v is string else v | tojson -}}"


def _call_tags(draw: Draw, tags: _Tags) -> tuple[str, str]:
    return ("<tool_call>", "</tool_call>") if draw(st.sampled_from([False, False, True])) else tags.pair(*_KINDS)


def _json_call(draw: Draw) -> str:
    """One call as an object, its name or its arguments first."""
    key = draw(st.sampled_from(["arguments", "parameters"]))
    name, arguments = said('"name": "') + CALL_NAME + said('"'), said(f'"{key}": ') + CALL_ARGUMENTS
    members = [name, arguments] if draw(st.sampled_from([True, True, False])) else [arguments, name]
    if draw(st.sampled_from([False, False, True])):
        members.insert(draw(st.integers(0, 2)), said('"id": "') + CALL_ID + said('"'))
    return said("{") + said(", ").join(members) + said("}")


def _in_tags(draw: Draw, tags: _Tags) -> Calls:
    """Each call is an object between tags."""
    opening, closing = _call_tags(draw, tags)
    space = draw(st.sampled_from(["\n", ""]))
    each = said(opening + space) + _json_call(draw) + said(space + closing)
    return Calls("", each, draw(st.sampled_from(["\n", ""])), "", gap=draw(st.sampled_from(["\n", ""])))


def _listed(draw: Draw, tags: _Tags) -> Calls:
    """All calls are a list of objects behind a tag, or between two."""
    opening, closing = _call_tags(draw, tags)
    space = draw(st.sampled_from(["", "\n"]))
    ending = draw(st.sampled_from([f"]{space}{closing}", "]"]))
    return Calls(f"{opening}{space}[", _json_call(draw), draw(st.sampled_from([", ", ",", ",\n"])), ending)


def _named(draw: Draw, tags: _Tags) -> Calls:
    """Name and arguments stand between tags, with or without tags around all calls."""
    around = draw(st.booleans()) and tags.pair(*_KINDS)
    opening, closing = tags.pair(*_KINDS)
    middle = tags.new(*_KINDS)
    if draw(st.booleans()):
        middle = draw(st.sampled_from(["\n", middle + "\n"]))
    with_id = said(tags.new(*_KINDS)) + CALL_ID if draw(st.sampled_from([False, False, True])) else ""
    ending = closing if draw(st.booleans()) else ""
    each = said(opening) + CALL_NAME + with_id + said(middle) + CALL_ARGUMENTS + said(ending)
    before, behind = around or ("", "")
    return Calls(before, each, draw(st.sampled_from(["", "\n"])), behind, gap=draw(st.sampled_from(["\n", ""])))


def _in_pairs(draw: Draw, tags: _Tags) -> Calls:
    """Keys and values stand between tags of their own."""
    around = draw(st.booleans()) and tags.pair(*_KINDS)
    opening, closing = tags.pair(*_KINDS)
    (key, key_end), (value, value_end) = tags.pair(*_KINDS), tags.pair(*_KINDS)
    space, line = draw(st.sampled_from(["\n", ""])), draw(st.sampled_from(["", "\n"]))
    pair = said(key) + "{{- k -}}" + said(key_end + space + value + line) + _VALUE + said(line + value_end + space)
    return _around(draw, around or ("", ""), said(opening) + CALL_NAME + said(space), pair, said(closing))


def _as_functions(draw: Draw, tags: _Tags) -> Calls:
    """As XML, the names in the tags."""
    around = draw(st.booleans()) and tags.pair(*_KINDS)
    function, parameter = draw(st.sampled_from([("fn", "arg"), ("invoke", "parameter")]))
    left, right = draw(st.sampled_from([(' name="', '">'), ("=", ">")]))
    line = draw(st.sampled_from(["\n", ""]))
    pair = said(f"<{parameter}{left}") + "{{- k -}}" + said(right + line) + _VALUE + said(f"{line}</{parameter}>\n")
    head = said(f"<{function}{left}") + CALL_NAME + said(f"{right}\n")
    return _around(draw, around or ("", ""), head, pair, said(f"</{function}>"))


def _around(draw: Draw, around: tuple[str, str], head: str, pair: str, end: str) -> Calls:
    space = draw(st.sampled_from(["\n", ""])) if around[0] else ""
    each = f"{head}{_PAIR}{pair}{{%- endfor -%}}{end}"
    between = draw(st.sampled_from(["\n", ""]))
    return Calls(around[0] + space, each, between, space + around[1], gap=draw(st.sampled_from(["\n", ""])))


def _bare(draw: Draw, tags: _Tags) -> Calls:
    """One object without a tag."""
    return Calls("", _json_call(draw), "", "", single=True, is_bare=True)


_CALLS: tuple[Callable[[Draw, _Tags], Calls], ...] = (_in_tags, _listed, _named, _in_pairs, _as_functions, _bare)


def _tool_words(draw: Draw, tags: _Tags, style: str) -> Tools:
    places = ["first question", "last question"]
    place = draw(st.sampled_from(places if style in ("merged", "refused") else ["system", "system", *places]))
    opening, closing = tags.pair(*_KINDS)
    return Tools(place, draw(st.sampled_from(["lines", "list", "functions"])), f"Tools:\n{opening}", closing)  # type: ignore[arg-type]


def _results(draw: Draw, tags: _Tags) -> Results:
    opening, closing = tags.pair(*_KINDS) if draw(st.booleans()) else ("", "")
    grouped = bool(opening) and draw(st.booleans())
    space = draw(st.sampled_from(["\n", ""])) if opening else ""
    named = draw(st.sampled_from(["", "", "name", "id"]))
    return Results(opening + space, space + closing, grouped, named)  # type: ignore[arg-type]


def _merged(draw: Draw, texts: list[str]) -> tuple[str, ...]:
    """Texts that are one token though a tag ends or begins inside them."""
    borders = [f"{text[-1]}\n" for text in texts] + [f"\n{text[:2]}" for text in texts]
    borders += [f"}}{text[0]}" for text in texts] + [f'{text[-1]}{{"' for text in texts] + ["\n\n", "\n\n\n", ".\n"]
    return tuple(draw(st.lists(st.sampled_from(sorted(set(borders))), max_size=4, unique=True)))


@st.composite
def drawn_templates(draw: Draw) -> Drawn:
    """A template with the vocabulary that it needs."""
    tags = _Tags(draw, {})
    (system, user, assistant, tool), stops = draw(st.sampled_from(_SHAPES))(draw, tags)
    style = draw(st.sampled_from(["own", "first", "merged", "refused", "bare"]))
    drawn = Drawn(
        system,
        user,
        assistant,
        user if draw(st.sampled_from([False, False, True])) else tool,
        stops=stops,
        tokens=(),
        system_style=style,  # type: ignore[arg-type]
        default_system=draw(st.sampled_from(["", "", "You are kind."])),
        trims=draw(st.booleans()),
        alternates=draw(st.sampled_from([False, False, True])),
    )
    if draw(st.booleans()):
        drawn = replace(drawn, bos=tags.new("special"), names_bos=draw(st.booleans()))
    if draw(st.booleans()):
        drawn = replace(drawn, thinking=_thinking(draw, tags))
    if draw(st.sampled_from([True, True, True, False])):
        drawn = replace(
            drawn,
            tools=_tool_words(draw, tags, style),
            calls=replace(
                draw(st.sampled_from(_CALLS))(draw, tags), drops_words=draw(st.sampled_from([False, False, True]))
            ),
            results=_results(draw, tags),
        )
    texts = sorted(tag for tag, kind in tags.kinds.items() if kind == "text")
    merged = _merged(draw, [*texts, *tags.kinds])
    return replace(drawn, tokens=tuple(tags.kinds.items()), merged=merged, joins_words=draw(st.booleans()))
