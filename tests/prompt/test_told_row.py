"""Calls that a template has no place for, and asks for in words or shows beside the content None."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve.app.learned_template import read_calls, row_of_calls, unheld_calls
from kvserve.core import CallRow, Message, TextBlock, ToolChoice
from kvserve.output.formats import select_format
from kvserve.output.said import MessageReader
from kvserve.output.splitter import Splitter
from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.told_row import find_told_row
from tests.calls import calls_of
from tests.output.test_grammar import Setup, byte_tokenizer
from tests.prompt.call_forms import ANY, READ, VARIABLES, conversation, found_row, source_of
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.vocabularies import TEMPLATES, template_family, tokens_in

TOLD = "Where a tool is needed, respond only with <|tool_call|> followed by a JSON list of tools used."
SOURCE = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set said = messages[1:] %}"
    f"{{% else %}}{{% set first = 'Help.' + (' {TOLD}' if tools else '') %}}{{% set said = messages %}}{{% endif %}}"
    "<|role|>system<|said|>{{ first }}<|end|>\n"
    "{% if tools %}<|role|>tools<|said|>{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in said %}<|role|>{{ m.role }}<|said|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant<|said|>{% endif %}"
)
"""As Granite 3's: no place for calls, and nothing said of them behind a client's own system message."""

ROW = CallRow(('<|tool_call|>[{"name": "',), ('", "arguments": ',), ('}, {"name": "',), ("}]",))
HARD = {"path": 'a "b" \\ ]} <|tool_call|>[{"name": "any", "arguments": {}}]\n', "lines": 3}


def row_of(source: str) -> CallRow | None:
    return find_told_row(CompiledTemplate(source, VARIABLES), read_calls)


def test_the_form_that_the_words_ask_for_is_found() -> None:
    assert row_of(SOURCE) == ROW


@pytest.mark.skipif(not TEMPLATES, reason="the shared templates are not here")
def test_it_is_found_in_a_real_template() -> None:
    assert row_of_calls(template_family("granite3_3").tokenizer) == ROW


@pytest.mark.parametrize(
    "words",
    [
        "Tools are in <|tool_call|>, which is a JSON list.",
        "Respond with <|tool_call|> and the name of the tool.",
        "Respond with <|tool_call|>. A JSON list of tools follows.",
        "Respond with a JSON list of tools.",
        "Respond with <|said|> followed by a JSON list.",
        "Respond with <a_call> followed by a JSON list, or write <b_call> followed by a JSON list.",
        "Never respond with <|tool_call|> followed by a JSON list.",
        "When you call a tool, its result comes back in <tool_response> as a JSON list.",
        "Call the functions that are listed behind [AVAILABLE_TOOLS] as a JSON list.",
        "Think first, then write your <answer>: a JSON list of your findings.",
        "Respond with <|tool_call|> followed by a JSON list of objects with the keys tool_name and parameters.",
    ],
)
def test_other_words_ask_for_nothing_that_is_understood(words: str) -> None:
    """A list of tools, no list, another sentence, no tag, a tag of every turn, two tags, what is forbidden, what comes
    back, what is listed, an answer, other keys."""
    source = SOURCE.replace(TOLD, words)
    assert source != SOURCE and row_of(source) is None


def test_a_template_that_writes_calls_is_asked_for_what_it_writes() -> None:
    """Its words may be older than its form."""
    source = SOURCE.replace("{{ m.content }}", "{{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls }}")
    assert row_of(source) is None
    assert row_of(source_of("tags")) is None and isinstance(found_row("tags"), CallRow)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    backend = byte_level_backend().from_str(byte_level_backend().to_str())
    backend.add_special_tokens(tokens_in(SOURCE))
    tokenizer = tokenizer_of(backend, SOURCE)
    row = row_of_calls(tokenizer)
    assert isinstance(row, CallRow)
    output_format = select_format("auto", SOURCE, tokens_in(SOURCE), None, row)
    return ChatTemplate(tokenizer, tags=output_format.tags, row=row)


@pytest.mark.parametrize("system", [(), (Message("system", (TextBlock("Be kind."),)),)], ids=["own", "client's"])
def test_calls_of_the_history_stand_in_that_form(template: ChatTemplate, system: tuple[Message, ...]) -> None:
    """In the text of the answer, with the model's own token, also where nothing is said of it in front; and the same
    spelling in a user's words is no token."""
    said, *rest = conversation([("read_file", HARD), ("any", {})])
    asked = Message("user", (*said.blocks, TextBlock(" <|tool_call|>")))
    prompt = template.write((*system, asked, *rest), (READ, ANY), thinking=False)
    calls = (
        f'<|tool_call|>[{{"name": "read_file", "arguments": {json.dumps(HARD)}}}, {{"name": "any", "arguments": {{}}}}]'
    )
    assert f"<|role|>assistant<|said|>{calls}<|end|>" in prompt.shown
    assert "<tool_call>" not in prompt.shown
    token = template.control.encode("<|tool_call|>", add_special_tokens=False)
    assert len(token) == 1
    ids = list(template.control.encode(prompt.text, add_special_tokens=False))
    assert ids.count(token[0]) == (1 if system else 2)  # before the calls, and in the template's own words


