"""Forms of calls derived from templates: which are, that they read back what the template writes, hold and replay."""

import json
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from kvserve.app.learned_template import read_calls
from kvserve.core import CallRow, CallSlot, ContentDelta, JsonObject, ReasoningDelta, ResponseFormat, ToolChoice
from kvserve.output.formats import OutputFormat, select_format
from kvserve.output.grammar import AnswerStart, build_grammar
from kvserve.output.splitter import Splitter
from kvserve.output.tool_parsers import derived
from kvserve.prompt.boundaries import learn_markers
from kvserve.prompt.call_row import NoRow, find_call_row
from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate
from tests.calls import calls_of
from tests.laws import num_examples, sampled, sampled_cells
from tests.output.test_grammar import Setup, byte_tokenizer
from tests.output.tool_parsers.test_calls import JSON, TEXTS
from tests.prompt.call_forms import (
    ANY,
    BARE_ROWS,
    DERIVED,
    HELD_BY_TOKENS,
    MISTRALS,
    READ,
    REAL_MARKED,
    REAL_PAIRS,
    REAL_ROWS,
    SMALL,
    VARIABLES,
    WITH_IDS,
    as_written,
    check_goes_out_as_written,
    conversation,
    found_row,
    source_of,
)
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.test_tool_words import PRIVATE
from tests.prompt.turns import Family, Talk, in_odd_tokens, num_common
from tests.prompt.vocabularies import TEMPLATES, real_family, tokens_in

TOOLS = (READ, ANY)
# noncharacters that control tokens are marked with become U+FFFD on their way into a prompt (test_control.py)
ARGUMENTS = st.dictionaries(TEXTS, JSON, max_size=3).filter(
    lambda arguments: not set(PRIVATE) & set(json.dumps(arguments, ensure_ascii=False))
)
EVERY = sampled(DERIVED, {*SMALL, "kimi_k2_moonshot", "mistral_nemo"})
every_form = pytest.mark.parametrize("name", EVERY)
DERIVED_IN_EVERY_RUN = {*SMALL, "kimi_k2_moonshot", "mistral_nemo", "minimax_m2", "gemma4", "qwen3"}
"""Small and real ones, and two of which nothing is derived."""
OTHER_TAGS = ("apertus", "cohere_r7b", "ministral3_reasoning")
"""Templates whose thinking stands in tags of their own, not in `<think>`."""


@cache
def family_of(name: str) -> Family:
    """A template with a small vocabulary, in which what looks like a token is one."""
    source, row = source_of(name), found_row(name)
    assert isinstance(row, CallRow)
    backend = byte_level_backend().from_str(byte_level_backend().to_str())
    backend.add_special_tokens(tokens_in(source))
    tokenizer = tokenizer_of(backend, source)
    output_format = select_format("auto", source, tokens_in(source), None, row)
    template = ChatTemplate(tokenizer, tags=output_format.tags, row=output_format.row)
    markers = learn_markers(tokenizer, template)
    return Family(name, tokenizer, template, markers, Stitcher.of(tokenizer, template, markers), output_format)


def written(name: str, *calls: tuple[str, JsonObject]) -> str:
    """These calls as the template itself writes them."""
    row = DERIVED[name]
    prompt = family_of(name).template.write(conversation(calls), TOOLS, thinking=False)
    return as_written(prompt.shown, row, calls)


def read(output_format: OutputFormat, pieces: list[str], tools=TOOLS) -> tuple[list[tuple[str, str]], str]:  # type: ignore[no-untyped-def]
    """The calls of an answer that comes in these pieces, arguments as they were sent, and all other text."""
    splitter = Splitter(output_format, starts_in_reasoning=False, tools=tools)
    deltas = [delta for piece in pieces for delta in splitter.feed(piece)] + splitter.finish(cut=False)
    assert "".join(piece.text for piece in splitter.pieces) == "".join(pieces)
    said = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta | ReasoningDelta))
    return [(end.call.name, end.call.arguments) for end in calls_of(deltas)], said


@pytest.mark.parametrize("name", sampled((*SMALL, *TEMPLATES), DERIVED_IN_EVERY_RUN))
def test_which_templates_are_derived(name: str) -> None:
    """Each as the tables of these tests have it, with the reason where nothing is derived (`pytest -s` shows it)."""
    found = found_row(name)
    print(f"{name:28}", f"not derived: {found.reason}" if isinstance(found, NoRow) else f"derived: {found}")
    assert isinstance(found, CallRow) == (name in REAL_ROWS | REAL_PAIRS | REAL_MARKED | set(SMALL))
    if isinstance(found, CallRow) and found.pairs is None:
        assert (CallSlot.ID in (*found.middle, *found.closing)) == (name in WITH_IDS)
        assert derived.is_bare(found) == (name in BARE_ROWS)
        assert ("[TOOL_CALLS]" in str(found.opening[0])) == (name in MISTRALS)


