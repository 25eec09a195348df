"""Forced forms against llguidance's matcher on real tokenizers: what is promised is accepted, and nothing else."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvserve.core import ContentDelta, Grammar, ReasoningDelta, ResponseFormat, ToolChoice, ToolSpec
from kvserve.errors import BadRequest
from kvserve.output import harmony
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.grammar import AnswerStart, Promise, build_grammar
from kvserve.output.splitter import Splitter
from kvserve.output.tool_parsers import glm, hermes, qwen_coder
from kvserve.output.tool_parsers.foreign import ForeignCallForm
from kvserve.output.tool_parsers.form import ParsedCall
from tests.calls import calls_of
from tests.laws import IS_FULL, num_examples, sampled_cells
from tests.models import tiny_model
from tests.output.schemas import schemas

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["r", "w"]},
        "lines": {"type": "integer"},
        "options": {"$ref": "#/$defs/options"},
    },
    "required": ["path"],
    "additionalProperties": False,
    "$defs": {
        "options": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "additionalProperties": False}
    },
}
READ = ToolSpec("read", None, SCHEMA)
NOW = ToolSpec("now", None, {"type": "object", "properties": {}, "additionalProperties": False})
ANY = ToolSpec("any", None, {})
TOOLS = (READ, NOW, ANY)
REQUIRED, TEXT = ToolChoice("required"), ResponseFormat()
TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "</parameter>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>",
)  # fmt: skip


class Setup:
    """A tokenizer, a format, and the matcher's verdict on texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, output_format: OutputFormat) -> None:
        self.tokenizer = tokenizer
        self.format = output_format
        self.added: dict[str, int] = tokenizer.get_added_vocab()
        self.guide: LLTokenizer = from_tokenizer(tokenizer)

    def grammar(
        self,
        choice: ToolChoice = REQUIRED,
        *,
        tools: Sequence[ToolSpec] = TOOLS,
        parallel: bool = True,
        response: ResponseFormat = TEXT,
        start: AnswerStart = AnswerStart(),  # noqa: B008 - frozen
    ) -> Grammar | None:
        return self.promise(choice, tools=tools, parallel=parallel, response=response, start=start).grammar

    def promise(
        self,
        choice: ToolChoice = REQUIRED,
        *,
        tools: Sequence[ToolSpec] = TOOLS,
        parallel: bool = True,
        response: ResponseFormat = TEXT,
        start: AnswerStart = AnswerStart(),  # noqa: B008 - frozen
    ) -> Promise:
        return build_grammar(
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=response,
            output_format=self.format,
            added_tokens=self.added,
            start=start,
        )

    def accepts(self, grammar: Grammar | None, text: str) -> bool:
        assert grammar is not None
        matcher = LLMatcher(self.guide, grammar.lark, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def wander(self, grammar: Grammar | None, seed: int, max_tokens: int = 400) -> str | None:
        """A random text that the matcher allows to the end; None if it got too long."""
        assert grammar is not None
        matcher = LLMatcher(self.guide, grammar.lark, log_level=0)
        dice, ids = random.Random(seed), list[int]()
        ends = ("</arg_value></tool_call>", "</arg_value>", "\n</parameter>\n</function>", "\n</parameter>", "</think>")
        closings = [self.tokenizer.encode(tag) for tag in ends]
        while not matcher.is_stopped() and len(ids) < max_tokens:
            closing = next((tag for tag in closings if matcher.validate_tokens(tag) == len(tag)), None)
            if closing is not None and dice.random() < 0.3:
                ids += closing
                assert matcher.consume_tokens(closing)
                continue
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(len(self.tokenizer)) if mask[token // 8] >> token % 8 & 1]
            token = dice.choice(allowed)
            if token == self.tokenizer.eos_token_id:
                return self.tokenizer.decode(ids)
            ids.append(token)
            assert matcher.consume_token(token)
        return self.tokenizer.decode(ids) if matcher.is_stopped() and not matcher.is_error() else None

    def calls(self, text: str, tools: tuple[ToolSpec, ...] = TOOLS) -> tuple[list[tuple[str, Any]], str]:
        """What the splitter makes of a text: its calls and everything else."""
        splitter = Splitter(self.format, starts_in_reasoning=False, tools=tools)
        deltas = splitter.feed(text) + splitter.finish(cut=False)
        calls = [(end.call.name, json.loads(end.call.arguments)) for end in calls_of(deltas)]
        return calls, "".join(d.text for d in deltas if isinstance(d, ContentDelta | ReasoningDelta))


def byte_tokenizer(tags: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per byte, and `tags` as added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|eos|>", special=True)])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>", clean_up_tokenization_spaces=False)


TEMPLATES = {"glm": "<arg_key>", "qwen_coder": "<function=", "hermes": ""}
RENDER = {"glm": glm.render, "qwen_coder": qwen_coder.render, "hermes": hermes.render, "harmony": harmony.render}


def setup(form: str, *, tags_are_tokens: bool) -> Setup:
    harmonic = ("<|channel|>", "<|message|>") if form == "harmony" else ()
    output_format = select_format("auto", TEMPLATES.get(form, ""), harmonic, None)
    return Setup(byte_tokenizer(TAGS if tags_are_tokens else ()), output_format)


SETUPS = {(form, tokens): setup(form, tags_are_tokens=tokens) for form in RENDER for tokens in (True, False)}
every_form = pytest.mark.parametrize(("form", "tokens"), SETUPS, ids=str)

each_form_once = sampled_cells(lambda form, tokens, **_: tokens is (form != "qwen_coder"))
"""Where the form decides and not whether its tags are tokens."""

GOOD = (
    ParsedCall("read", {"path": "a.py"}),
    ParsedCall("read", {"path": 'line\n"quoted" <b> \\ Жук 漢字', "mode": "w", "lines": -3, "options": {"deep": True}}),
    ParsedCall("read", {"path": ""}),
    ParsedCall("now", {}),
    ParsedCall("any", {"what": "ever"}),
)
BAD = (
    ParsedCall("write", {"path": "a"}),
    ParsedCall("read", {}),
    ParsedCall("read", {"path": "a", "lines": "many"}),
    ParsedCall("read", {"path": "a", "mode": "x"}),
    ParsedCall("read", {"path": "a", "options": {"deep": 5}}),
    ParsedCall("read", {"path": "a", "other": 1}),
    ParsedCall("now", {"path": "a"}),
)


def written(form: str, call: ParsedCall) -> str:
    # `<|call|>` is a stop token of gpt-oss: the end of the turn, not part of the text.
    return RENDER[form](call, TOOLS).removesuffix("<|call|>")


@each_form_once
@every_form
def test_a_forced_call_obeys_its_tool(form: str, tokens: bool) -> None:
    """What the form's renderer writes for a good call is accepted; text, and calls that break the schema, are not."""
    case = SETUPS[form, tokens]
    grammar = case.grammar()
    assert [call for call in GOOD if not case.accepts(grammar, written(form, call))] == []
    assert [call for call in BAD if case.accepts(grammar, written(form, call))] == []
    assert not case.accepts(grammar, "I would rather not.")
    assert not case.accepts(grammar, "")


@each_form_once
@every_form
def test_one_function_or_one_call(form: str, tokens: bool) -> None:
    """A named function allows only itself, once; `required` allows several calls unless parallel calls are off."""
    case = SETUPS[form, tokens]
    read, now = written(form, GOOD[0]), written(form, GOOD[3])
    named = case.grammar(ToolChoice("function", "now"))
    assert case.accepts(named, now)
    assert not case.accepts(named, read)
    assert not case.accepts(named, f"{now}\n{now}")
    assert case.accepts(case.grammar(), f"{read}\n{now}") == (form != "harmony")
    assert not case.accepts(case.grammar(parallel=False), f"{read}\n{now}")


@each_form_once
@every_form
def test_a_call_among_some_tools(form: str, tokens: bool) -> None:
    """Those that may be called can be, several times too; the others cannot."""
    case = SETUPS[form, tokens]
    read, now, any_ = written(form, GOOD[0]), written(form, GOOD[3]), written(form, GOOD[4])
    some = case.grammar(ToolChoice("required", among=frozenset(("read", "now"))))
    assert case.accepts(some, read) and case.accepts(some, now) and not case.accepts(some, any_)
    assert case.accepts(case.grammar(), any_), "the control: without a choice it is a good call"
    assert case.accepts(some, f"{read}\n{now}") == (form != "harmony")
    assert not case.accepts(some, f"{read}\n{any_}")


@each_form_once
@every_form
def test_whatever_the_grammar_allows_is_read_as_a_call(form: str, tokens: bool) -> None:
    """Random walks through the grammar end in calls of given tools whose required arguments are there, and no text."""
    case = SETUPS[form, tokens]
    walks = [case.wander(case.grammar(tools=(READ, NOW)), seed) for seed in range(8)]
    ended = [text for text in walks if text is not None]
    assert len(ended) >= 4
    for text in ended:
        calls, rest = case.calls(text)
        assert calls, text
        assert rest == "", text
        assert all(name == "now" or "path" in arguments for name, arguments in calls), text


OBJECT = ResponseFormat("json_object")
CITY = ResponseFormat(
    "json_schema", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
)


def content(form: str, text: str) -> str:
    return f"<|channel|>final<|message|>{text}" if form == "harmony" else text


@each_form_once
@every_form
def test_json_content(form: str, tokens: bool) -> None:
    """`json_object` allows any object, `json_schema` what obeys the schema; without tools no call."""
    case = SETUPS[form, tokens]
    anything, city = (
        case.grammar(ToolChoice("none"), response=OBJECT),
        case.grammar(response=CITY, tools=(), choice=ToolChoice()),
    )
    for text, is_object, is_city in (
        ('{"city": "Köln"}', True, True),
        ('{\n  "city": "a",\n  "b": [1, {}]\n}', True, True),
        ('{"town": 5}', True, False),
        ('{"city": 5}', True, False),
        ("[1]", False, False),
        ("Sure!", False, False),
        ('{"city": "a"} there', False, False),
        ("{" + " " * 100 + "}", False, False),
    ):
        assert (case.accepts(anything, content(form, text)), case.accepts(city, content(form, text))) == (
            is_object,
            is_city,
        ), text
    assert not case.accepts(anything, written(form, GOOD[3]))


@each_form_once
@every_form
def test_auto_with_a_response_format_allows_calls_or_json(form: str, tokens: bool) -> None:
    """With tools and free choice the model may call instead of answering in the format, and nothing else."""
    case = SETUPS[form, tokens]
    grammar = case.grammar(ToolChoice("auto"), response=CITY)
    assert case.accepts(grammar, content(form, '{"city": "a"}'))
    assert case.accepts(grammar, written(form, GOOD[0]))
    assert not case.accepts(grammar, content(form, "Hello"))


def test_nothing_promised_is_no_grammar() -> None:
    """Free text with free choice is not constrained."""
    case = SETUPS["hermes", True]
    assert case.grammar(ToolChoice("auto")) is None
    assert case.grammar(ToolChoice("none")) is None


@every_form
def test_after_opened_thinking(form: str, tokens: bool) -> None:
    """Where the prompt opened thinking the promised form starts at its end, by the ids of a tag that is a token, else
    by the tag's text; what is thought before is free."""
    case = SETUPS[form, tokens]
    grammar = case.grammar(start=AnswerStart(opens_thinking=True, closing_ids=(7, 8)))
    assert grammar is not None
    closing = "" if tokens else THINKING.get(form, ("", "</think>"))[1].removesuffix("<|start|>assistant")
    assert grammar.after == ((7, 8) if tokens else ())
    before = f"{'' if tokens else 'hm, Жук'}{closing}" + ("<|start|>assistant" if form == "harmony" else "\n\n")
    assert case.accepts(grammar, before + written(form, GOOD[0]))
    assert not case.accepts(grammar, before + "text")


THINKING = {"harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")}


@every_form
def test_thinking_that_the_model_opens_itself(form: str, tokens: bool) -> None:
    """The model may think first, or answer at once."""
    case = SETUPS[form, tokens]
    grammar = case.grammar(start=AnswerStart(may_think=True))
    assert grammar is not None and grammar.after == ()
    call = written(form, GOOD[0])
    opening, closing = THINKING.get(form, ("<think>", "</think>\n\n"))
    assert case.accepts(grammar, call)
    assert case.accepts(grammar, f"{opening}\nhm, Жук\n{closing}{call}")
    assert not case.accepts(grammar, f"{opening}hm{closing}text")
    assert not case.accepts(case.grammar(), f"{opening}hm{closing}{call}"), "the control: thinking is switched off"


BROKEN: dict[str, dict[str, object]] = {
    "type": {"type": "objekt"},
    "properties": {"properties": 3},
    "not": {"type": "object", "not": {}},
    "$ref": {"type": "object", "properties": {"a": {"$ref": "#/$defs/gone"}}},
    "uniqueItems": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
    "pattern": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}},
}
"""Schemas that cannot be enforced, by the keyword that is at fault."""


