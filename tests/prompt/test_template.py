"""Prompts of the families: against the plain template, thinking switches, continued answers, arguments, speed."""

import time

import pytest
from transformers import AutoTokenizer

from kvserve.core import Message, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock, ToolSpec
from kvserve.errors import BadRequest, ModelLoadError
from kvserve.output.formats import select_format
from kvserve.prompt.template import ChatTemplate, RenderedPrompt
from tests.laws import sampled
from tests.models import tiny_model
from tests.prompt.samples import FAMILIES, TOOLS, byte_level_backend, family_tokenizer, tokenizer_of
from tests.prompt.test_conform import answer, result, system, template_of, user
from tests.prompt.vocabularies import TEMPLATES, template_family, tokens_in

THINKS = ("qwen3", "qwen3_5", "gemma4", "glm4_moe_lite")
CALL = ToolCallBlock("c1", "look", '{"q": "x"}')


def thought(thinking: str, text: str = "", *calls: ToolCallBlock) -> Message:
    return Message("assistant", (ThinkingBlock(thinking), *answer(text, *calls).blocks))


def render(family: str, *messages: Message, tools: tuple[ToolSpec, ...] = (), **options) -> RenderedPrompt:
    return template_of(family).render(messages, tools, **{"thinking": True} | options)


def inline(source: str) -> ChatTemplate:
    return ChatTemplate(tokenizer_of(byte_level_backend(), source))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_an_ordinary_conversation_is_what_hugging_face_renders(family: str, tools: tuple[ToolSpec, ...]) -> None:
    """Where nothing needs mending, text and ids are those of apply_chat_template."""
    if tools and not template_of(family).accepts_tools:
        pytest.skip("the template takes no tools")
    stock = AutoTokenizer.from_pretrained(tiny_model(family), local_files_only=True)
    dicts = [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "go"},
    ]
    schema = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in tools
    ]
    wanted = stock.apply_chat_template(dicts, tools=schema or None, add_generation_prompt=True, return_dict=False)
    options = {"enable_thinking": True} if template_of(family).accepts_thinking else {}
    text = stock.apply_chat_template(dicts, schema or None, add_generation_prompt=True, tokenize=False, **options)
    prompt = render(family, system("rules"), user("hi"), answer("yes"), user("go"), tools=tools)
    assert prompt.text == text and prompt.notes == ()
    if not options:
        assert list(prompt.ids.ids) == wanted


@pytest.mark.parametrize("family", THINKS)
def test_thinking_is_switched_on_and_off(family: str) -> None:
    """Each thinking family is found to have the switch, and the prompt says whether reasoning is open."""
    assert template_of(family).accepts_thinking
    on, off = render(family, user("hi")), render(family, user("hi"), thinking=False)
    assert on.text != off.text and not off.opens_reasoning
    assert on.opens_reasoning == (family in ("qwen3_5", "glm4_moe_lite"))


def test_efforts_are_the_nearest_that_the_template_knows() -> None:
    """gpt-oss has no off: thinking off is its lowest effort, and levels it was never trained on become near ones."""
    wanted = {"low": "low", "minimal": "low", "medium": "medium", "high": "high", "xhigh": "high", None: "medium"}
    for effort, level in {**wanted, "banana": "medium"}.items():
        assert f"Reasoning: {level}\n" in render("gpt_oss", user("hi"), effort=effort).text
    assert "Reasoning: low\n" in render("gpt_oss", user("hi"), thinking=False, effort="high").text


def test_only_real_switches_count() -> None:
    """A template that mentions a switch without heeding it has none."""
    base = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
    assert not inline(base + "{% if enable_thinking %}{% endif %}").accepts_thinking
    assert inline(base + "{% if enable_thinking is false %}<think></think>{% endif %}").accepts_thinking
    assert not inline(base + "{{ preserve_thinking }}").accepts_preserve_thinking


TAGS = ("<think>", "</think>")


def test_a_template_that_names_thinking_and_has_no_word_against_it_thinks_unasked() -> None:
    """A switch or an effort of none is such a word, a low effort is not; without tags there is no thinking."""
    base = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
    effort = "{{ reasoning_effort if reasoning_effort in ['low', 'high'] else 'medium' }}"
    without = effort.replace("['low'", "['none', 'low'")
    assert inline(f"{base}<think>").thinks_unasked(TAGS)
    assert inline(f"{base}{{# </think> #}}").thinks_unasked(TAGS)
    assert inline(f"{base}{effort}<think>").thinks_unasked(TAGS)
    assert not inline(base).thinks_unasked(TAGS)
    assert not inline(f"{base}{without}<think>").thinks_unasked(TAGS)
    assert not inline(base + "{% if enable_thinking is false %}<think></think>{% endif %}").thinks_unasked(TAGS)


OPENED_UNASKED = {"minimax_m2", "nemotron_nano_v2", "r1_distill_llama", "step3_5"}
UNASKED = {*OPENED_UNASKED, "gpt_oss", "lfm2_5_8b", "ministral3_reasoning"}


