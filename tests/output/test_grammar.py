"""Forced forms against llguidance's matcher on real tokenizers: what is promised is accepted, and nothing else."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvserve.core import ContentDelta, Grammar, ReasoningDelta, ResponseFormat, ToolChoice, ToolSpec
from kvserve.errors import BadRequest
from kvserve.output import harmony
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.grammar import ThinkingAhead, build_grammar
from kvserve.output.splitter import Splitter
from kvserve.output.tool_parsers import glm, hermes, qwen_coder
from kvserve.output.tool_parsers.form import ParsedCall
from tests.calls import calls_of
from tests.models import tiny_model

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
        self.added = frozenset(tokenizer.get_added_vocab())
        self.guide: LLTokenizer = from_tokenizer(tokenizer)

    def grammar(
        self,
        choice: ToolChoice = REQUIRED,
        *,
        tools: Sequence[ToolSpec] = TOOLS,
        parallel: bool = True,
        response: ResponseFormat = TEXT,
        thinking: ThinkingAhead | None = None,
    ) -> Grammar | None:
        return build_grammar(
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=response,
            output_format=self.format,
            added_tokens=self.added,
            thinking=thinking,
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
        closings = [self.tokenizer.encode(tag) for tag in ("</arg_value>", "\n</parameter>", "</think>")]
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


@every_form
def test_a_forced_call_obeys_its_tool(form: str, tokens: bool) -> None:
    """What the form's renderer writes for a good call is accepted; text, and calls that break the schema, are not."""
    case = SETUPS[form, tokens]
    grammar = case.grammar()
    assert [call for call in GOOD if not case.accepts(grammar, written(form, call))] == []
    assert [call for call in BAD if case.accepts(grammar, written(form, call))] == []
    assert not case.accepts(grammar, "I would rather not.")
    assert not case.accepts(grammar, "")


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
    """Where the prompt opened thinking the grammar starts at its end: ids and bound are handed on."""
    case = SETUPS[form, tokens]
    grammar = case.grammar(thinking=ThinkingAhead(opened=True, closing_ids=(7, 8), max_num_tokens=50))
    assert grammar is not None
    assert (grammar.after, grammar.max_free_tokens) == ((7, 8), 50)
    before = "<|start|>assistant" if form == "harmony" else "\n\n"
    assert case.accepts(grammar, before + written(form, GOOD[0]))
    assert not case.accepts(grammar, before + "text")


THINKING = {"harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")}


@every_form
def test_thinking_that_the_model_opens_itself(form: str, tokens: bool) -> None:
    """The model may think first, not longer than allowed, or answer at once."""
    case = SETUPS[form, tokens]
    grammar = case.grammar(thinking=ThinkingAhead(opened=False, closing_ids=(), max_num_tokens=10))
    assert grammar is not None
    assert (grammar.after, grammar.max_free_tokens) == ((), None)
    call = written(form, GOOD[0])
    opening, closing = THINKING.get(form, ("<think>", "</think>\n\n"))
    assert case.accepts(grammar, call)
    assert case.accepts(grammar, f"{opening}\nhm, Жук\n{closing}{call}")
    assert not case.accepts(grammar, f"{opening}{'a' * 41}{closing}{call}")
    assert not case.accepts(grammar, f"{opening}hm{closing}text")


BROKEN: list[dict[str, object]] = [
    {"type": "objekt"},
    {"properties": 3},
    {"type": "object", "not": {}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/gone"}}},
    {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}},
]


@every_form
@pytest.mark.parametrize("schema", BROKEN, ids=str)
def test_a_schema_that_cannot_be_enforced_is_named(form: str, tokens: bool, schema: dict[str, object]) -> None:
    """Invalid or unsupported schemas are a 400 that names the field, for content and for a forced tool."""
    case = SETUPS[form, tokens]
    with pytest.raises(BadRequest) as content_error:
        case.grammar(ToolChoice("none"), response=ResponseFormat("json_schema", schema))
    assert content_error.value.param == "response_format.json_schema.schema"
    with pytest.raises(BadRequest) as tool_error:
        case.grammar(tools=(READ, NOW, ToolSpec("broken", None, schema)))
    assert tool_error.value.param == "tools[2].function.parameters"


def test_a_schema_cannot_change_how_it_is_enforced() -> None:
    """llguidance's own key inside a client's schema has no effect."""
    case = SETUPS["hermes", True]
    schema = {"type": "object", "not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(BadRequest):
        case.grammar(ToolChoice("none"), response=ResponseFormat("json_schema", schema))


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
    thinking = ThinkingAhead(opened=False, closing_ids=(), max_num_tokens=100)
    grammar = case.grammar(thinking=thinking)
    before = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" if form == "harmony" else ""
    tags = case.format.thinking
    if tags is not None:
        before = f"{tags.opening}\nhm\n{tags.closing}\n\n"
    for call in GOOD:
        assert case.accepts(grammar, before + written(form, call)), call
        assert case.accepts(grammar, written(form, call)), call
    assert not case.accepts(grammar, before + "text")
    assert case.accepts(case.grammar(ToolChoice("none"), response=CITY), content(form, '{"city": "a"}'))
