"""Learns one template's layout of an assistant's turn, once per model: its opening, and the tokens that end it.

The layout decides only where emitted ids may replace a rendered turn; without one they never do.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kvserve.core import Message, TextBlock, ToolCallBlock, ToolResultBlock
from kvserve.prompt.boundaries import MessageMarkers
from kvserve.prompt.probe import PROBE_TOOL
from kvserve.prompt.steps import ThinkTags
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.prompt.writing import REASONING_TAGS

_ANSWER = "Green stone"
_LATER = "Violet moon"
_QUESTION_WORDS = "Amber lake"
_PROBE = (("user", _QUESTION_WORDS), ("assistant", _ANSWER), ("user", _LATER))
_CALLS = tuple(ToolCallBlock(f"kwcall00{n}", PROBE_TOOL.name, '{"kwparameter": "quartz"}') for n in (1, 2))
_RESULT_WORDS = ("Basalt one", "Marble two")
_RESULTS = tuple(
    Message("tool", (ToolResultBlock(call.call_id, (TextBlock(words),)),))
    for call, words in zip(_CALLS, _RESULT_WORDS, strict=True)
)
_QUESTION = (("user", "Silver pine"),)
"""Asked in other words than the probe, which a header cannot share then."""


@dataclass(frozen=True, slots=True)
class TurnLayout:
    """`openers` begin a message and `ends` end an assistant's, each the text of one added token.

    `header` is the beginning of every assistant's message, with its opener; "" if such messages cannot be distinguished
    or do not end in one of the tokens. `end` is the token that the template writes behind an assistant's words, "" if
    it writes none. `result_header` is what answers to a tool's result begin with where they have no such header: the
    token `result_end`, which ends the result, and what follows it; "" otherwise. A message that begins with one of
    `others` behind it is no answer. `tails` are what a prompt's end has behind the header and
    an answer in history has not, `own_messages` an assistant's whole messages before that header (an empty one of
    thinking). `reasoning_tags` may open thinking there.

    A result and the answer to it may be one piece, behind the token that ended the call's turn: one of `ends`, or of
    `joined`, which are openers elsewhere. `result_tails` are what stands there between the two: at a prompt's end, and
    in history, which has other words there. `result_ends` are the same before a header: how a result ends behind which
    nothing stands, and behind which something does.
    """

    openers: frozenset[str]
    ends: frozenset[str]
    header: str = ""
    end: str = ""
    result_header: str = ""
    result_end: str = ""
    others: frozenset[str] = frozenset()
    tails: frozenset[str] = frozenset()
    own_messages: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    result_tails: tuple[tuple[str, str], ...] = ()
    result_ends: tuple[tuple[str, str], ...] = ()
    reasoning_tags: tuple[ThinkTags, ...] = REASONING_TAGS

    @property
    def headers(self) -> tuple[str, ...]:
        """What an assistant's message may begin with."""
        return tuple(header for header in (self.header, self.result_header) if header)


def learn_layout(tokenizer: Tokenizer, template: ChatTemplate, markers: MessageMarkers) -> TurnLayout:
    """Render a short conversation and its generation tails, and read the text around the answer."""
    added = {id: token.content for id, token in tokenizer.backend.get_added_tokens_decoder().items()}
    openers = frozenset(added[id] for id in markers.openers)
    # A role's token may end an answer too; there it begins what follows, and cutting at it would cut a header.
    roles = openers.union(added[id] for id in markers.user_header if id in added)
    stops = frozenset(added[id] for id in tokenizer.stop_token_ids if id in added)
    ends = stops - roles
    text = _written(template, _PROBE, thinking=False)
    answer, later = text.find(_ANSWER), text.find(_LATER)
    if not openers or answer < 0 or later < 0:
        return TurnLayout(openers, ends)
    behind = text[answer + len(_ANSWER) : later].lstrip()
    end = _end(behind, added.values(), stops)
    if end is None:
        return TurnLayout(openers, ends)
    ends |= {end} - openers
    shown = [_from_last(text[:answer], openers)]
    shown += [_from_last(_written(template, _QUESTION, thinking=thinking), openers) for thinking in (False, True)]
    header = _shared_header(tokenizer, shown, template.reasoning_tags)
    is_anyones = not header or _from_last(text[:later], openers).startswith(header)
    ends -= {token for token in ends if token in header}
    if is_anyones:
        return TurnLayout(openers, ends, end=end)
    kept, *tails = (text.removeprefix(header) for text in shown)
    before = _between(text, _QUESTION_WORDS, header)
    layout = TurnLayout(
        openers,
        ends,
        header,
        end,
        tails=frozenset(tails) - {kept},
        own_messages=frozenset(_own_messages(template, header, before)),
        reasoning_tags=template.reasoning_tags,
    )
    return _with_results(template, layout, added.values())


