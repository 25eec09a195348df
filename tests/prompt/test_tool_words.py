"""Tools that come and go within a conversation are described in its template's own words, where they come and go."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.recordings import shared_folder
from kvserve.core import Block, Message, TextBlock, ToolBlock, ToolCallBlock, ToolResultBlock, ToolSpec
from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.control import BEFORE, BEHIND, LIVE, MARK, NOTHING
from kvserve.prompt.control import CALL as NAME_MARK
from kvserve.prompt.images_text import EDGE
from kvserve.prompt.steps import function_dict
from kvserve.prompt.template import ChatTemplate, _probed
from kvserve.prompt.tool_words import OPENING, ToolWords
from tests.laws import num_examples, sampled_cells
from tests.prompt.samples import byte_level_backend, tokenizer_of
from tests.prompt.turns import FAMILIES, LOOK, family

SHARED = shared_folder()
REAL = sorted((SHARED / "templates").glob("*.jinja")) if SHARED is not None else []
REFERRING = "glm5_2"
"""The one of the real templates that has a place for references to tools."""

EVERY_TEMPLATE = (
    "deepseek_v3_1",
    "gemma4",
    "glm5_2",
    "gpt_oss",
    "llama3_1",
    "minimax_m2",
    "mistral_nemo",
    "qwen3",
)
"""One of each way to describe tools: JSON, tags, TypeScript, in front, with the user's words, not at all."""

HI = Message("user", (TextBlock("hi"),))
CALL = Message("assistant", (ToolCallBlock("c1", "look", '{"q":"x"}'),))
PRIVATE = EDGE + MARK + BEFORE + BEHIND + LIVE + NOTHING + NAME_MARK
LATER = ToolSpec(
    "TaskCreate",
    "Makes a task.",
    {
        "type": "object",
        "properties": {"subject": {"type": "string", "description": "the subject"}, "n": {"type": "integer"}},
        "required": ["subject"],
    },
)


def talk(*blocks: Block, before: str = "", role: str = "tool") -> tuple[Message, ...]:
    """A call with these blocks as its result, or as a message of their own."""
    if role != "tool":
        return (HI, CALL, Message("tool", (ToolResultBlock("c1", (TextBlock("x"),)),)), Message(role, blocks))  # type: ignore[arg-type]
    lead = (TextBlock(before),) if before else ()
    return (HI, CALL, Message("tool", (ToolResultBlock("c1", (*lead, *blocks)),)))  # type: ignore[arg-type]


def written(name: str, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...] = (LOOK,)) -> str:
    return family(name).template.write(messages, tools, thinking=False).shown


def described(name: str, tool: ToolSpec) -> str:
    """The family's own description of a tool, which its template writes in front too; JSON where it writes none."""
    profile = family(name).template._profile
    assert profile is not None
    said = profile.tool_form.describe(tool) if profile.tool_form is not None else None
    assert (said is None) == (name == "gemma3")
    said = json.dumps(function_dict(tool), ensure_ascii=False) if said is None else said
    assert said in written(name, (HI,), (LOOK, tool))
    return said


