"""The chat templates: what each keeps, drops, refuses and ends with, as the real family's template does."""

import functools
import re
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

from kvserve.demo.build import FAMILIES
from tests.models import tiny_model

Message = dict[str, Any]

SYSTEM: Message = {"role": "system", "content": "Be brief."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "Which one"}, "limit": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
]
WITH_TOOLS = [name for name in FAMILIES if name != "gemma3"]
THINKING = ["qwen3", "qwen3_5", "qwen3_5_moe", "glm4_moe_lite"]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str | None = None, **fields: Any) -> Message:
    return {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {}) | fields


def calling(*paths: str, reasoning: str | None = None, text: str = "") -> Message:
    calls = [
        {"id": f"call{i}", "type": "function", "function": {"name": "read", "arguments": {"path": path, "limit": 3}}}
        for i, path in enumerate(paths)
    ]
    return assistant(text, reasoning, tool_calls=calls)


def result(text: str, call: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call{call}", "content": text}


@functools.cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(tiny_model(family))


def render(family: str, messages: list[Message], **arguments: Any) -> str:
    options = {"add_generation_prompt": True, "tokenize": False} | arguments
    rendered: str = tokenizer_of(family).apply_chat_template(messages, **options)
    return rendered


@pytest.mark.parametrize("family", FAMILIES)
def test_a_list_of_text_parts_reads_as_its_text(family: str) -> None:
    """Content as one text part renders exactly as the plain string does."""
    parts = [user(""), assistant("Yes."), user("Why?")]
    parts[0]["content"] = [{"type": "text", "text": "Is it so?"}]
    assert render(family, parts) == render(family, [user("Is it so?"), assistant("Yes."), user("Why?")])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dialogue_keeps_its_order_and_its_words(family: str) -> None:
    """System text, questions and answers all stand in the prompt, in order, whitespace inside them untouched."""
    text = render(family, [SYSTEM, user("One\n\n  two"), assistant("Three 🙂"), user("Four")])
    places = [text.index(part) for part in ("Be brief.", "One\n\n  two", "Three 🙂", "Four")]
    assert places == sorted(places)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_longer_dialogue_without_thinking_extends_the_shorter(family: str) -> None:
    """Without thinking the next turn's prompt starts with the whole of this turn's messages."""
    short = [SYSTEM, user("One"), assistant("Two")]
    before = render(family, [*short, user("Three")], add_generation_prompt=False)
    after = render(family, [*short, user("Three"), assistant("Four"), user("Five")])
    assert after.startswith(before)


@pytest.mark.parametrize(
    ("family", "thinking", "tail"),
    [
        ("qwen3", None, "<|im_start|>assistant\n"),
        ("qwen3", True, "<|im_start|>assistant\n"),
        ("qwen3", False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3_5", None, "<|im_start|>assistant\n<think>\n"),
        ("qwen3_5", False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3_5_moe", None, "<|im_start|>assistant\n<think>\n"),
        ("qwen3_5_moe", False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3_next", False, "<|im_end|>\n<|im_start|>assistant\n"),
        ("glm4_moe_lite", None, "<|assistant|><think>"),
        ("glm4_moe_lite", False, "<|assistant|></think>"),
        ("gemma3", None, "<start_of_turn>model\n"),
        ("gemma4", True, "<turn|>\n<|turn>model\n"),
        ("gemma4", False, "<|turn>model\n<|channel>thought\n<channel|>"),
        ("gpt_oss", None, "<|end|><|start|>assistant"),
        ("llama", None, "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ],
)
def test_the_generation_tail(family: str, thinking: bool | None, tail: str) -> None:
    """The prompt ends as the family's does, with thinking on, off or left open."""
    arguments = {} if thinking is None else {"enable_thinking": thinking}
    assert render(family, [user("Hi")], **arguments).endswith(tail)


@pytest.mark.parametrize("family", THINKING)
def test_thinking_of_earlier_turns_is_dropped(family: str) -> None:
    """Thinking before the last user message is gone, whether it came in its own field or inside the content."""
    tagged = assistant("<think>\nsecret\n</think>\n\nTwo")
    for answer in (assistant("Two", "secret"), tagged):
        text = render(family, [user("One"), answer, user("Three")])
        assert "secret" not in text
        assert "Two" in text


@pytest.mark.parametrize("family", [*THINKING, "gemma4", "gpt_oss"])
def test_thinking_inside_a_running_tool_loop_is_kept(family: str) -> None:
    """Thinking that led to a call is kept while the results come in, and dropped after the next user message."""
    loop = [user("One"), calling("a.txt", reasoning="secret"), result("text")]
    assert "secret" in render(family, loop, tools=TOOLS)
    assert "secret" not in render(family, [*loop, assistant("Done"), user("Two")], tools=TOOLS)


@pytest.mark.parametrize(
    ("family", "argument"),
    [
        ("qwen3_5", {"preserve_thinking": True}),
        ("qwen3_5_moe", {"preserve_thinking": True}),
        ("glm4_moe_lite", {"clear_thinking": False}),
    ],
)
def test_thinking_is_preserved_on_request(family: str, argument: dict[str, bool]) -> None:
    """With the family's own argument old thinking stays and the next prompt extends this one."""
    turns = [user("One"), assistant("Two", "secret")]
    text = render(family, [*turns, user("Three")], **argument)
    assert "secret" in text
    assert text.startswith(render(family, turns, add_generation_prompt=False, **argument))


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3", '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt", "limit": 3}}\n</tool_call>'),
        ("qwen3_next", '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt", "limit": 3}}\n</tool_call>'),
        (
            "qwen3_5",
            "<tool_call>\n<function=read>\n<parameter=path>\na.txt\n</parameter>\n<parameter=limit>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "qwen3_5_moe",
            "<tool_call>\n<function=read>\n<parameter=path>\na.txt\n</parameter>\n<parameter=limit>\n3\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "glm4_moe_lite",
            "<tool_call>read<arg_key>path</arg_key><arg_value>a.txt</arg_value>"
            "<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>",
        ),
        ("gemma4", '<|tool_call>call:read{path:<|"|>a.txt<|"|>,limit:3}<tool_call|>'),
        (
            "gpt_oss",
            "<|start|>assistant to=functions.read<|channel|>commentary json<|message|>"
            '{"path": "a.txt", "limit": 3}<|call|>',
        ),
        ("llama", '{"name": "read", "parameters": {"path": "a.txt", "limit": 3}}<|eot_id|>'),
    ],
)
def test_a_call_is_written_in_the_form_of_the_family(family: str, form: str) -> None:
    """A call with an object of arguments renders in the family's own form, exactly once."""
    text = render(family, [user("One"), calling("a.txt"), result("42 lines")], tools=TOOLS)
    assert text.count(form) == 1
    assert text.index(form) < text.index("42 lines")


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_tools_stand_in_the_prompt_before_the_question(family: str) -> None:
    """Name, description and parameters of a tool are in the prompt, the system text too, before the user's words."""
    text = render(family, [SYSTEM, user("One question")], tools=TOOLS)
    end = text.index("One question")
    for part in ("read", "Read a file.", "Which one", "Be brief."):
        assert 0 <= text.index(part) < end


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_results_in_a_row_share_one_user_turn(family: str) -> None:
    """Two results of parallel calls stand together in one user turn, in order."""
    text = render(family, [user("One"), calling("a", "b"), result("first"), result("second", 1)], tools=TOOLS)
    block = "<tool_response>\nfirst\n</tool_response>\n<tool_response>\nsecond\n</tool_response><|im_end|>\n"
    assert f"<|im_start|>user\n{block}" in text


def test_glm_opens_one_observation_for_results_in_a_row() -> None:
    """GLM writes the observation mark once, then each result between its own tags."""
    text = render("glm4_moe_lite", [user("One"), calling("a", "b"), result("first"), result("second", 1)], tools=TOOLS)
    assert "<|observation|><tool_response>first</tool_response><tool_response>second</tool_response><|ass" in text
    assert text.startswith("[gMASK]<sop><|system|>")


def test_gemma4_results_belong_to_the_model_turn() -> None:
    """A result closes no turn: the prompt ends behind it, and the following answer continues the same turn."""
    loop = [user("One"), calling("a.txt"), result("42 lines")]
    response = '<|tool_response>response:read{value:<|"|>42 lines<|"|>}<tool_response|>'
    text = render("gemma4", loop, tools=TOOLS)
    assert text.endswith(f"<tool_call|>{response}")
    assert f"{response}Done<turn|>\n<|turn>user\n" in render(
        "gemma4", [*loop, assistant("Done"), user("Two")], tools=TOOLS
    )


def test_gemma4_asks_for_thinking_in_the_system_turn() -> None:
    """Thinking is switched on by a mark in the system turn, which exists for it alone if need be."""
    assert render("gemma4", [user("Hi")], enable_thinking=True).startswith("<bos><|turn>system\n<|think|>\n<turn|>\n")
    assert render("gemma4", [user("Hi")]).startswith("<bos><|turn>user\n")


def test_gemma3_merges_the_system_text_and_insists_on_alternation() -> None:
    """The system text opens the first user turn; two messages of one role in a row are refused, and numbers."""
    text = render("gemma3", [SYSTEM, user("Hi")])
    assert text == "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(TemplateError, match="alternate"):
        render("gemma3", [user("One"), user("Two")])
    with pytest.raises(TemplateError, match="alternate"):
        render("gemma3", [user("One"), assistant("Two"), assistant("Three")])
    with pytest.raises(TemplateError, match="content"):
        render("gemma3", [user("One"), {"role": "assistant", "content": 5}])


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_qwen3_5_refuses_what_the_real_one_refuses(family: str) -> None:
    """A system message that is not first, no user query at all and an unknown role are errors."""
    with pytest.raises(TemplateError, match="first"):
        render(family, [user("One"), SYSTEM])
    with pytest.raises(TemplateError, match="user query"):
        render(family, [SYSTEM, assistant("One")])
    with pytest.raises(TemplateError, match="role"):
        render(family, [user("One"), {"role": "developer", "content": "Two"}])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "glm4_moe_lite", "llama"])