def _own_messages(template: ChatTemplate, header: str, before: str) -> Iterator[str]:
    """What stands at a prompt's end between `before`, which ends a question, and the answer's header, mode by mode,
    where that begins as an answer does. Another's message (an instruction of the template's) stands there in history,
    too, or belongs to no turn.
    """
    for thinking in (False, True):
        tail = _from_words(_written(template, _QUESTION, thinking=thinking), _QUESTION[-1][1])
        messages = tail.rpartition(header)[0].removeprefix(before)
        if messages.startswith(header):
            yield messages


def _with_results(template: ChatTemplate, layout: TurnLayout, added: Collection[str]) -> TurnLayout:
    """The layout with what an answer to a tool's result begins with, if a loop of calls shows that it has no header."""
    asked = (Message("user", (TextBlock(_QUESTION_WORDS),)), Message("assistant", _CALLS), *_RESULTS)
    said = (*asked, Message("assistant", (TextBlock(_ANSWER),)), Message("user", (TextBlock(_LATER),)))
    text, last = _loop(template, said, thinking=False), _RESULT_WORDS[-1]
    before, gap = text.partition(last)[0], _between(text, last, _ANSWER)
    token = max(layout.openers | layout.ends, key=before.rfind)
    # the result and its answer are one piece, which is read whole
    if token in layout.ends:
        return replace(layout, result_tails=tuple(dict.fromkeys(_result_tails(template, asked, said))))
    if layout.header in gap:
        return replace(layout, result_ends=tuple(dict.fromkeys(_result_ends(template, layout, asked, gap, text))))
    if not gap:
        return layout
    with_header = _with_result_header(template, layout, added, text, asked)
    if with_header is None and token == layout.end:
        tails = tuple(dict.fromkeys(_result_tails(template, asked, said)))
        return replace(layout, joined=frozenset({token}), result_tails=tails)
    return with_header or layout


def _with_result_header(
    template: ChatTemplate, layout: TurnLayout, added: Collection[str], text: str, asked: tuple[Message, ...]
) -> TurnLayout | None:
    """The layout with the token that ends a result as the header of its answer; None where no token tells the two
    apart. `text` is a loop, `asked` its messages before the answer."""
    first, last = _RESULT_WORDS
    tails = [_loop(template, asked, thinking=on) for on in (False, True)]
    gap = _between(text, last, _ANSWER)
    start = max((gap.rfind(token) for token in added), default=-1)
    if start < 0:
        return None
    header = gap[start:]
    if not all(_from_words(tail, last).startswith(gap) for tail in tails):
        return None
    token = _first_token(header, added) or ""
    _, is_ended_alone, following = _between(text, first, last).partition(header)
    other = _first_token(following.lstrip(), added)
    if is_ended_alone and other is None:  # a second result cannot be told from an answer
        return None
    others = frozenset({other} if other is not None else ())
    return replace(layout, result_header=header, result_end=token, others=others)


