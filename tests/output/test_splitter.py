"""The splitter's laws (no cut matters, nothing is lost, work is linear) and the table of what goes where."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvserve.core import ContentDelta, OutputDelta, ReasoningDelta, ToolSpec
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.record import TextPiece, random_call_id
from kvserve.output.splitter import Splitter
from kvserve.output.tool_parsers.foreign import ForeignCallForm
from tests.calls import calls_of
from tests.laws import IS_FULL, num_examples, sampled_cells

TOOLS = (
    ToolSpec("read", None, {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}}),
    ToolSpec("now", None, {"type": "object", "properties": {}}),
)


def read_foreign(text: str, tools: list[dict[str, object]] | None) -> object:
    """A parser as another package may bring it: it raises whatever it likes."""
    if not text.startswith("call:"):
        raise KeyError(text)
    return {"name": text.removeprefix("call:"), "arguments": {}}


FOREIGN = ForeignCallForm("<|tool_call>", "<tool_call|>", read_foreign)
TO_THE_END = ForeignCallForm("[TOOL_CALLS]", "", read_foreign)
FORMATS = {
    "qwen": select_format("auto", "", ["<think>", "</think>"], None),
    "gemma4": select_format("auto", "", ["<|channel>", "<channel|>"], FOREIGN),
    "harmony": select_format("auto", "", ["<|channel|>", "<|message|>"], None),
    "xtml": select_format("auto", "", ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"], TO_THE_END),
}


@dataclass(frozen=True)
class Outcome:
    """What a client ends up with, however it came."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str, str], ...]
    are_cut: tuple[bool, ...]
    order: tuple[str, ...]
    pieces: tuple[TextPiece, ...]


def outcome(deltas: Sequence[OutputDelta], pieces: tuple[TextPiece, ...]) -> Outcome:
    ends = calls_of(deltas)
    calls = tuple((end.call.call_id, end.call.name, end.call.arguments) for end in ends)
    kinds = [type(d).__name__ for d in deltas]
    order = tuple(b for a, b in pairwise(["", *kinds]) if b != a)
    return Outcome(
        "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)),
        "".join(d.text for d in deltas if isinstance(d, ContentDelta)),
        calls,
        tuple(end.is_cut for end in ends),
        order,
        pieces,
    )


def split(
    parts: Sequence[str],
    output_format: OutputFormat = FORMATS["qwen"],
    *,
    in_reasoning: bool = False,
    cut: bool = False,
    allow_calls: bool = True,
) -> Outcome:
    ids = count()
    splitter = Splitter(
        output_format,
        starts_in_reasoning=in_reasoning,
        tools=TOOLS,
        new_call_id=lambda: f"call{next(ids)}",
        allow_calls=allow_calls,
    )
    deltas = [delta for part in parts for delta in splitter.feed(part)]
    deltas += splitter.finish(cut=cut)
    return outcome(deltas, splitter.pieces)


# --- laws -------------------------------------------------------------------------------------------------------------