def test_the_parts_of_a_row_are_what_the_template_writes() -> None:
    """Tags, separators, numbers and ids, each where it stands."""
    number, id_slot = CallSlot.NUMBER, CallSlot.ID
    assert found_row("tags") == CallRow(
        ("<|calls|><|call|>functions.",),
        (":", number, "<|args|>"),
        ("<|call_end|><|call|>functions.",),
        ("<|call_end|><|calls_end|>",),
    )
    assert found_row("names") == CallRow(("[CALLS]",), ("[ID]", id_slot, "[ARGS]"), ("[CALLS]",), ())
    assert found_row("list") == CallRow(
        ('[CALLS][{"name": "',),
        ('", "arguments": ',),
        (', "id": "', id_slot, '"}, {"name": "'),
        (', "id": "', id_slot, '"}]'),
    )
    assert found_row("bare") == CallRow(('{"name": "',), ('", "parameters": ',), None, ("}",))


@pytest.mark.parametrize(
    "arguments",
    [
        "{{ c.arguments | string }}",
        "{{ c.arguments | tojson | tojson }}",
        "{% for k, v in c.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
        '{{ c.arguments | tojson | replace("</tool_call>", "") }}',
        '{{ c.arguments | tojson | replace("true", "1") }}',
        "{{ c.arguments | tojson | replace('null', 'None') }}",
    ],
)
def test_what_does_not_read_back_is_not_derived(arguments: str) -> None:
    """Arguments that are no JSON object, or lose something on the way into the prompt."""
    source = SMALL["tags"].replace("{{ c.arguments | tojson }}", arguments)
    assert source != SMALL["tags"]
    assert isinstance(find_call_row(CompiledTemplate(source, VARIABLES), read_calls), NoRow)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("tags", "<|calls|>", "<|end|>\n<|turn|>tools\n<|calls|>"),
        ("tags", "{{ m.role }}", "{{ 'caller' if m.tool_calls else m.role }}"),
        ("names", "[CALLS]", "Action: "),
        ("names", "[ARGS]", ""),
        ("bare", "{% if tools %}", "{# <think> #}{% if tools %}"),
        ("bare", '{"name"', '[{"name"'),
    ],
    ids=[
        "a turn of its own",
        "a header of its own",
        "no tag",
        "an id before the arguments",
        "no tag behind thinking",
        "a list without a tag",
    ],
)
def test_what_cannot_be_told_from_text_is_not_derived(name: str, old: str, new: str) -> None:
    """Nor is what the model does not write itself."""
    assert old in SMALL[name]
    found = find_call_row(CompiledTemplate(SMALL[name].replace(old, new), VARIABLES), read_calls)
    assert isinstance(found, NoRow), found


def test_the_reason_is_what_tells_most() -> None:
    """A template that wants a result behind each call refuses the first conversation that is tried, and says nothing of
    its form; what it writes in the other one does."""
    wants = (
        "{% for m in messages %}{% if m.role == 'user' and loop.previtem is defined and loop.previtem.tool_calls %}"
        "{{ raise_exception('alternate') }}{% endif %}"
    )
    source = SMALL["names"].replace("{% for m in messages %}", wants)
    assert isinstance(find_call_row(CompiledTemplate(source, VARIABLES), read_calls), CallRow)
    found = find_call_row(CompiledTemplate(source.replace("[CALLS]", "Action: "), VARIABLES), read_calls)
    assert isinstance(found, NoRow) and found.reason == "no tag stands before a call: 'Action: '"


@sampled_cells(lambda name: name not in ("tags", "fences", "counted"))
@every_form
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    """Any arguments, one call or several, cut anywhere: the same names and bytes, and no other text."""
    most = 1 if DERIVED[name].between is None else 3
    calls = st.lists(
        st.tuples(st.sampled_from(["any", "read_file"]), ARGUMENTS),
        min_size=1, max_size=most,
    )  # fmt: skip

    @settings(max_examples=num_examples(20), deadline=None)
    @given(calls, st.data())
    def check(calls: list[tuple[str, JsonObject]], data: st.DataObject) -> None:
        text = written(name, *calls)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        found, said = read(family_of(name).output_format, pieces)
        assert found == [(tool, json.dumps(arguments, ensure_ascii=False)) for tool, arguments in calls]
        assert said == ""

    check()