@sampled_cells(lambda name, role: role == "tool" or name in ("qwen3", "gpt_oss"))
@pytest.mark.parametrize("role", ["tool", "system", "user"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_is_described_where_it_comes(name: str, role: str) -> None:
    """As the family describes one in front, and only there: what stands before it is as it was without it."""
    prompt = written(name, talk(ToolBlock.of(LATER), role=role))
    without = written(name, talk(TextBlock("kwnothing"), role=role))
    place = without.index("kwnothing")
    assert prompt[:place] == without[:place] and prompt.count("TaskCreate") == 1
    said = described(name, LATER)
    # two templates write results as JSON strings
    assert said in prompt[place:] or (json.dumps(said)[1:-1] in prompt[place:] and name in ("gpt_oss", "llama"))
    assert prompt[place:].startswith(OPENING.strip())


@pytest.mark.parametrize("name", FAMILIES)
def test_an_edited_definition_changes_the_prompt_only_at_its_reference(name: str) -> None:
    """What stands before and behind it is the same."""
    one, other = (
        written(name, (*talk(ToolBlock.of(replace(LATER, description=said))), Message("user", (TextBlock("go"),))))
        for said in ("Makes a task.", "Makes another.")
    )
    assert one.replace("Makes a task.", "Makes another.") == other and one.count("Makes a task.") == 1
    assert one.index("hi") < one.index("Makes a task.")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_removed_tool_and_one_that_nobody_defines_are_told(name: str) -> None:
    """In words, by their names."""
    prompt = written(name, talk(ToolBlock("look", is_removed=True), role="system"))
    assert "The tool look was removed" in prompt
    prompt = written(name, talk(ToolBlock("ghost"), before="Found:"))
    assert prompt.index("Found:") < prompt.index("The tool ghost is named here")


@pytest.mark.parametrize("name", FAMILIES)
def test_without_tools_in_front_the_model_is_told_how_to_call_one(name: str) -> None:
    """Nothing else has told it."""
    prompt = written(name, (HI, Message("system", (ToolBlock.of(LATER),))), ())
    assert "like this call of FUNCTION" in prompt and json.dumps(function_dict(LATER), ensure_ascii=False) in prompt


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_definition_spells_is_words_and_what_its_template_writes_is_tokens(name: str) -> None:
    """A client's control token in a description is no token; gemma4 describes tools with tokens of its own, and here it
    does too."""
    known = family(name)
    spelt = {"gemma3": "<end_of_turn>", "gemma4": "<turn|>", "gpt_oss": "<|end|>", "llama": "<|eot_id|>"}.get(name)
    token = spelt or next(token for token in ("<|im_end|>", "<|user|>") if token in known.template.control.tokens)
    tool = replace(LATER, description=f"Makes {token} a task.")
    prompts = [known.template.write(talk(ToolBlock.of(each)), (LOOK,), thinking=False) for each in (tool, LATER)]
    assert f"Makes {token[0]}{MARK}{token[1:]} a task." in prompts[0].text and token in prompts[0].shown
    ids = [known.template.control.encode(prompt.text) for prompt in prompts]
    real = known.tokenizer.token_id(token)
    assert ids[0].count(real) == ids[1].count(real)
    if name == "gemma4":
        own = known.tokenizer.token_id("<|tool>")
        assert ids[1].count(own) == 2, "one for the tool in front, one for the one behind"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_longer_conversation_begins_with_the_words_of_the_shorter_one(name: str) -> None:
    """A second search adds its tools behind; what was read before stays."""
    first = talk(ToolBlock.of(LATER))
    second = (*first, CALL, Message("tool", (ToolResultBlock("c1", (ToolBlock.of(replace(LATER, name="More")),)),)))
    one, other = written(name, first), written(name, second)
    shared = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
    assert shared > one.index("the subject")


@sampled_cells(lambda path: path.stem in EVERY_TEMPLATE)
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_templates_describe_a_later_tool_as_one_in_front(path: object) -> None:
    """Line by line; JSON where the template writes no tools."""
    template = CompiledTemplate(path.read_text("utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})  # type: ignore[attr-defined]
    profile = _probed(template)
    if profile is None or profile.tool_dialect is None:
        assert profile is None or profile.tool_form is None
        said = ToolWords().said([ToolBlock.of(LATER)])
        assert said == OPENING + json.dumps(function_dict(LATER), ensure_ascii=False)
        return
    assert profile.tool_form is not None
    described = profile.tool_form.describe(LATER)
    assert described is not None and described in ToolWords(profile.tool_form).said([ToolBlock.of(LATER)])
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": function_dict(tool)} for tool in (LOOK, LATER)]
    in_front = template.render(messages, tools, add_generation_prompt=True, arguments={})
    assert isinstance(in_front, str) and described in in_front
    for opening, closing in ("{}", "[]", "()"):
        # Hermes 3's template itself opens two braces for each tool, in front as well, and closes one.
        num_left_open = int(path.stem == "hermes3" and opening == "{")  # type: ignore[attr-defined]
        assert described.count(opening) == described.count(closing) + num_left_open, described
    assert all(word in described for word in ("TaskCreate", "Makes a task.", "the subject"))


@pytest.mark.skipif(not REAL, reason="needs the templates in shared/")
def test_a_template_that_knows_references_gets_what_it_would_write_itself() -> None:
    """Rendered natively, with the deferred tool in the list and a reference as the result, the text is the same."""
    source = next(path for path in REAL if path.stem == REFERRING).read_text("utf-8")
    prompt = ChatTemplate(tokenizer_of(byte_level_backend(), source)).write(
        talk(ToolBlock.of(LATER)), (LOOK,), thinking=False
    )
    deferred = {**function_dict(LATER), "defer_loading": True}
    tools = [{"type": "function", "function": function} for function in (function_dict(LOOK), deferred)]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"q": "x"}}}
    native = CompiledTemplate(source, {}).render(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "tool_reference", "name": "TaskCreate"}], "tool_call_id": "c1"},
        ],
        tools,
        add_generation_prompt=True,
        arguments={"enable_thinking": False},
    )
    assert isinstance(native, str)
    # a list in front leaves an empty line for each deferred tool, which would tell how many wait
    assert prompt.shown.replace("\n\n", "\n") == native.replace("\n\n", "\n").replace("\n\n", "\n")


# a client's noncharacters that control tokens are marked with become U+FFFD (test_control.py): they are not drawn here
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=PRIVATE), min_size=1, max_size=8)


@settings(max_examples=num_examples(40), deadline=None)
@given(st.lists(words, min_size=1, max_size=3), st.sampled_from(FAMILIES))
def test_every_word_of_a_definition_is_read(descriptions: list[str], name: str) -> None:
    """Whatever it says, in every family, several at once."""
    said = [f"d{i} {each}." for i, each in enumerate(descriptions)]
    blocks = [ToolBlock.of(ToolSpec(f"t{i}", each, {}, False)) for i, each in enumerate(said)]
    prompt = written(name, talk(*blocks, role="system"))
    for each in said:
        forms = [each, json.dumps(each, ensure_ascii=False)[1:-1], json.dumps(each)[1:-1]]
        assert any(form in prompt for form in forms), (forms, prompt)