def _result_ends(
    template: ChatTemplate, layout: TurnLayout, asked: tuple[Message, ...], gap: str, text: str
) -> Iterator[tuple[str, str]]:
    """How a result ends at a prompt's end and in history (`gap` behind it, in the loop `text`), mode by mode, where
    these differ; nothing where a question may end as history's result does, with a client's words before the same."""
    kept = gap.partition(layout.header)[0]
    question = _between(text, _QUESTION_WORDS, layout.header)
    for thinking in (False, True):
        ended, is_headed, _ = _from_words(_loop(template, asked, thinking=thinking), _RESULT_WORDS[-1]).partition(
            layout.header
        )
        may_be_question = kept.endswith(question) or question.endswith(kept)
        if is_headed and ended != kept and kept.strip() and not may_be_question:
            yield ended, kept


def _result_tails(
    template: ChatTemplate, asked: tuple[Message, ...], said: tuple[Message, ...]
) -> Iterator[tuple[str, str]]:
    """What stands behind the last result at a prompt's end and in history, mode by mode, where neither opens thinking
    and history has something that a result's own words cannot be: it ends any result, or holds a control token."""
    asked_again = (*asked, Message("user", (TextBlock(_LATER),)))
    for thinking in (False, True):
        prompt = template.write(asked, (PROBE_TOOL,), thinking=thinking)
        tail = _from_words(prompt.text, _RESULT_WORDS[-1])
        kept = _between(_loop(template, said, thinking=thinking), _RESULT_WORDS[-1], _ANSWER)
        if tail == kept or not kept.strip() or prompt.opens_reasoning:
            continue
        unanswered = _from_words(_loop(template, asked_again, thinking=thinking), _RESULT_WORDS[-1])
        ends_any = _shared_beginning(tail, kept, unanswered).strip()
        if ends_any or any(token in kept for token in template.control.tokens):
            yield tail, kept


def _loop(template: ChatTemplate, messages: tuple[Message, ...], *, thinking: bool) -> str:
    return template.write(messages, (PROBE_TOOL,), thinking=thinking).text


def _between(text: str, left: str, right: str) -> str:
    """The text between the first `left` and the `right` behind it, "" without them."""
    behind, found, _ = _from_words(text, left).partition(right)
    return behind if found else ""


def _from_words(text: str, words: str) -> str:
    return text.partition(words)[2]


def _shared_beginning(*texts: str) -> str:
    return "".join(chars[0] for chars in takewhile(lambda chars: len(set(chars)) == 1, zip(*texts, strict=False)))


def _end(behind: str, added: Collection[str], stops: Collection[str]) -> str | None:
    """The token that ends an answer: the first behind it, or the stop token behind such as a model writes itself."""
    first, token, rest = None, _first_token(behind, added), behind
    while token is not None and token not in stops:
        first = first or token
        rest = rest.removeprefix(token).lstrip()
        token = _first_token(rest, added)
    return token or first


def _first_token(text: str, added: Collection[str]) -> str | None:
    return max((token for token in added if text.startswith(token)), key=len, default=None)


def _written(template: ChatTemplate, said: Sequence[tuple[str, str]], *, thinking: bool) -> str:
    messages = tuple(Message(role, (TextBlock(text),)) for role, text in said)  # type: ignore[arg-type]
    return template.write(messages, template.needed_tools, thinking=thinking).text


def _from_last(text: str, openers: frozenset[str]) -> str:
    """The text from its last opener on, "" without one."""
    start = max(text.rfind(opener) for opener in openers)
    return text[start:] if start >= 0 else ""


def _shared_header(tokenizer: Tokenizer, shown: Sequence[str], tags: Sequence[ThinkTags]) -> str:
    """The common beginning of the texts, in whole tokens and without the reasoning that follows in some, nor the
    beginning of its tag where that is no token."""
    rows = zip(*(tokenizer.encode(text) for text in shown), strict=False)
    header = tokenizer.decode([row[0] for row in takewhile(lambda row: len(set(row)) == 1, rows)])
    for opening, _ in tags:
        header = header.partition(opening)[0]
        starts = range(max(0, len(header) - len(opening) + 1), len(header))
        begun = (start for start in starts if any(text.startswith(opening, start) for text in shown))
        header = header[: next(begun, len(header))]
    return header if all(text.startswith(header) for text in shown) else ""