@every_form
def test_a_call_goes_out_as_it_is_written(name: str) -> None:
    """The name before the arguments' first character, each piece of them as it comes."""
    text = written(name, ("read_file", {"path": "abcdef", "lines": 3}))
    check_goes_out_as_written(family_of(name).output_format, text)


@every_form
def test_what_only_looks_like_a_call_stays_text(name: str) -> None:
    """A tool that is not offered, arguments that are none, an opening alone; to the letter."""
    text = written(name, ("read_file", {"path": "abcdef"}))
    output_format, opening = family_of(name).output_format, str(DERIVED[name].opening[0])
    for odd in (
        text.replace("read_file", "remove_file"),
        text.replace("read_file", "read_file2"),
        text.replace('{"path": "abcdef"}', "path"),
        f"So {opening} opens it.",
        f"{opening}read_file",
    ):
        assert read(output_format, [odd]) == ([], odd)


@every_form
def test_text_around_calls_stays(name: str) -> None:
    """Before and behind them; where no tag opens a call, text before it makes it text."""
    text = written(name, ("read_file", {"path": "a"}))
    calls = [("read_file", '{"path": "a"}')]
    output_format = family_of(name).output_format
    assert read(output_format, [f"{text}, {{and}} more"]) == (calls, ", {and} more")
    if derived.is_bare(DERIVED[name]):
        assert read(output_format, [f"Like {text}"]) == ([], f"Like {text}")
    else:
        assert read(output_format, [f"I look.\n{text}"]) == (calls, "I look.\n")


@every_form
def test_what_closes_calls_may_be_missing(name: str) -> None:
    """Cut anywhere behind the arguments, the call is whole."""
    text = written(name, ("read_file", {"path": "a"}))
    end = text.index('{"path": "a"}') + len('{"path": "a"}')
    for size in range(end, len(text)):
        calls, said = read(family_of(name).output_format, [text[:size]])
        assert calls == [("read_file", '{"path": "a"}')]
        assert any(tag.startswith(said.strip()) for tag in ("", *derived.form_of(DERIVED[name]).follow_tags))


@every_form
def test_a_call_in_thinking_is_meant_where_nothing_follows(name: str) -> None:
    """As in the other forms, within the template's own tags of thinking; one that text follows was only thought of.
    Where no tag opens a call it is text there."""
    text = written(name, ("read_file", {"path": "a"}))
    output_format = family_of(name).output_format
    assert output_format.thinking is not None
    opening = output_format.thinking.opening
    called = [] if derived.is_bare(DERIVED[name]) else [("read_file", '{"path": "a"}')]
    assert read(output_format, [f"{opening}\nhm\n{text}\n"])[0] == called
    assert read(output_format, [f"{opening}\nhm {text} or not"]) == ([], f"hm {text} or not")


@pytest.mark.parametrize("name", sampled([name for name in DERIVED if name in OTHER_TAGS], {"ministral3_reasoning"}))
def test_tags_of_thinking_that_are_not_the_models_are_words(name: str) -> None:
    """Where its vocabulary has others, what `<think>` opens is content, to the letter, and a call there is one."""
    text = written(name, ("read_file", {"path": "a"}))
    output_format = family_of(name).output_format
    assert output_format.thinking is not None and output_format.thinking.opening != "<think>"
    calls, said = read(output_format, [f"<think>\nhm\n{text} or not</think>\n\nSo."])
    assert calls == [("read_file", '{"path": "a"}')]
    assert said == "<think>\nhm\n or not</think>\n\nSo."


@every_form
def test_broken_arguments_go_out_as_written(name: str) -> None:
    """Behind the name the call has begun; what is left of the form behind it is no text."""
    text = written(name, ("read_file", {"path": "a"})).replace('"a"', '"a" oops')
    calls, said = read(family_of(name).output_format, [text])
    [(tool, arguments)] = calls
    assert tool == "read_file" and arguments.startswith('{"path": "a"oops}') and said == ""


def test_llamas_calls_behind_its_tag_are_read_and_held() -> None:
    """`<|python_tag|>` stands before the JSON form, anywhere in an answer; before code it is text."""
    tags = ["<|python_tag|>"]
    output_format = select_format("auto", SMALL["bare"], tags, None, DERIVED["bare"])
    case = Setup(byte_tokenizer(tags), output_format)
    grammar = case.grammar(ToolChoice(), tools=TOOLS)
    for before in ("", "I look. "):
        good = before + '<|python_tag|>{"name": "read_file", "parameters": {"path": "a"}}'
        assert case.calls(good, TOOLS) == ([("read_file", {"path": "a"})], before)
        assert case.accepts(grammar, good) and not case.accepts(grammar, good.replace('"a"', "5"))
        code = f"{before}<|python_tag|>print(5)"
        assert case.calls(code, TOOLS) == ([], code) and case.accepts(grammar, code)