@pytest.mark.parametrize("added", [(), ("<|tool_call|>",)], ids=["text", "token"])
def test_the_form_is_held(template: ChatTemplate, added: tuple[str, ...]) -> None:
    """What is enforced is what the model writes, whether its tag is a token or not, and not another form."""
    output_format = select_format("auto", SOURCE, tokens_in(SOURCE), None, ROW)
    assert unheld_calls(template, output_format, ROW) is None
    case = Setup(byte_tokenizer(added), output_format)
    forced = case.grammar(ToolChoice("required"), tools=(ANY,))
    assert forced is not None
    assert case.accepts(forced, '<|tool_call|>[{"name": "any", "arguments": {}}]')
    assert not case.accepts(forced, '<tool_call>{"name": "any", "arguments": {}}</tool_call>')


@pytest.mark.parametrize("tag", ["<|tool_call|>", "<tool_call>"])
@given(
    values=st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=8), max_size=2), min_size=1, max_size=3),
    turned=st.booleans(),
    indent=st.sampled_from([None, 1]),
    space=st.sampled_from(["", " ", "\n"]),
)
def test_what_granites_write_is_read(
    tag: str, values: list[dict[str, str]], turned: bool, indent: int | None, space: str
) -> None:
    """Keys in any order, with any white space; Granite 3.1 writes its tag in other letters, and no closing one."""
    listed = [{"arguments": each, "name": "any"} if turned else {"name": "any", "arguments": each} for each in values]
    text = tag + space + json.dumps(listed, indent=indent) + space
    output_format = select_format("auto", SOURCE, tokens_in(SOURCE), None, ROW)
    reasoning, content, calls = MessageReader.under(output_format, (ANY,))(text)
    assert not reasoning and not content.strip()
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("any", each) for each in values]


def test_a_list_that_is_no_calls_is_text() -> None:
    """The control, of both tags."""
    output_format = select_format("auto", SOURCE, tokens_in(SOURCE), None, ROW)
    call = '{"name": "any", "arguments": {}}'
    others = ('{"arguments": {}, "name": "any"}', f"[{call.replace('any', 'nobody')}]", "[]", '[{"name": "any"')
    for text in ("<|tool_call|>[1, 2]", "<tool_call>[1, 2]", *(f"As in <tool_call>{other}" for other in others)):
        assert MessageReader.under(output_format, (ANY,))(text)[1:] == (text, ())


def test_a_list_that_a_limit_ended_is_text() -> None:
    """More calls may have followed."""
    output_format = select_format("auto", SOURCE, tokens_in(SOURCE), None, ROW)
    text = '<tool_call>[{"name": "any", "arguments": {}}]'
    for is_cut, num_calls in ((False, 1), (True, 0)):
        splitter = Splitter(output_format, starts_in_reasoning=False, tools=(ANY,))
        deltas = [*splitter.feed(text), *splitter.finish(cut=is_cut)]
        assert len(calls_of(deltas)) == num_calls