@pytest.mark.parametrize("name", sampled(TEMPLATES, {"gpt_oss", "r1_distill_llama", "qwen3", "llama3_1"}))
def test_real_templates_that_think_unasked_are_found(name: str) -> None:
    """By what they write and name, not by their names: all others have a switch, or never think."""
    of = template_family(name)
    source = of.tokenizer.chat_template or ""
    bounds = select_format("auto", source, tokens_in(source), None).thinking_bounds
    assert bounds is not None
    assert of.template.thinks_unasked((bounds.opening, bounds.closing)) == (name in UNASKED)
    opens = of.template.write((user("hi"),), thinking=False).opens_reasoning
    assert opens == (name in OPENED_UNASKED)


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe_lite"])
def test_earlier_thinking_is_preserved_on_request(family: str) -> None:
    """preserve_thinking, GLM's inverted clear_thinking included, keeps what the template would drop."""
    talk = (user("hi"), thought("hmm so", "yes"), user("go"))
    assert template_of(family).accepts_preserve_thinking
    assert "hmm so" in render(family, *talk, preserve_thinking=True).text
    assert "hmm so" not in render(family, *talk, preserve_thinking=False).text
    assert render(family, *talk).text == render(family, *talk, preserve_thinking=False).text


def test_families_without_the_switch_say_so() -> None:
    """A8: the probe tells which templates cannot be asked."""
    assert not any(template_of(f).accepts_preserve_thinking for f in ("qwen3", "gemma3", "gpt_oss", "llama"))


@pytest.mark.parametrize("family", [*THINKS, "gpt_oss"])
def test_thinking_stays_inside_a_running_tool_loop(family: str) -> None:
    """The thinking that led to a call is there when its result comes back."""
    text = render(family, user("hi"), thought("hmm so", "", CALL), result("c1", "found"), tools=TOOLS).text
    assert text.index("hmm so") < text.index("look", text.index("hmm so")) < text.index("found")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_last_assistant_message_is_continued(family: str) -> None:
    """The prompt ends with what the assistant has said so far, white space included, and nothing behind it."""
    prompt = render(family, user("hi"), answer("The answer is \n"))
    assert prompt.text.endswith("The answer is \n") and not prompt.opens_reasoning
    assert prompt.text.count("The answer is") == 1 and "kvserve" not in prompt.text


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "glm4_moe_lite", "gpt_oss"])
@pytest.mark.parametrize("raw", [False, True])
def test_unfinished_thinking_is_continued_as_thinking(family: str, raw: bool) -> None:
    """A last message that only thinks, sent as thinking or as an opened tag, leaves reasoning open at its end."""
    last = answer("<think>\nfirst I") if raw else thought("first I")
    prompt = render(family, user("hi"), last)
    assert prompt.text.endswith("first I") and prompt.opens_reasoning
    assert prompt.text.count("<think>") == (0 if family == "gpt_oss" else 1)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "glm4_moe_lite"])
def test_an_opened_think_tag_is_never_dropped(family: str) -> None:
    """Also where the template shows no thinking, as qwen3's before any user has spoken: it stands as it was said."""
    prompt = render(family, answer("<think>\nfirst I"))
    assert prompt.text.replace("\n", "").endswith("<think>first I") and prompt.opens_reasoning


def test_an_empty_last_assistant_message_is_a_new_turn() -> None:
    """There is nothing to continue, so the prompt is that without it."""
    assert render("qwen3", user("hi"), answer("")).text == render("qwen3", user("hi")).text


def test_a_template_that_ignores_the_last_assistant_message_is_continued_behind_the_tail() -> None:
    """What was said follows the generation tail, with an opened think tag closed before it."""
    source = "{% for m in messages if m.role == 'user' or not loop.last %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = inline(source + "{% if add_generation_prompt %}<assistant><think>\n{% endif %}")
    prompt = template.render((user("hi"), answer("so ")), thinking=True)
    assert prompt.text == "<user>hi<assistant><think>\n\n</think>\n\nso " and not prompt.opens_reasoning