# --- grammars ---------------------------------------------------------------------------------------------------------


@cache
def setup(name: str, *, tags_are_tokens: bool) -> Setup:
    tokens = tokens_in(source_of(name))
    output_format = select_format("auto", source_of(name), tokens, None, DERIVED[name])
    return Setup(byte_tokenizer(tokens if tags_are_tokens else ()), output_format)


def thought(output_format: OutputFormat) -> str:
    """A thought between the format's own tags."""
    assert output_format.thinking is not None
    return f"{output_format.thinking.opening}\nhm\n{output_format.thinking.closing}"


both = pytest.mark.parametrize("tokens", [True, False])


@sampled_cells(lambda tokens, name: tokens is (name in HELD_BY_TOKENS))
@every_form
@both
def test_forced_calls_are_in_the_templates_form(name: str, tokens: bool) -> None:
    """What the template writes is accepted, another form, tool or type is not."""
    case = setup(name, tags_are_tokens=tokens)
    grammar = case.grammar(ToolChoice("required"), tools=TOOLS)
    good = written(name, ("read_file", {"path": 'a"\n</tool_call>', "lines": 3}))
    assert case.accepts(grammar, good)
    assert not case.accepts(grammar, f"So {good}")
    assert not case.accepts(grammar, good.replace("read_file", "remove"))
    assert not case.accepts(grammar, good.replace("3", '"3"'))
    if DERIVED[name].between is not None:
        several = written(name, ("read_file", {"path": "a"}), ("any", {}), ("any", {"b": [1]}))
        assert case.accepts(grammar, several)
        one = case.grammar(ToolChoice("required"), tools=TOOLS, parallel=False)
        assert not case.accepts(one, several) and case.accepts(one, good)


@sampled_cells(lambda tokens, name: tokens is (name in HELD_BY_TOKENS))
@every_form
@both
def test_strict_tools_are_held_where_the_model_may_call(name: str, tokens: bool) -> None:
    """Beside any text; a wrong type of a strict tool is refused, other tools' arguments are free."""
    case = setup(name, tags_are_tokens=tokens)
    promise = case.promise(ToolChoice(), tools=TOOLS)
    assert promise.grammar is not None and promise.notes == ()
    bare = derived.is_bare(DERIVED[name])
    good = written(name, ("read_file", {"path": "a", "lines": 3}))
    for before in ("",) if bare else ("", "I look.\n", f"{thought(case.format)}\n"):
        assert case.accepts(promise.grammar, before + good)
        assert not case.accepts(promise.grammar, before + good.replace("3", '"3"'))
        assert not case.accepts(promise.grammar, before + good.replace("lines", "line"))
        assert case.accepts(promise.grammar, before + written(name, ("any", {"x": [None, {"y": 1.5}]})))
    assert case.accepts(promise.grammar, f"{good} and {{more}} <b> [text]")
    if DERIVED[name].between is not None:
        two = written(name, ("any", {}), ("read_file", {"path": "a", "lines": 3}))
        assert case.accepts(promise.grammar, two)
        assert not case.accepts(promise.grammar, two.replace("3", '"3"'))


@sampled_cells(lambda tokens, name: tokens is (name in HELD_BY_TOKENS))
@every_form
@both
def test_text_beside_calls_is_free(name: str, tokens: bool) -> None:
    """Prose, code, JSON of other kinds, tags of other forms, words of this one."""
    case = setup(name, tags_are_tokens=tokens)
    grammar = case.grammar(ToolChoice(), tools=TOOLS)
    for text in (
        "", "Hello.", '{"a": 1}', '{"name": "Bob", "age": 3}', "[1, 2]", "x = {}; y[0] < 3", "functions.read_file:0",
        f"{thought(case.format)}\n\nFine.", "<think>\nhm\n</think>\n\nFine.", "```json\n{}\n```",
        '{"name": "read_file2", "parameters": 5}',
    ):  # fmt: skip
        assert case.accepts(grammar, text), text


def test_bare_calls_are_held_however_they_are_spaced() -> None:
    """What the reader takes for a call the grammar does too."""
    case = setup("bare", tags_are_tokens=True)
    grammar = case.grammar(ToolChoice(), tools=TOOLS)
    for before, after in (("\n\n", ""), ("", "\n")):
        for head in ('{ "name" : "read_file",\n "parameters" : ', '{"name":"read_file","parameters":'):
            good, bad = (f'{before}{head}{{"path": {value}}}}}{after}' for value in ('"a"', "5"))
            assert case.calls(good, TOOLS)[0] == [("read_file", {"path": "a"})]
            assert case.calls(bad, TOOLS)[0] == [("read_file", {"path": 5})]
            assert case.accepts(grammar, good) and not case.accepts(grammar, bad)


