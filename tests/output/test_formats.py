"""Which format is chosen from the family's setting, the template and the vocabulary."""

from collections.abc import Collection

import pytest

from kvserve.core import CallRow, ToolChoice, ToolSpec
from kvserve.output.formats import select_format
from kvserve.output.said import MessageReader
from kvserve.output.tool_parsers.foreign import ForeignCallForm
from tests.output.test_grammar import STRICT, Setup, byte_tokenizer

ALL_FORMS = {"hermes", "qwen_coder", "qwen_coder_bare", "glm"}
GLM_TEMPLATE, CODER_TEMPLATE = "... <arg_key> ...", "... <tool_call>\n<function= ..."


@pytest.mark.parametrize(
    ("family", "template", "first"),
    [
        ("auto", "", "hermes"),
        ("auto", GLM_TEMPLATE, "glm"),
        ("auto", CODER_TEMPLATE, "qwen_coder"),
        ("qwen3", "", "hermes"),
        ("qwen3", CODER_TEMPLATE, "qwen_coder"),
        ("glm4", "", "glm"),
        ("generic", GLM_TEMPLATE, "hermes"),
    ],
)
def test_the_family_comes_first_and_all_forms_are_read(family: str, template: str, first: str) -> None:
    """The setting and the template decide the order only."""
    forms = select_format(family, template, [], None).tool_forms
    assert forms[0].name == first
    assert {form.name for form in forms} == ALL_FORMS


@pytest.mark.parametrize(
    ("tokens", "name", "opening"),
    [
        (["<think>", "</think>"], "hermes", "<think>"),
        ([], "hermes", "<think>"),
        (["<|channel>", "<channel|>"], "gemma4", "<|channel>thought"),
        (["<longcat_think>", "</longcat_think>"], "longcat", "<longcat_think>"),
        (["<|think:start|>", "<|think:end|>"], "think_tokens", "<|think:start|>"),
        (["<|open|>", "<|close|>", "<|sep|>"], "xtml", "<|open|>think<|sep|>"),
        (["<|channel|>", "<|message|>", "<|end|>"], "harmony", None),
    ],
)
def test_the_vocabulary_reveals_the_thinking_tags(tokens: Collection[str], name: str, opening: str | None) -> None:
    """A family is known by the tokens that its tags are made of."""
    chosen = select_format("auto", "", tokens, None)
    assert chosen.name == name
    assert (chosen.thinking.opening if chosen.thinking else None) == opening
    assert chosen.channels == ("harmony" if name == "harmony" else "tags")


def test_a_foreign_form_comes_first_unless_its_tag_is_read_here() -> None:
    """A parser from outside is used for tags of its own only."""
    foreign = ForeignCallForm("<|tool_call>", "<tool_call|>", lambda text, tools: {})
    known = ForeignCallForm("<tool_call>", "</tool_call>", lambda text, tools: {})
    assert select_format("auto", "", [], foreign).tool_forms[0].open_tag == "<|tool_call>"
    assert {form.name for form in select_format("auto", "", [], known).tool_forms} == ALL_FORMS


@pytest.mark.parametrize(
    ("family", "first"), [("auto", "derived"), ("qwen3", "hermes"), ("glm4", "glm"), ("generic", "hermes")]
)
def test_the_family_moves_the_form_of_the_template_too(family: str, first: str) -> None:
    """It is read and held wherever it stands; calls are forced in the form that comes first."""
    row = CallRow(("[CALLS]",), ("[ARGS]",), ("[CALLS]",), ())
    chosen = select_format(family, "", [], None, row)
    assert chosen.tool_forms[0].name == first
    assert {form.name for form in chosen.tool_forms} == ALL_FORMS | {"derived"}
    case = Setup(byte_tokenizer(()), chosen)
    good, bad = (f'[CALLS]read[ARGS]{{"path": {value}}}' for value in ('"a"', "5"))
    assert case.calls(f"So {good}", STRICT) == ([("read", {"path": "a"})], "So ")
    held = case.grammar(ToolChoice(), tools=STRICT)
    assert case.accepts(held, good) and not case.accepts(held, bad)
    assert case.accepts(case.grammar(ToolChoice("required"), tools=STRICT), good) is (first == "derived")


@pytest.mark.parametrize(
    ("opening", "closing", "answer"),
    [
        ("[THINK]", "[/THINK]", "{}"),
        ("<seed:think>", "</seed:think>", "{}"),
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>{}<|END_RESPONSE|>"),
        ("<|inner_prefix|>", "<|inner_suffix|>", "{}"),
    ],
)
def test_tokens_around_thinking_and_answer_reach_no_client(opening: str, closing: str, answer: str) -> None:
    """Those that Ministral, Seed, Command and Apertus think in are told from the vocabulary, wherever they stand."""
    text = f"{opening}Hm.{closing}{answer.format('Hello.')}"
    tokens = [opening, closing, "<|START_RESPONSE|>", "<|END_RESPONSE|>"]
    assert MessageReader.under(select_format("auto", "", tokens, None), ())(text) == ("Hm.", "Hello.", ())
    assert MessageReader.under(select_format("auto", "", [], None), ())(text).content == text, (
        "the control: words of the model"
    )


def test_tokens_around_a_call_of_seeds_reach_no_client() -> None:
    """Its calls are Qwen-coder's between tokens of its own, which say nothing."""
    call = "<function=look>\n<parameter=q>a b</parameter>\n</function>"
    tokens, tools = ["<seed:think>", "</seed:think>"], (ToolSpec("look", None, {"type": "object"}),)
    said = MessageReader.under(select_format("auto", CODER_TEMPLATE, tokens, None), tools)
    for text in (f"<seed:tool_call>\n{call}\n</seed:tool_call>", f"So:\n<seed:tool_call>{call}</seed:tool_call>\n"):
        assert said(text) == ("", text.partition("<seed")[0].strip(), (("look", '{"q": "a b"}'),))