def strict(schema: Mapping[str, object]) -> ResponseFormat:
    return ResponseFormat("json_schema", schema, strict=True)


@each_form_once
@every_form
@pytest.mark.parametrize("keyword", BROKEN)
def test_a_strict_schema_that_cannot_be_enforced_is_named(form: str, tokens: bool, keyword: str) -> None:
    """A 400 names the field and the keyword: for content, for a forced tool and for one that may be called."""
    case, schema = SETUPS[form, tokens], BROKEN[keyword]
    with pytest.raises(BadRequest) as content_error:
        case.grammar(ToolChoice("none"), response=strict(schema))
    assert content_error.value.param == "response_format.json_schema.schema"
    assert keyword in content_error.value.message
    for choice in (REQUIRED, ToolChoice()):
        with pytest.raises(BadRequest) as tool_error:
            case.grammar(choice, tools=(READ, NOW, ToolSpec("broken", None, schema, strict=True)))
        assert tool_error.value.param == "tools[2].function.parameters"
        assert keyword in tool_error.value.message


@each_form_once
@every_form
@pytest.mark.parametrize("keyword", BROKEN)
def test_any_other_schema_is_enforced_as_far_as_it_can_be(form: str, tokens: bool, keyword: str) -> None:
    """What cannot be held is left out and noted, whichever tool has it; the others are held as ever."""
    case, schema = SETUPS[form, tokens], BROKEN[keyword]
    promise = case.promise(tools=(READ, ToolSpec("odd", None, schema)))
    [note] = promise.notes
    assert note.startswith("not enforced of tool odd: ") and keyword in note
    assert case.accepts(promise.grammar, written(form, GOOD[0]))
    assert not case.accepts(promise.grammar, written(form, BAD[2]))
    [note] = case.promise(ToolChoice("none"), response=ResponseFormat("json_schema", schema)).notes
    assert note.startswith("not enforced of response_format: ") and keyword in note