def test_a_system_message_in_the_middle_stays_in_its_place(family: str) -> None:
    """Families that accept it render a later system message where it stands."""
    text = render(family, [user("One"), assistant("Two"), SYSTEM, user("Three")])
    assert text.index("Two") < text.index("Be brief.") < text.index("Three")


def test_qwen3_opens_a_think_block_for_the_answer_being_continued() -> None:
    """An assistant message at the end gets its think block even when it has no thinking, as in the real template."""
    text = render("qwen3", [user("One"), assistant("Two")], add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nTwo<|im_end|>\n")


def test_gpt_oss_writes_harmony() -> None:
    """System block with date and effort, developer block with instructions and typed tools, results addressed back."""
    text = render("gpt_oss", [SYSTEM, user("One"), calling("a"), result("x")], tools=TOOLS, reasoning_effort="high")
    assert re.match(
        r"<\|start\|>system<\|message\|>.*Current date: \d{4}-\d\d-\d\d\n\nReasoning: high\n", text, re.DOTALL
    )
    assert "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n" in text
    assert "type read = (_: {\n// Which one\npath: string,\nlimit?: number,\n}) => any;" in text
    assert '<|start|>functions.read to=assistant<|channel|>commentary<|message|>"x"<|end|>' in text
    with pytest.raises(TemplateError, match="tool"):
        render("gpt_oss", [user("One"), result("x")])
    with pytest.raises(TemplateError, match="thinking"):
        render("gpt_oss", [user("One"), calling("a", reasoning="why", text="what"), result("x")])


def test_llama_takes_one_call_at_a_time_and_a_user_for_its_tools() -> None:
    """Several calls in one message, and tools without a user message to stand in, are refused."""
    with pytest.raises(TemplateError, match="one tool call"):
        render("llama", [user("One"), calling("a", "b")], tools=TOOLS)
    with pytest.raises(TemplateError, match="user message"):
        render("llama", [SYSTEM], tools=TOOLS)
    text = render("llama", [user("One"), calling("a"), result('say "x"')], tools=TOOLS)
    assert '<|start_header_id|>ipython<|end_header_id|>\n\n"say \\"x\\""<|eot_id|>' in text
    assert text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n")