def test_free_arguments_reach_the_template_and_the_others_do_not() -> None:
    """chat_template_kwargs pass through, but never replace what the rendering needs or crash it."""
    template = inline("{{ bos_token }}{{ style }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    hostile = {"messages": [], "tools": 3, "bos_token": "x", "range": "x", "self": 1, "raise_exception": 0, "": 1}
    prompt = template.render((user("hi"),), thinking=True, template_arguments={"style": "brief", **hostile})
    assert prompt.text == "<s>brief<user>hi"


def test_arguments_that_the_template_fails_with_are_the_clients_error() -> None:
    """A value of the wrong type is a 400 that names the field, not a 500."""
    template = inline("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ 'x' * (times or 1) }}")
    with pytest.raises(BadRequest) as caught:
        template.render((user("hi"),), thinking=True, template_arguments={"times": "many"})
    assert caught.value.param == "chat_template_kwargs"


def test_a_resolved_switch_is_not_set_twice() -> None:
    """What the request's switches came to wins over the same names among the arguments."""
    one = render("qwen3", user("hi"), thinking=False, template_arguments={"enable_thinking": True})
    assert one.text == render("qwen3", user("hi"), thinking=False).text
    two = render("gpt_oss", user("hi"), template_arguments={"reasoning_effort": "banana"})
    assert two.text == render("gpt_oss", user("hi")).text


def test_a_templates_own_name_for_preserving_goes_before_the_setting() -> None:
    """A request that says clear_thinking in GLM's words is heeded although the setting says otherwise."""
    talk = (user("hi"), thought("hmm so", "yes"), user("go"))
    text = render("glm4_moe_lite", *talk, preserve_thinking=True, template_arguments={"clear_thinking": True}).text
    assert "hmm so" not in text


def test_a_thinking_budget_is_passed_on_unless_thinking_is_off() -> None:
    """A budget is the request's own number; off is a budget of nothing."""
    template = inline("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}[{{ thinking_budget }}]")
    for thinking, end in ((True, "[512]"), (False, "[0]")):
        prompt = template.render((user("hi"),), thinking=thinking, template_arguments={"thinking_budget": 512})
        assert prompt.text.endswith(end)


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_of_calls_survive(family: str) -> None:
    """Objects, empty and broken JSON, deep nesting and markup in arguments: rendered, never an error."""
    for arguments in ('{"q": "a\\"b\\n<x>東"}', "", "[1]", "not json", '{"q": {"r": [1, null, true]}}', "[" * 3000):
        talk = (user("hi"), answer("", ToolCallBlock("c1", "look", arguments)), result("c1", "found"))
        assert "found" in render(family, *talk, tools=TOOLS).text


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_tools_are_rendered(family: str) -> None:
    """Schemas without parameters, with unions or with non-Latin text still show the tool to the model."""
    odd = (
        ToolSpec("bare", None, {}),
        ToolSpec("union", "größe", {"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": {}}}),
        ToolSpec("any", "", {"anyOf": [{"type": "object"}]}),
    )
    text = render(family, user("hi"), tools=odd).text
    assert all(tool.name in text for tool in odd)


def test_a_failed_result_is_marked() -> None:
    """The model learns that a tool failed, which no template has a field for."""
    failed = Message("tool", (ToolResultBlock("c1", (TextBlock("no such file"),), is_error=True),))
    assert "[error]\nno such file" in render("qwen3", user("hi"), answer("", CALL), failed).text


def test_bos_is_written_once() -> None:
    """A template that writes BOS is tokenised without another one."""
    tokenizer = family_tokenizer("llama")
    ids = render("llama", user("hi")).ids.ids
    bos = tokenizer.token_id(tokenizer.template_variables["bos_token"])
    assert ids.count(bos) == 1 and ids[0] == bos


def test_a_model_without_a_template_gets_plain_text() -> None:
    """Base models are served too; the notes say how."""
    prompt = ChatTemplate(tokenizer_of(byte_level_backend())).render((user("hi"),), TOOLS, thinking=True)
    assert prompt.text.endswith("[user]\nhi\n\n[assistant]\n") and "looks a thing up" in prompt.text
    assert prompt.notes


def test_a_broken_template_stops_the_start() -> None:
    """A syntax error names the line and what to mend."""
    with pytest.raises(ModelLoadError, match="line 2"):
        inline("hello\n{% for %}")


def test_rendering_costs_what_jinja_and_the_tokenizer_cost() -> None:
    """300 messages take at most twice the bare template and encode: no message is rendered twice."""
    template, tokenizer = template_of("qwen3"), family_tokenizer("qwen3")
    rounds = [(user(f"do {i}"), answer("so", CALL), result("c1", "line of text\n" * 30)) for i in range(100)]
    messages = tuple(message for one in rounds for message in one)
    stock = AutoTokenizer.from_pretrained(tiny_model("qwen3"), local_files_only=True)
    text = template.render(messages, TOOLS, thinking=True).text
    dicts = [{"role": "user", "content": text[i : i + 400]} for i in range(0, len(text), 400)]
    ours, bare = [], []
    for _ in range(3):
        start = time.process_time()
        template.render(messages, TOOLS, thinking=True)
        ours.append(time.process_time() - start)
        start = time.process_time()
        stock.apply_chat_template(dicts, add_generation_prompt=True, tokenize=False)
        tokenizer.encode(text)
        bare.append(time.process_time() - start)
    assert min(ours) < 2 * min(bare) + 0.02, (ours, bare)


def test_what_a_template_remembers_is_bounded_and_changes_nothing() -> None:
    """All its dialects together keep within the bytes that they are given; the prompts are those of one with room."""
    tokenizer = family_tokenizer("qwen3")
    small, roomy = ChatTemplate(tokenizer, max_bytes=20_000), ChatTemplate(tokenizer)
    for number in range(40):
        talk = (user(f"{number} " * 50), answer("Yes."), user("And?"))
        for tools in ((), TOOLS):
            assert small.render(talk, tools, thinking=True) == roomy.render(talk, tools, thinking=True)
    kept = [sum(memory._known.num_bytes for _, memory in each._memories) for each in (small, roomy)]
    assert 0 < kept[0] <= 20_000 < kept[1]
