"""Small tokenizers, hostile chat templates and generated conversations for the tests of this room."""

from collections.abc import Iterator
from functools import cache
from types import MappingProxyType

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvserve.core import Message, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock, ToolSpec
from kvserve.prompt.detokenizer import decoder_form
from kvserve.prompt.tokenizer import Tokenizer, load_tokenizer
from tests.models import tiny_model

FAMILIES = ("qwen3", "qwen3_5", "qwen3_next", "gemma3", "gemma4", "gpt_oss", "glm4_moe_lite", "llama")

CORPUS = [
    "hello world, how are you?",
    "größe 東京 🫠 naïve",
    "def f(x):\n    return x + 1\n",
    "  spaces   and\ttabs",
] * 3


@cache
def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_end|>", "<｜end▁of▁text｜>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@cache
def sentencepiece_backend(decoder: str) -> tokenizers.Tokenizer:
    """Like sentencepiece: the metaspace for blanks, byte tokens for what the vocabulary lacks."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz.,", "▁▁", "▁the", "he", "llo", "▁he", "東"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *letters])}
    merges = [("▁", "▁"), ("h", "e"), ("▁", "he")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["</s>"])
    pipeline = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = {
        "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]),
        "strip": decoders.Sequence([*pipeline, decoders.Strip(" ", 1, 0)]),
        "keep": decoders.Sequence(pipeline),
    }[decoder]
    return backend


def tokenizer_of(backend: tokenizers.Tokenizer, chat_template: str | None = None) -> Tokenizer:
    return Tokenizer(
        backend=backend,
        decoder=decoder_form(backend),
        vocab_size=backend.get_vocab_size(),
        stop_token_ids=frozenset(),
        special_tokens=frozenset(),
        chat_template=chat_template,
        template_variables=MappingProxyType({"bos_token": "<s>", "eos_token": "</s>"}),
    )


@cache
def family_tokenizer(family: str) -> Tokenizer:
    return load_tokenizer(tiny_model(family))


# --- hostile templates -----------------------------------------------------------------------------------------------

_TAIL = "{% if add_generation_prompt %}<assistant>{% endif %}"

ALTERNATING = (
    """{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"""
    + _TAIL
)

DROPS_TOOLS = (
    """{% for m in messages if m.role in ('system', 'user', 'assistant') -%}
<{{ m.role }}>{{ m.content }}</s>{% endfor %}"""
    + _TAIL
)

SYSTEM_FIRST = (
    """{% for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif -%}
<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}</s>{% endfor %}"""
    + _TAIL
)

HOISTS_SYSTEM = (
    """{% for m in messages if m.role == 'system' %}<system>{{ m.content }}</s>{% endfor %}
{%- for m in messages if m.role != 'system' -%}
<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}</s>{% endfor %}"""
    + _TAIL
)

LIST_CONTENT = (
    """{% for m in messages -%}
<{{ m.role }}>{% for part in m.content %}{{ part['text'] }}{% endfor %}</s>{% endfor %}"""
    + _TAIL
)

STRICT_TOOLS = (
    """{% set ns = namespace(open=0) %}{% for m in messages %}
{%- if not m.content and not m.tool_calls %}{{ raise_exception('empty message') }}{% endif %}
{%- if m.role == 'tool' %}
    {%- if not ns.open or m.tool_call_id | length != 9 %}{{ raise_exception('result without a call') }}{% endif %}
    {%- set ns.open = ns.open - 1 %}<result>{{ m.tool_call_id }} {{ m.content }}</s>
{%- elif ns.open %}{{ raise_exception('calls without results') }}
{%- elif m.tool_calls %}
    {%- set ns.open = m.tool_calls | length %}<call>
    {%- for c in m.tool_calls %}{{ c.id }} {{ c.function.name }}
        {%- for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %};{% endfor %}</s>
{%- else %}
    {%- if loop.previtem and loop.previtem.role == 'tool' and m.role == 'user' %}{{ raise_exception('no') }}{% endif -%}
    <{{ m.role }}>{{ m.content }}</s>
{%- endif %}{% endfor %}"""
    + _TAIL
)

IDS_NAME_CALLS = (
    """{% for m in messages %}<{{ m.role }}>
{%- for c in m.tool_calls or [] %}<call>{{ c.id }} {{ c.function.arguments | tojson }}{% endfor %}
{%- if m.role == 'tool' %}{{ m.tool_call_id }} {% endif %}{{ m.content }}</s>{% endfor %}"""
    + _TAIL
)

NEEDS_TEXT = (
    """{% for m in messages %}
{%- if m.content is not string or m.content | length > 400 %}{{ raise_exception('too long') }}{% endif -%}
{%- set call = m.tool_calls[0].function if m.tool_calls -%}
<{{ m.role }}>{{ m.content + '' }}{{ call.name + call.arguments if call }}
</s>{% endfor %}"""
    + _TAIL
)

HOSTILE = {
    "alternating": ALTERNATING,
    "drops_tools": DROPS_TOOLS,
    "system_first": SYSTEM_FIRST,
    "hoists_system": HOISTS_SYSTEM,
    "list_content": LIST_CONTENT,
    "strict_tools": STRICT_TOOLS,
    "ids_name_calls": IDS_NAME_CALLS,
    "needs_text": NEEDS_TEXT,
}

# --- conversations ---------------------------------------------------------------------------------------------------

TOOLS = (ToolSpec("look", "looks a thing up", {"type": "object", "properties": {"q": {"type": "string"}}}),)


def said(messages: tuple[Message, ...]) -> Iterator[str]:
    """Every marker word of the messages that must be in the prompt, in order; thinking is the template's business."""
    for message in messages:
        for block in message.blocks:
            match block:
                case TextBlock(text=text) if text:
                    yield text
                case ToolCallBlock(name=name, arguments=arguments):
                    yield name
                    yield arguments.partition(": ")[2].strip('"}') or arguments
                case ToolResultBlock(blocks=parts):
                    yield from (part.text for part in parts if isinstance(part, TextBlock) and part.text)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """Messages as agents send them, and worse: any role anywhere, empty ones, results with or without their call."""
    words = iter(range(10_000))
    call_ids: list[str] = []

    def word() -> str:
        return f"wz{next(words)}q"

    def call() -> ToolCallBlock:
        call_ids.append(f"call{len(call_ids)}")
        name, value = word(), word()
        arguments = f'{{"q": "{value}"}}' if draw(st.integers(0, 4)) else value
        return ToolCallBlock(call_ids[-1], name, arguments)

    def result() -> ToolResultBlock:
        call_id = draw(st.sampled_from(call_ids[-3:])) if call_ids and draw(st.integers(0, 3)) else "callx"
        texts = tuple(TextBlock(word()) for _ in range(draw(st.integers(0, 2))))
        return ToolResultBlock(call_id, texts, is_error=draw(st.booleans()))

    makers = {
        "system": [lambda: TextBlock(word())],
        "user": [lambda: TextBlock(word()), lambda: TextBlock(word()), result],
        "assistant": [lambda: TextBlock(word()), call, lambda: ThinkingBlock(word())],
        "tool": [result],
    }
    messages = []
    for _ in range(draw(st.integers(1, 8))):
        role = draw(st.sampled_from(("user", "assistant", "tool", "system", "user", "assistant")))
        count = draw(st.sampled_from((1, 1, 1, 2, 3, 0)))
        blocks = tuple(draw(st.sampled_from(makers[role]))() for _ in range(count))
        messages.append(Message(role, blocks))
    return tuple(messages)