CALLS = (
    '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>',
    '<tool_call>{"name":"read","arguments":{"path":"</tool_call>"}}</tool_call>',
    "<tool_call>read<arg_key>path</arg_key><arg_value>x</arg_value></tool_call>",
    "<tool_call>now</tool_call>",
    "<tool_call>\n<function=read>\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_call>",
    "<function=now>\n</function>",
    "<function=now></function>\n</tool_call>",
    "<|tool_call>call:now<tool_call|>",
    "<|tool_call>what<tool_call|>",
    "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
    " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
)
PIECES = (
    "<think>", "</think>", "<think", "</thin", "k>", "<", ">", "<thinking>", "< think>", "</think >", "<tool_call>",
    "</tool_call>", "<tool_callx>", "<tool_", "call>", "<function=read>", "<parameter=path>", "</parameter>",
    "</function>", "<arg_key>", "path", "</arg_key>", "<arg_value>", "</arg_value>", '{"name": "read"', '"arguments":',
    "{", "}", "[", "]", '"', ":", ",", "5", "read", "now", " ", "\n", "\n\n", "\t", "\r\n", "hello", "Жук", "漢字",
    "🐟",
    "<|channel>thought", "<|channel>", "<channel|>", "<|channel|>", "<|start|>assistant", "<|start|>", "<|message|>",
    "analysis", "final", "commentary", "<|end|>", "<|call|>", " to=functions.now", " to=", "<|constrain|>json",
    "<|tool_call>", "<tool_call|>", "[TOOL_CALLS]", "call:now", "<|open|>", "<|close|>", "<|sep|>", "response",
    "<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|channel|>final<|message|>", "<|channel|>analysis<|message|>",
)  # fmt: skip
MODEL_TEXTS = st.lists(st.sampled_from(PIECES) | st.sampled_from(CALLS) | st.text(max_size=3), max_size=14).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text over the tag alphabet and a way to cut it."""
    text = draw(MODEL_TEXTS)
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return text, [text[a:b] for a, b in pairwise([0, *places, len(text)])]


SETTINGS = st.fixed_dictionaries(
    {
        "output_format": st.sampled_from(list(FORMATS.values())),
        "in_reasoning": st.booleans(),
        "cut": st.booleans(),
        "allow_calls": st.sampled_from([True, True, True, False]),
    }
)


def check_no_cut_matters(case: tuple[str, list[str]], options: dict[str, object]) -> None:
    text, parts = case
    whole = split([text], **options)  # type: ignore[arg-type]
    assert split(parts, **options) == whole  # type: ignore[arg-type]
    assert split(list(text), **options) == whole  # type: ignore[arg-type]


@given(cut_texts(), SETTINGS)
@settings(max_examples=num_examples(100))
def test_no_cut_matters(case: tuple[str, list[str]], options: dict[str, object]) -> None:
    """Channels, calls, their order and the record are those of the whole text, for any cutting and char by char."""
    check_no_cut_matters(case, options)


def tags_of(output_format: OutputFormat) -> re.Pattern[str]:
    """What a piece of kind `tag` may say: a fixed list per format."""
    if output_format.channels == "harmony":
        header = (
            r"(<\|start\|>assistant)?(<\|channel\|>(analysis|commentary|final)[^<]*)(<\|constrain\|>json)?<\|message\|>"
        )
        return re.compile(rf"{header}|<\|(end|call|return)\|>|</tool_call>")
    assert output_format.thinking is not None
    fixed = (output_format.thinking.opening, output_format.thinking.closing, *output_format.silent_tags, "</tool_call>")
    return re.compile("|".join(map(re.escape, fixed)))


def check_nothing_is_lost(text: str, options: dict[str, object]) -> None:
    result = split([text], **options)  # type: ignore[arg-type]
    output_format = options.get("output_format", FORMATS["qwen"])
    assert isinstance(output_format, OutputFormat)
    assert "".join(piece.text for piece in result.pieces) == text
    assert "".join(piece.text for piece in result.pieces if piece.kind == "reasoning") == result.reasoning
    assert "".join(piece.text for piece in result.pieces if piece.kind == "content") == result.content
    for piece in result.pieces:
        if piece.kind == "tag":
            assert re.fullmatch(f"(?:{tags_of(output_format).pattern})+", piece.text)
        if piece.kind == "call":
            again = split([piece.text], output_format, allow_calls=True)
            assert again.calls
            assert not again.content
    assert sum(len(split([p.text], output_format).calls) for p in result.pieces if p.kind == "call") == len(
        result.calls
    )
    check_dropped_space(result.pieces, options)


@given(MODEL_TEXTS, SETTINGS)
@settings(max_examples=num_examples(100))
@example("\n\n<think>\n\na\n\n</think>\n\n b \n<tool_call>now</tool_call>\n \n<tool_call>now</tool_call>\n", {})
def test_nothing_is_lost(text: str, options: dict[str, object]) -> None:
    """The pieces are the text; channels and calls are their pieces; only tags and named white space are left out."""
    check_nothing_is_lost(text, options)


def check_dropped_space(pieces: tuple[TextPiece, ...], options: dict[str, object]) -> None:
    """Dropped white space fills a gap between marks, or is line ends beside a thinking tag."""
    neighbours = [None, *pieces, None]
    for before, piece, after in zip(neighbours, pieces, neighbours[2:], strict=False):
        if piece.kind != "space":
            continue
        marks = [other is None or other.kind in ("tag", "call") for other in (before, after)]
        assert all(marks) or (any(marks) and set(piece.text) == {"\n"}), (before, piece, after)
        assert set(piece.text) <= set(" \t\r\n")
        assert before is not None or after is not None or options.get("in_reasoning")


class HoldsNothing(Splitter):
    """Broken on purpose: it lets the beginning of a tag go at the end of every piece."""

    def feed(self, text: str) -> list[OutputDelta]:
        for char in text:
            self._step(char)
        held, self._held = self._held, ""
        self._write_all(held)
        return self._record.take_deltas()


def test_a_splitter_that_holds_back_nothing_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the law notices a splitter for which a cut inside a tag matters."""
    monkeypatch.setattr(sys.modules[__name__], "Splitter", HoldsNothing)
    with pytest.raises(AssertionError):
        check_no_cut_matters(("<think>a</think>b", ["<th", "ink>a</think>b"]), {})