def test_a_schema_cannot_change_how_it_is_enforced() -> None:
    """llguidance's own key inside a client's schema has no effect."""
    case = SETUPS["hermes", True]
    schema = {"type": "object", "not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(BadRequest):
        case.grammar(ToolChoice("none"), response=strict(schema))


@pytest.mark.parametrize("choice", [ToolChoice("function", "gone"), ToolChoice("required")])
def test_a_call_of_no_tool_is_refused(choice: ToolChoice) -> None:
    """A forced call needs a tool."""
    with pytest.raises(BadRequest) as error:
        SETUPS["hermes", True].grammar(choice, tools=TOOLS if choice.name else ())
    assert error.value.param == "tool_choice"


FAMILIES = {
    "qwen3": "hermes",
    "qwen3_5": "qwen_coder",
    "glm4_moe_lite": "glm",
    "gpt_oss": "harmony",
    "gemma4": "hermes",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_tokenizers_of_the_families(family: str) -> None:
    """On each family's tokenizer, tags as tokens or not, its form is accepted after thinking and text is not."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(family))
    template = tokenizer.chat_template
    case = Setup(tokenizer, select_format("auto", template, tokenizer.get_added_vocab(), None))
    form = FAMILIES[family]
    grammar = case.grammar(start=AnswerStart(may_think=True))
    before = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" if form == "harmony" else ""
    tags = case.format.thinking
    if tags is not None:
        before = f"{tags.opening}\nhm\n{tags.closing}\n\n"
    for call in GOOD:
        assert case.accepts(grammar, before + written(form, call)), call
        assert case.accepts(grammar, written(form, call)), call
    assert not case.accepts(grammar, before + "text")
    assert case.accepts(case.grammar(ToolChoice("none"), response=CITY), content(form, '{"city": "a"}'))


# --- strict tools among free text -------------------------------------------------------------------------------------

STRICT = (ToolSpec("read", None, SCHEMA, strict=True), NOW, ANY)
FREE_TEXTS = (
    "",
    "Hello.",
    "a < b </tool> <tool_cal",
    "<think>\nhm\n</think>\n\nWell, Жук\n",
    "<|end|> {}",
    "<function",
)


def free(form: str, text: str) -> str:
    """Text as a model of this form says it."""
    return content(form, text) + "<|end|><|start|>assistant" if form == "harmony" and text else text


@each_form_once
@every_form
def test_strict_tools_hold_calls_and_nothing_else(form: str, tokens: bool) -> None:
    """Text is free before, between and behind calls; a call of the strict tool obeys its schema, that of another one
    has the name of a tool and the form, whatever its arguments."""
    case = SETUPS[form, tokens]
    grammar = case.grammar(ToolChoice(), tools=STRICT)
    end = "<|end|>" if form == "harmony" else ""
    for said in FREE_TEXTS if IS_FULL else FREE_TEXTS[::2]:
        assert case.accepts(grammar, content(form, said)), said
        text = free(form, said)
        assert [call for call in GOOD if not case.accepts(grammar, text + written(form, call))] == []
        assert [call for call in BAD[:-1] if case.accepts(grammar, text + written(form, call))] == []
        assert case.accepts(grammar, text + written(form, BAD[-1])), "the other tool is not strict"
        good, bad = written(form, GOOD[1]), written(form, BAD[2])
        behind = "<|start|>assistant" if form == "harmony" else "\nAnd:\n"
        assert case.accepts(grammar, f"{text}{good}{end}{behind}{good}")
        assert not case.accepts(grammar, f"{text}{good}{end}{behind}{bad}")


@every_form
def test_text_without_a_call_is_free_token_by_token(form: str, tokens: bool) -> None:
    """Beside invalid UTF-8, every token may follow that opens no call; the end of the answer too."""
    case = SETUPS[form, tokens]
    grammar = case.grammar(ToolChoice(), tools=STRICT)
    assert grammar is not None
    for text in FREE_TEXTS:
        matcher = LLMatcher(case.guide, grammar.lark, log_level=0)
        assert matcher.consume_tokens(case.tokenizer.encode(text, add_special_tokens=False)) or not text
        mask = matcher.compute_bitmask()
        barred = [token for token in range(len(case.tokenizer)) if not mask[token // 8] >> token % 8 & 1]
        assert {case.tokenizer.decode([token]) for token in barred} <= {"\ufffd"}, text


def test_strict_tools_hold_calls_of_forms_that_are_not_the_models_own() -> None:
    """A tag that is a token can be spelt in text too, and a model may write the bare form: both are read as calls."""
    for form, tokens in SETUPS:
        case = SETUPS[form, tokens]
        grammar = case.grammar(ToolChoice(), tools=STRICT)
        good, bad = (qwen_coder.render(call, TOOLS).partition("\n")[2] for call in (GOOD[1], BAD[2]))
        before, behind = ("<|channel|>final<|message|>", "<|end|>") if form == "harmony" else ("Well.\n", "")
        assert case.accepts(grammar, f"{before}{good.removesuffix('</tool_call>')}{behind}")
        assert not case.accepts(grammar, f"{before}{bad.removesuffix('</tool_call>')}{behind}")
    case = SETUPS["hermes", True]
    matcher = LLMatcher(case.guide, case.grammar(ToolChoice(), tools=STRICT).lark, log_level=0)  # type: ignore[union-attr]
    spelt = case.tokenizer.encode("<tool_") + case.tokenizer.encode('call>\n{"name": "read", "arguments": {"path": 5')
    assert matcher.try_consume_tokens(spelt) == len(spelt) - 1


def test_the_early_recipient_of_harmony_is_held_too() -> None:
    """gpt-oss also names the recipient before the channel, at the very beginning or in a later message."""
    for tokens in (True, False):
        case = SETUPS["harmony", tokens]
        grammar = case.grammar(ToolChoice(), tools=STRICT)
        for before in ("", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"):
            for form in (" json", " <|constrain|>json"):
                head = f"{before} to=functions.read<|channel|>commentary{form}<|message|>"
                assert case.accepts(grammar, f'{head}{{"path": "a"}}')
                assert case.accepts(
                    grammar, f'{head}{{"path": "a"}}<|end|><|start|>assistant<|channel|>final<|message|>x'
                )
                assert not case.accepts(grammar, f'{head}{{"path": 5}}')
            assert not case.accepts(grammar, f"{before} to=functions.gone<|channel|>commentary json<|message|>{{}}")
        assert case.accepts(grammar, "<|channel|>final<|message|>From here to=there")


@every_form
def test_auto_without_strict_tools_is_no_grammar(form: str, tokens: bool) -> None:
    """It would cost speed and promise nothing; nor are strict tools held where none may be called."""
    case = SETUPS[form, tokens]
    assert case.promise(ToolChoice()) == Promise(None)
    assert case.promise(ToolChoice("none"), tools=STRICT) == Promise(None)


def test_strict_tools_of_a_foreign_form_are_noted() -> None:
    """Nobody here knows its grammar: the calls are free, and the notes say so. Forced ones come in the JSON form."""
    foreign = ForeignCallForm("[TOOL_CALLS]", "", lambda text, tools: json.loads(text))
    case = Setup(byte_tokenizer(TAGS), select_format("auto", "", (), foreign))
    promise = case.promise(ToolChoice(), tools=STRICT)
    assert promise.grammar is None and "strict" in promise.notes[0]
    assert case.accepts(case.grammar(), written("hermes", GOOD[0]))


FOREIGN = Setup(
    byte_tokenizer(TAGS),
    select_format("auto", "", (), ForeignCallForm("[CALL]", "", lambda text, tools: json.loads(text))),
)


@given(schemas, st.sampled_from([*SETUPS.values(), FOREIGN]), st.booleans())
@settings(max_examples=num_examples(20), deadline=None)
def test_no_schema_of_a_tool_that_is_not_strict_refuses_a_request(
    schema: dict[str, object], case: Setup, is_forced: bool
) -> None:
    """In every form there is a grammar that can be used, and it leaves the other tools as they are."""
    odd = ToolSpec("odd", None, {"properties": {"p": schema, "<q>": schema}, "required": ["p", "<q>"]})
    grammar = case.grammar(REQUIRED if is_forced else ToolChoice(), tools=(odd, STRICT[0]))
    if grammar is None:
        assert case is FOREIGN and not is_forced
        return
    form = "harmony" if case.format.channels == "harmony" else case.format.tool_forms[0].name
    form = "hermes" if form == "foreign" else form
    assert case.accepts(grammar, written(form, GOOD[0]))
    assert not case.accepts(grammar, written(form, BAD[2]))