def test_an_id_that_the_model_leaves_out_is_read_and_held() -> None:
    """Mistral's models write none in their lists, though the template does."""
    case = setup("list", tags_are_tokens=True)
    text = '[CALLS][{"name": "read_file", "arguments": {"path": "a"}}, {"name": "any", "arguments": {}}]'
    assert case.calls(text, TOOLS) == ([("read_file", {"path": "a"}), ("any", {})], "")
    for choice in (ToolChoice(), ToolChoice("required")):
        assert case.accepts(case.grammar(choice, tools=TOOLS), text)


# --- replay -----------------------------------------------------------------------------------------------------------


REPLAYED = sampled(
    [name for name in DERIVED if name in {*SMALL, "kimi_k2_moonshot", "llama3_1", "deepseek_v3_1"}], SMALL
)
"""Those whose turns are found in a rendered prompt at all, be they calls or text (`prompt/layout.py`)."""


@pytest.mark.parametrize("name", REPLAYED)
def test_calls_keep_the_tokens_that_the_model_wrote(name: str) -> None:
    """In odd tokens, echoed by the client: the next prompt begins with all of them."""
    of = family_of(name)
    talk = Talk(of, thinking=False, tools=TOOLS)
    talk.say("hi")
    text = written(name, ("read_file", {"path": "a b  c", "lines": 3}))
    kept = talk.answer(in_odd_tokens(of.tokenizer, text))
    assert talk.results("done") == 1
    after = talk.stitched()
    assert num_common(kept, after.ids) == len(kept)
    assert after.num_replayed_turns == 1


@pytest.mark.parametrize(
    "name", sampled([name for name in DERIVED if name != "nemotron_nano_v2"], {"mistral_nemo", "ministral3_reasoning"})
)
def test_the_next_prompt_begins_with_a_call(name: str) -> None:
    """In the tokenizer's own tokens also where turns are not found, the model's id included. Nemotron's template leaves
    out the thinking that it opens itself."""
    of = family_of(name)
    talk = Talk(of, thinking=False, tools=TOOLS)
    talk.say("hi")
    text = written(name, ("read_file", {"path": "a b  c", "lines": 3}))
    if DERIVED[name].has_short_ids:
        text = re.sub(r"[A-Za-z0-9]{9}(?=\[ARGS\]|\"\}\]\Z)", "abcdefghi", text)
        assert "abcdefghi" in text
    kept = talk.answer(of.tokenizer.encode(text))
    assert talk.results("done") == 1
    assert num_common(kept, talk.stitched().ids) == len(kept)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama3_1", "deepseek_v3_1"])
def test_real_vocabularies_hold_and_replay_them(name: str) -> None:
    """What is written with the model's own tokens is read and held, and kept where turns are found."""
    of = real_family(name)
    talk = Talk(of, thinking=False, tools=TOOLS)
    talk.say("hi")
    calls = [("read_file", {"path": "a b  c", "lines": 3})]
    row = of.output_format.row
    assert row is not None
    text = as_written(of.template.write(conversation(calls), TOOLS, thinking=False).shown, row, calls)
    guide = LLTokenizer(of.tokenizer.backend.to_str(), eos_token=sorted(of.tokenizer.stop_token_ids))
    added = {token.content: id for id, token in of.tokenizer.backend.get_added_tokens_decoder().items()}
    for mode in ("auto", "required"):
        promise = build_grammar(
            tools=TOOLS, tool_choice=ToolChoice(mode), parallel_tool_calls=True, response_format=ResponseFormat(),
            output_format=of.output_format, added_tokens=added, start=AnswerStart(),
        )  # fmt: skip
        assert promise.grammar is not None
        for written_text, is_held in ((text, True), (text.replace("3", '"3"'), False), ("Hello.", mode == "auto")):
            matcher, ids = LLMatcher(guide, promise.grammar.lark, log_level=0), of.tokenizer.encode(written_text)
            assert (matcher.try_consume_tokens(list(ids)) == len(ids) and matcher.is_accepting()) is is_held
    kept = talk.answer(in_odd_tokens(of.tokenizer, text))
    assert talk.results("done") == 1
    after = talk.stitched()
    if name == "llama3_1":  # nobody's turns are found in DeepSeek's prompts, be they calls or text
        assert num_common(kept, after.ids) == len(kept) and after.num_replayed_turns == 1
