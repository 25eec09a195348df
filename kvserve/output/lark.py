"""Writes llguidance's Lark dialect: rules, tags that may be tokens, JSON, free text."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby

from kvserve.output.enforced import Enforced

_TAG_PARTS = re.compile(r"(<[^<>]*>|\[/?[A-Z_]+\])")
SPACES = r"[ \t\r\n]*"
_LINE_AT_END = re.compile(r"\s*\n\s*\Z")
_MANY = 500
_NAMEABLE = re.compile(r"<[!#-~]+>")
"""Tokens that llguidance knows by their names."""


class Lark:
    """The rules of a grammar, each under its own name."""

    def __init__(self, added_tokens: Mapping[str, int]) -> None:
        """`added_tokens`: the tokenizer's added tokens and their ids."""
        self._added_tokens = dict(added_tokens)
        self._rules: list[str] = []
        self._texts: dict[object, str] = {}

    def rule(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def reserved(self) -> str:
        """The name of a rule whose body is not known yet: `fill` writes it."""
        return self.rule("")

    def fill(self, name: str, body: str) -> str:
        """Write the body of a reserved rule."""
        self._rules[int(name[1:])] = f"{name}: {body}"
        return name

    def terminal(self, pattern: str, *, barred: str = "") -> str:
        """The name of a terminal: text of one regular expression that is none of another."""
        asked = ("terminal", pattern, barred)
        if asked not in self._texts:
            self._texts[asked] = f"T{len(self._rules)}"
            self._rules.append(f"{self._texts[asked]}: /{pattern}/{f' & ~/{barred}/' if barred else ''}")
        return self._texts[asked]

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules])

    def is_token(self, tag: str) -> bool:
        """Whether the tag is an added token of the tokenizer: llguidance then matches its name, never its text."""
        return tag in self._added_tokens

    def has_tokens(self, tag: str) -> bool:
        """Whether some part of the tag is an added token."""
        return any(map(self.is_token, _TAG_PARTS.split(tag)))

    def tag(self, tag: str) -> str:
        """The tag: added tokens in it by name, the rest as text."""
        parts = [part for part in _TAG_PARTS.split(tag) if part]
        runs = groupby(parts, key=self.is_token)
        return " ".join(
            part for token, run in runs for part in (map(self._token, run) if token else [quote("".join(run))])
        )

    def tags(self, tags: Sequence[str], gap: str) -> str:
        """Tags, between which the regular expression `gap` may stand."""
        return f" /{gap}/ ".join(map(self.tag, tags))

    def _token(self, token: str) -> str:
        return token if _NAMEABLE.fullmatch(token) else f"<[{self._added_tokens[token]}]>"

    def json(self, schema: Enforced) -> str:
        """A rule for a JSON value that obeys `schema`."""
        return self.rule(f"%json {schema.text}")

    def one_of(self, texts: Sequence[str], closing: str) -> list[str]:
        """Alternatives for these texts, each with `closing` behind it. What of `closing` is no token is one lexeme with
        the text, as a lexer never goes back; many are one lexeme, as a parser follows few thousand alternatives."""
        token = next((part for part in _TAG_PARTS.split(closing) if self.is_token(part)), None)
        head = closing if token is None else closing[: closing.index(token)]
        rest = self.tag(closing.removeprefix(head))
        whole = [text + head for text in texts if text + head]
        bodies = [self.terminal("|".join(map(escaped, whole)))] if len(whole) > _MANY else list(map(quote, whole))
        return [f"{body} {rest}" for body in (*[""] * (len(whole) < len(texts)), *bodies)]

    def one_between(self, texts: Sequence[str], mark: str) -> list[str]:
        """The same for texts of which none holds `mark` with behind it what may follow them. A lexeme ends at each mark
        in a text, as those of free text do: else it would go on where another text has ended, and hide that one."""
        if self.has_tokens(mark):
            return self.one_of(texts, mark)
        plain, rests_of, heads_before = list[str](), dict[str, list[str]](), dict[tuple[str, ...], list[str]]()
        for head, inner, rest in (text.partition(mark) for text in texts):
            if inner:
                rests_of.setdefault(head, []).append(rest)
            else:
                plain.append(head)
        for head, rests in rests_of.items():
            heads_before.setdefault(tuple(rests), []).append(head)
        ways = self.one_of(plain, mark)
        for each, heads in heads_before.items():
            first, behind = self.one_of(heads, mark), self.one_between(each, mark)
            ways.append(f"({' | '.join(first)}) ({' | '.join(behind)})")
        return ways

    def text_before(self, tag: str) -> str:
        """Free text and then `tag`."""
        free = "(?s:.*)"
        tokens = [part for part in _TAG_PARTS.split(tag) if self.is_token(part)]
        if not tokens:
            return self.rule(f"/{free}/", f"[suffix={quote(tag)}]")
        # Text of the tag before its first token belongs to the same lexeme: lexemes are greedy and end at tokens only.
        head = tag[: tag.index(tokens[0])]
        return f"/{free}{escaped(head)}/ {self.tag(tag.removeprefix(head))}"

    def text_up_to(self, tags: Sequence[str], gap: str, ends: Sequence[Sequence[str]]) -> str:
        """Free text and then these tags, between which `gap` may stand. It holds none of `ends` before, tags between
        which any white space may stand."""
        asked = (tuple(tags), gap, tuple(map(tuple, ends)))
        if asked not in self._texts:
            self._texts[asked] = self._text_up_to(tags, gap, ends)
        return self._texts[asked]

    def _text_up_to(self, tags: Sequence[str], gap: str, ends: Sequence[Sequence[str]]) -> str:
        head, rest = "", list[str]()
        for index, tag in enumerate(tags):
            parts = [part for part in _TAG_PARTS.split(tag) if part]
            first = next((i for i, part in enumerate(parts) if self.is_token(part)), len(parts))
            first = 0 if rest else first
            head += gap * (index > 0 and not rest) + "".join(map(escaped, parts[:first]))
            rest += [f"/{gap}/"] * (index > 0 and bool(rest))
            rest += [self.tag("".join(parts[first:]))] * (first < len(parts))
        barred = "|".join(SPACES.join(map(escaped, end)) for end in ends)
        is_short = not rest  # a lexeme that a token ends is as long as it can be, any other one as short
        if is_short and (line := _LINE_AT_END.search(tags[-1])) is not None:  # none of `ends` ends with it
            head, rest = head.removesuffix(escaped(line[0])), [quote(line[0])]
        text = self.terminal(f"(?s:.*){head}", barred=f"(?s:.*)({barred})(?s:.{'+' if is_short else '*'})")
        return " ".join([self.rule(text, "[lazy]" if is_short else ""), *rest])

    def marked(self, marks: tuple[str, str], ends: str) -> str:
        """Text between two marks: it holds no closing mark behind which the regular expression `ends` fits.

        Whoever goes on behind it with what `ends` fits writes that as one lexeme: a shorter one would be text."""
        asked = (marks, ends)
        if asked not in self._texts:
            self._texts[asked] = self.rule(f"{self.tag(marks[0])} {self._text_up_to_mark(marks[1], ends)}")
        return self._texts[asked]

    def _text_up_to_mark(self, mark: str, ends: str) -> str:
        tokens = [part for part in _TAG_PARTS.split(mark) if self.is_token(part)]
        if tokens:
            head = mark[: mark.index(tokens[0])]
            text = self.terminal(f"(?s:.*){escaped(head)}", barred=f"(?s:.*){escaped(mark)}({ends})(?s:.*)")
            return f"{text} {self.tag(mark.removeprefix(head))}"
        up_to_mark = f"(?s:.*){escaped(mark)}"
        first = self.rule(self.terminal(up_to_mark), "[lazy]")
        if any(mark.endswith(mark[:size]) for size in range(1, len(mark))):
            return first  # behind such a mark another one may have begun within it
        more = self.rule(self.terminal(up_to_mark, barred=f"({ends})(?s:.*)"), "[lazy]")
        return f"{first} {more}*"

    def key(self, stops: str, half: Sequence[str]) -> str:
        """A key on one line without any of `stops`, which also does not make its reader take it for two: `half` are the
        tags before a key, which would stand in it, or end in it."""
        line = f"[^{''.join(map(escaped, stops))}\\r\\n]+"
        text = "".join(half)
        if set(text) & set(stops):
            return f"/{line}/"
        again = (escaped(text[size:]) for size in range(1, len(text)) if text.endswith(text[:size]))
        barred = "|".join((f"(?s:.*){SPACES.join(map(escaped, half))}", *again))
        return self.terminal(line, barred=f"({barred})(?s:.*)")

    def free(self, tags: Collection[str]) -> list[str]:
        """Alternatives that together are any text without one of `tags`: text, and every other added token."""
        text = self.rule("/(?s:.+)/")
        others = sorted(number for token, number in self._added_tokens.items() if token not in tags)
        return [text, f"<[{','.join(_ranges(others))}]>"] if others else [text]

    def openings(self, tag: str, *, at_start: bool = False) -> str:
        """Free text up to and with an opening tag, as a token and as text, since both are read alike.

        `at_start` allows no text before it. Beside `free` this rule wins, because it ends sooner.
        """
        spelt = self.rule(f"/{'' if at_start else '(?s:.*)'}{escaped(tag)}/", "[lazy]")
        return f"({self._token(tag)} | {spelt})" if self.is_token(tag) else spelt

    def spaced_opening(self, text: str, *, separator: str = "") -> str:
        """The same for the beginning of a JSON object at the start of a text, with JSON's white space; a `separator`
        may precede it."""
        atoms = re.findall(r"[{}\[\],:]|[^\s{}\[\],:]+", text)
        before = rf"\s*({escaped(separator)})?" if separator else ""
        return self.rule(f"/{before}{r'\s*'.join(['', *map(escaped, atoms)])}/", "[lazy]")


def quote(text: str) -> str:
    """A Lark literal, in which a deleted character is escaped as control characters are."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def escaped(text: str) -> str:
    """Text in a regular expression."""
    return "".join(rf"\x{{{ord(char):x}}}" for char in text)


def _ranges(numbers: list[int]) -> Iterator[str]:
    """Ascending numbers as ranges, `a-b` with both ends."""
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        row = [number for _, number in run]
        yield f"{row[0]}-{row[-1]}"