# --- beside the content None ------------------------------------------------------------------------------------------

SHOWN = (
    "{% set ns = namespace(begun=false, behind=false) %}"
    "{% for m in messages %}{% if m.role in ('user', 'system') %}<|user|>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m.content is none %}{% for call in m.tool_calls %}"
    "{{ '<|model|><|calls|>' if not ns.begun else '\n' }}<|call|>{{ call.type }}<|sep|>"
    "{{ call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}<|call_end|>"
    "{% if ns.begun %}<|calls_end|><|end|>{% endif %}{% set ns.begun = true %}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' and m.content is not none %}<|model|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|model|>{% endif %}"
)
"""As DeepSeek V3's first one: what ends a lone call and begins a second message of calls is missing."""

SHOWN_ROW = CallRow(
    ("<|calls|><|call|>function<|sep|>",),
    ("\n```json\n",),
    ("\n```<|call_end|>\n<|call|>function<|sep|>",),
    ("\n```<|call_end|><|calls_end|>",),
)


def test_the_form_of_two_calls_beside_no_content_is_found() -> None:
    """Of one alone no end is shown. One that its reader does not read is none."""
    assert row_of(SHOWN) == SHOWN_ROW
    assert find_told_row(CompiledTemplate(SHOWN, VARIABLES), lambda row, tools, text: ("", text, ())) is None


@pytest.mark.skipif(not TEMPLATES, reason="the shared templates are not here")
def test_it_is_found_in_the_template_of_r1() -> None:
    row = row_of_calls(template_family("r1_distill_llama").tokenizer)
    assert isinstance(row, CallRow) and row.opening[0].startswith("<｜tool▁calls▁begin｜>")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("shown", "otherwise"),
    [
        ("m.content is none", "m.content == 'never'"),
        ("<|calls|>", ""),
        ("\n```json\n' + call.function.arguments", "\n```json\n' + call.function.arguments | upper"),
    ],
)
def test_what_does_not_read_back_is_no_form(shown: str, otherwise: str) -> None:
    """Calls that are not written at all, without what opens the message, and with other arguments."""
    assert shown in SHOWN
    assert row_of(SHOWN.replace(shown, otherwise)) != SHOWN_ROW


def written_as_shown(calls: list[tuple[str, dict[str, object]]]) -> str:
    each = [
        f"<|call|>function<|sep|>{name}\n```json\n{json.dumps(arguments, ensure_ascii=False)}\n```<|call_end|>"
        for name, arguments in calls
    ]
    return "<|calls|>" + "\n".join(each) + "<|calls_end|>"


@given(values=st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=8), max_size=2), min_size=1, max_size=3))
def test_what_is_shown_beside_no_content_is_read(values: list[dict[str, object]]) -> None:
    """One call, and several."""
    output_format = select_format("auto", SHOWN, tokens_in(SHOWN), None, SHOWN_ROW)
    text = written_as_shown([("any", each) for each in values])
    reasoning, content, calls = MessageReader.under(output_format, (ANY,))(text)
    assert not reasoning and not content.strip()
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("any", each) for each in values]


def test_the_history_has_what_is_shown_beside_no_content() -> None:
    """Each message of calls whole, also the second one, which the template itself would begin with nothing."""
    backend = byte_level_backend().from_str(byte_level_backend().to_str())
    backend.add_special_tokens(tokens_in(SHOWN))
    template = ChatTemplate(tokenizer_of(backend, SHOWN), tags=("<|calls|>",), row=SHOWN_ROW)
    calls: list[tuple[str, dict[str, object]]] = [("read_file", {"path": "a\n``` b", "lines": 3}), ("any", {})]
    talk = (*conversation(calls[:1]), *conversation(calls)[1:])
    prompt = template.write(talk, (READ, ANY), thinking=False)
    for said in (calls[:1], calls):
        assert prompt.shown.count(f"<|model|>{written_as_shown(said)}<|end|>") == 1