class DropsTheBroken(Splitter):
    """Broken on purpose: what is no call after all is thrown away."""

    def _give_back(self, source: str) -> None:
        pass


def test_a_splitter_that_drops_broken_calls_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the law notices lost text."""
    monkeypatch.setattr(sys.modules[__name__], "Splitter", DropsTheBroken)
    with pytest.raises(AssertionError):
        check_nothing_is_lost("see <tool_call>, here", {})


# --- what goes where --------------------------------------------------------------------------------------------------

READ = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
BROKEN = "<tool_call>{broken}</tool_call>"
OPEN_OTHER = "<tool_call>who<arg_key>path</arg_key><arg_value>a"
OPEN_VALUE = "<tool_call>read<arg_key>path</arg_key><arg_value>"
READ_ARGUMENTS = '{"path": "a"}'

CASES: list[tuple[str, str, str, str, list[str]]] = [
    # (what, text, reasoning, content, names of calls)
    ("thinking", "<think>\nplan\n</think>\n\nHi", "plan", "Hi", []),
    ("empty thinking", "<think>\n\n</think>\n\nHi", "", "Hi", []),
    ("thinking twice", "<think>a</think>b\n<think>c</think>d", "ac", "b\nd", []),
    ("unfinished thinking", "<think>\nplan\n", "plan\n", "", []),
    ("unfinished tag", "Hi <thi", "", "Hi <thi", []),
    ("unfinished closing tag", "<think>plan</thi", "plan</thi", "", []),
    ("white space inside is kept", "<think>\n  a\n\nb \n</think>\n\n  c\n\nd \n", "  a\n\nb ", "  c\n\nd \n", []),
    ("look-alike thinking", "<thinking>a</thinking>", "", "<thinking>a</thinking>", []),
    ("look-alike with a space", "< think>a</ think>", "", "< think>a</ think>", []),
    ("a tag in prose", "Write <think> and </think> around it", "", "Write <think> and </think> around it", []),
    ("an orphan close before any text", "\n</think>\n\nHi", "", "Hi", []),
    ("an orphan close after text", "Hi</think>you", "", "Hi</think>you", []),
    ("only white space", " \n", "", " \n", []),
    ("a call", READ, "", "", ["read"]),
    ("a call after text", f"Let me see.\n\n{READ}", "", "Let me see.\n\n", ["read"]),
    ("calls with white space between", f"<think>a</think>\n\n{READ}\n{READ}\n", "a", "", ["read", "read"]),
    ("text after a call", f"{READ}\nDone", "", "\nDone", ["read"]),
    ("bare function with a stray close", "<function=now>\n</function>\n</tool_call>", "", "", ["now"]),
    ("look-alike call", "<tool_callx>{}</tool_callx>", "", "<tool_callx>{}</tool_callx>", []),
    ("a call tag in prose", "The <tool_call> tag", "", "The <tool_call> tag", []),
    ("unknown word as a call", "<tool_call>name</tool_call>", "", "<tool_call>name</tool_call>", []),
    ("broken JSON", "<tool_call>{'name': 1}</tool_call>", "", "<tool_call>{'name': 1}</tool_call>", []),
    ("a broken call, then a good one", f"{BROKEN}{READ}", "", BROKEN, ["read"]),
    ("opened twice", f"<tool_call>{READ}", "", "<tool_call>", ["read"]),
    ("a call without all of its closing tag", READ[:-3], "", "", ["read"]),
    ("an unfinished call", READ[:-20], "", "", ["read"]),
    ("an unfinished call without arguments yet", "<tool_call>read<arg_key>pa", "", "<tool_call>read<arg_key>pa", []),
    ("an unfinished call of an unheard-of tool", OPEN_OTHER, "", OPEN_OTHER, []),
    ("a call quoted in an unfinished call's argument is not run", f"{OPEN_VALUE}{READ}", "", "", ["read"]),
    ("a call that thinking ends with", f"<think>I call\n{READ}\n", "I call", "", ["read"]),
    ("a call that thinking goes on after", f"<think>maybe {READ} or</think>no", f"maybe {READ} or", "no", []),
    ("thinking that ends inside a call", f"<think>or {OPEN_VALUE}x</think>no", f"or {OPEN_VALUE}x", "no", []),
]  # fmt: skip

WAYS: dict[str, Callable[[str], list[str]]] = {
    "whole": lambda text: [text],
    "halves": lambda text: [text[: len(text) // 2], text[len(text) // 2 :]],
    "char by char": list,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("what", "text", "reasoning", "content", "names"), CASES, ids=[case[0] for case in CASES])
def test_table(what: str, text: str, reasoning: str, content: str, names: list[str], way: str) -> None:
    """Each kind of text goes where the table says, whole, halved and one character at a time."""
    result = split(WAYS[way](text))
    assert (result.reasoning, result.content) == (reasoning, content)
    assert [name for _, name, _ in result.calls] == names


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
COMMENTARY = "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
EARLY = " to=functions.read<|channel|>commentary json<|message|>"

OTHER_FAMILIES: list[tuple[str, str, str, str, list[str]]] = [
    ("gemma4", "<|channel>thought\nplan\n<channel|>Hi", "plan", "Hi", []),
    ("gemma4", "Hi <|channel>thought\nplan<channel|>you", "plan", "Hi you", []),
    ("gemma4", "<|tool_call>call:now<tool_call|>", "", "", ["now"]),
    ("gemma4", "<|tool_call>oops<tool_call|>", "", "<|tool_call>oops<tool_call|>", []),
    ("gemma4", READ, "", "", ["read"]),
    ("harmony", f"{ANALYSIS}plan\n<|end|><|start|>assistant{FINAL}Hi\n", "plan\n", "Hi\n", []),
    ("harmony", f"{ANALYSIS}p<|end|><|start|>assistant{COMMENTARY}{READ_ARGUMENTS}", "p", "", ["read"]),
    ("harmony", f"<|start|>assistant{EARLY}{READ_ARGUMENTS}<|call|>", "", "", ["read"]),
    ("harmony", f"{EARLY}{READ_ARGUMENTS}", "", "", ["read"]),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|>", "", "I look.", []),
    ("harmony", f"{COMMENTARY}{{oops}}", "", "", ["read"]),
    ("harmony", f"{COMMENTARY}[oops]", "", f"{COMMENTARY}[oops]", []),
    ("harmony", f"{ANALYSIS}p{COMMENTARY}{READ_ARGUMENTS}", "p", "", ["read"]),
    ("harmony", "plain to=functions text", "", "plain to=functions text", []),
    ("xtml", "<|open|>think<|sep|>p<|close|>think<|sep|><|open|>response<|sep|>Hi", "p", "Hi", []),
    ("xtml", "Hi[TOOL_CALLS]call:now", "", "Hi", ["now"]),
    ("xtml", "Hi[TOOL_CALLS]nothing", "", "Hi[TOOL_CALLS]nothing", []),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "text", "reasoning", "content", "names"), OTHER_FAMILIES)
def test_other_families(name: str, text: str, reasoning: str, content: str, names: list[str], way: str) -> None:
    """The tags of other families and forms that are read by a parser from outside."""
    result = split(WAYS[way](text), FORMATS[name])
    assert (result.reasoning, result.content) == (reasoning, content)
    assert [called for _, called, _ in result.calls] == names


def test_a_prompt_that_opened_thinking() -> None:
    """Where the prompt opened the tag, text is reasoning up to the closing tag."""
    result = split(["\npl", "an\n</th", "ink>\n\nHi"], in_reasoning=True)
    assert (result.reasoning, result.content) == ("plan", "Hi")
    harmonic = split(["pla", "n<|end|>", f"<|start|>assistant{FINAL}Hi"], FORMATS["harmony"], in_reasoning=True)
    assert (harmonic.reasoning, harmonic.content) == ("plan", "Hi")


def test_the_length_limit_leaves_a_call_that_has_not_begun_content() -> None:
    """A call that the limit cut before its arguments began, or in a form that only comes whole, stays text, also where
    the end of the turn would have completed it."""
    for text in (READ[:30], "<tool_call>now", "<tool_call>who<arg_key>a</arg_key><arg_value>b"):
        assert split([text], cut=True).content == text
    assert len(split(["[TOOL_CALLS]call:now"], FORMATS["xtml"]).calls) == 1
    assert split(["[TOOL_CALLS]call:now"], FORMATS["xtml"], cut=True).content == "[TOOL_CALLS]call:now"
    thought = split([f"<think>{READ}"], cut=True)
    assert (thought.reasoning, thought.calls) == (READ, ())


def test_without_calls_everything_is_text() -> None:
    """`allow_calls` false: a call is shown as the model wrote it."""
    result = split([f"<think>a</think>{READ}"], allow_calls=False)
    assert (result.reasoning, result.content, result.calls) == ("a", READ, ())


def test_calls_carry_json_arguments_and_fresh_alphanumeric_ids() -> None:
    """Arguments are a JSON text; ids are new for each call and alphanumeric."""
    splitter = Splitter(FORMATS["qwen"], starts_in_reasoning=False, tools=TOOLS)
    deltas = splitter.feed(READ + READ) + splitter.finish(cut=False)
    calls = [end.call for end in calls_of(deltas)]
    assert [call.arguments for call in calls] == [READ_ARGUMENTS] * 2
    assert len({call.call_id for call in calls}) == 2
    assert all(re.fullmatch(r"call[0-9a-f]{24}", call.call_id) for call in calls)
    assert random_call_id().isalnum()


def test_text_goes_out_as_early_as_it_is_certain() -> None:
    """Only a possible tag is held back, and no longer than it is possible."""
    splitter = Splitter(FORMATS["qwen"], starts_in_reasoning=False, tools=TOOLS)
    steps = [("Hi ", "Hi "), ("<", ""), ("b", "<b"), ("> <tool_", "> "), ("call> is so", "<tool_call> is so")]
    for fed, out in steps:
        assert splitter.feed(fed) == ([ContentDelta(out)] if out else []), fed
    assert splitter.finish(cut=False) == []


def test_in_reasoning_follows_the_text() -> None:
    """Tokens can be counted as reasoning while the splitter is inside it."""
    splitter = Splitter(FORMATS["qwen"], starts_in_reasoning=False, tools=())
    seen = []
    for part in ("<think>", "a", "</think>", "b"):
        splitter.feed(part)
        seen.append(splitter.in_reasoning)
    assert seen == [True, True, False, False]


# --- work -------------------------------------------------------------------------------------------------------------


class Work:
    """Lines of Python executed while a text is fed one character at a time."""

    def __init__(self, text: str, splitter_class: type[Splitter] = Splitter) -> None:
        self.num_lines = 0
        splitter = splitter_class(FORMATS["qwen"], starts_in_reasoning=False, tools=TOOLS)
        before = sys.gettrace()  # what measures coverage
        sys.settrace(self._enter)
        try:
            for char in text:
                splitter.feed(char)
            splitter.finish(cut=True)
        finally:
            sys.settrace(before)

    def _enter(self, *_: object) -> Callable[..., object]:
        return self._line

    def _line(self, _: object, event: str, __: object) -> Callable[..., object]:
        self.num_lines += event == "line"
        return self._line


class Rescans(Splitter):
    """Broken on purpose: it looks through the whole open call again at every character."""

    def _step(self, char: str) -> None:
        super()._step(char)
        for _ in self._attempt.source if self._attempt is not None else ():
            pass


LINEAR_IN_EVERY_RUN = (
    "a string",
    "a broken call",
    "line ends in thinking",
)
LONG = {
    "a string": ('<tool_call>{"name":"read","arguments":{"path":"', "a"),
    "closing tags in a string": ('<tool_call>{"name":"read","arguments":{"path":"', "</tool_call>"),
    "closing tags in a value": ("<tool_call>read<arg_key>path</arg_key><arg_value>", "</arg_value> </tool_call"),
    "parameters": ("<function=read><parameter=path>", "</parameter>\n\n"),
    "a number that may be a string": ("<tool_call>read<arg_key>what</arg_key><arg_value>", "1"),
    "escapes in a string": ('<tool_call>{"name":"read","arguments":{"path":"', "\\ud83d"),
    "a broken call": ('<tool_call>{"name":"read","arguments":{"path":x', "</tool_"),
    "opened again and again": ("", "<tool_call>"),
    "opened inside a value": ("", "<tool_call>read<arg_key>path</arg_key><arg_value>"),
    "broken again and again": ("", '<tool_call>{"name":"<tool_call>{"'),
    "white space": ("<think>a</think>", "\n"),
    "line ends in thinking": ("<think>a", "\n"),
    "beginnings of tags": ("", "<tool_cal"),
}


@sampled_cells(lambda what: what in LINEAR_IN_EVERY_RUN)
@pytest.mark.parametrize("what", LONG)
def test_work_is_linear(what: str) -> None:
    """Four times the text costs at most five times the work, whatever stays open or breaks."""
    opening, repeated = LONG[what]
    short, long = (
        Work(opening + repeated * (size // len(repeated))).num_lines
        for size in ((1500, 6000) if IS_FULL else (400, 1600))
    )
    assert long < 5 * short


def test_the_work_test_notices_a_rescan() -> None:
    """Negative control: going through the open call again at every character is not linear."""
    opening, repeated = LONG["a string"]
    short, long = (Work(opening + repeated * size, Rescans).num_lines for size in (150, 600))
    assert long > 5 * short


def test_a_long_argument_comes_whole() -> None:
    """An argument of 25,000 characters (100,000 in make full), one at a time, is one call with that argument."""
    value = "x</tool_call>\n" * (7200 if IS_FULL else 1800)
    text = f"<tool_call>read<arg_key>path</arg_key><arg_value>{value}</arg_value></tool_call>"
    result = split(list(text))
    assert len(result.calls) == 1
    assert len(result.calls[0][2]) >= (100_000 if IS_FULL else 25_000)
