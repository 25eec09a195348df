"""Model folders without weights for real chat templates: a small vocabulary with the control tokens that the real
tokenizers have, the template, and the ids that end an answer.

It knows tokens and files, and how small a model can be, no rendering.
"""

import json
import lzma
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from benchmarks.recordings import shared_folder
from kvserve.demo.families import FAMILIES, ModelScale
from kvserve.demo.vocabulary import GEMMA3, GEMMA4, GLM, HARMONY, LLAMA, QWEN, DemoControlTokens, train, write_tokenizer
from kvserve.prompt.tokenizer import load_tokenizer

SHARED = shared_folder()
TEMPLATES = sorted(file.stem for file in (SHARED / "templates").glob("*.jinja")) if SHARED is not None else []
"""The real templates that are here, none without the shared test data."""

NUM_TEXT_TOKENS = 1_200
CONTEXT_TOKENS = 131_072
THINNEST = ModelScale(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=1, num_kv_heads=1)

_TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK_TAGS = ("<think>", "</think>")
_MISTRAL = (
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[IMG]"),
)
_MISTRAL_V11 = (*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]")
_DEEPSEEK_TOOLS = tuple(
    f"<｜tool▁{name}｜>"
    for name in (
        *("calls▁begin", "calls▁end", "call▁begin", "call▁end"),
        *("outputs▁begin", "outputs▁end", "output▁begin", "output▁end", "sep"),
    )
)
_KIMI = (
    *("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|media_start|>"),
    *("<|media_content|>", "<|media_end|>", "<|media_pad|>", "<|tool_calls_section_begin|>"),
    *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_LFM = (
    *("<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>"),
    *("<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
)
_COHERE = (
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>"),
    *("<|END_ACTION|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
)
_APERTUS = tuple(
    f"<|{name}|>"
    for name in (
        *("assistant_start", "assistant_end", "developer_start", "developer_end", "system_start", "system_end"),
        *("user_start", "user_end", "inner_prefix", "inner_suffix", "tools_prefix", "tools_suffix"),
    )
)


def _tokens(
    ends: Sequence[str], special: Sequence[str] = (), visible: Sequence[str] = (), bos: str | None = None
) -> DemoControlTokens:
    hidden = dict.fromkeys((*((bos,) if bos else ()), *ends, *special))
    return DemoControlTokens(
        hidden=tuple(hidden),
        visible=tuple(token for token in visible if token not in hidden),
        ends=tuple(ends),
        pad=ends[-1],
        bos=bos,
    )


_DEEPSEEK_BOS, _DEEPSEEK_EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_DEEPSEEK_ROLES = ("<｜User｜>", "<｜Assistant｜>")
_GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
_CHATML = ("<|im_start|>",)

CONTROL_TOKENS: Mapping[str, DemoControlTokens] = {
    **dict.fromkeys(("qwen3", "qwen3_2507_next_instruct", "qwen3_5", "qwen3_6", "qwen3_coder", "qwq"), QWEN),
    **dict.fromkeys(("glm4_6", "glm4_7_flash", "glm5_2"), GLM),
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "gpt_oss": HARMONY,
    "llama3_1": LLAMA,
    "hermes3": _tokens(("<|im_end|>", "<|end_of_text|>"), _CHATML, _TOOL_TAGS, "<|begin_of_text|>"),
    "smollm3": _tokens(("<|im_end|>", "<|end_of_text|>"), _CHATML, (*_THINK_TAGS, *_TOOL_TAGS), "<|begin_of_text|>"),
    "step3_5": _tokens(("<|im_end|>", _DEEPSEEK_EOS), _CHATML, (*_THINK_TAGS, *_TOOL_TAGS), _DEEPSEEK_BOS),
    "nemotron3_nano": _tokens(("<|im_end|>", "</s>"), _CHATML, (*_THINK_TAGS, *_TOOL_TAGS), "<s>"),
    "nemotron_nano_v2": _tokens(
        ("<SPECIAL_12>", "</s>"),
        ("<SPECIAL_10>", "<SPECIAL_11>"),
        (*_THINK_TAGS, "<TOOLCALL>", "</TOOLCALL>", "<TOOL_RESPONSE>", "</TOOL_RESPONSE>"),
        "<s>",
    ),
    "deepseek_v3_1": _tokens((_DEEPSEEK_EOS,), _DEEPSEEK_ROLES, (*_THINK_TAGS, *_DEEPSEEK_TOOLS), _DEEPSEEK_BOS),
    "deepseek_v3_2": _tokens((_DEEPSEEK_EOS,), _DEEPSEEK_ROLES, (*_THINK_TAGS, "｜DSML｜"), _DEEPSEEK_BOS),
    "r1_distill_llama": _tokens((_DEEPSEEK_EOS,), _DEEPSEEK_ROLES, _THINK_TAGS, _DEEPSEEK_BOS),
    "minimax_m2": _tokens(
        ("[e~[",), ("]~b]", "]!p~["), (*_THINK_TAGS, "<minimax:tool_call>", "</minimax:tool_call>"), "]~!b["
    ),
    "mistral_nemo": _tokens(("</s>",), _MISTRAL, (), "<s>"),
    **dict.fromkeys(("devstral_2507", "mistral_small_3_2"), _tokens(("</s>",), _MISTRAL_V11, (), "<s>")),
    "ministral3_reasoning": _tokens(("</s>",), (*_MISTRAL_V11, "[THINK]", "[/THINK]"), (), "<s>"),
    **dict.fromkeys(("kimi_k2", "kimi_k2_moonshot"), _tokens(("<|im_end|>", "[EOS]"), _KIMI, (), "[BOS]")),
    "lfm2": _tokens(("<|im_end|>", "<|endoftext|>"), _LFM, (), "<|startoftext|>"),
    "lfm2_5_8b": _tokens(("<|im_end|>", "<|endoftext|>"), _LFM, _THINK_TAGS, "<|startoftext|>"),
    "granite3_3": _tokens(("<|end_of_text|>",), (*_GRANITE, "<|start_of_cite|>", "<|end_of_cite|>")),
    "granite4_0": _tokens(("<|end_of_text|>",), _GRANITE, _TOOL_TAGS),
    "cohere_r7b": _tokens(("<|END_OF_TURN_TOKEN|>", "<EOS_TOKEN>"), _COHERE, (), "<BOS_TOKEN>"),
    "apertus": _tokens(("<|assistant_end|>", "<|tools_suffix|>"), _APERTUS, (), "<s>"),
    "phi3_5": _tokens(("<|end|>", "<|assistant|>", "<|endoftext|>"), ("<|user|>", "<|system|>"), (), "<s>"),
    "seed_oss": _tokens(
        ("<seed:eos>",),
        ("<seed:bos>", "<seed:pad>"),
        (
            *("<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"),
            *("<seed:tool_call>", "</seed:tool_call>"),
        ),
    ),
}
"""The control tokens of each template's own tokenizer, those that its answers end with first."""

_LOOKS_LIKE_A_TOKEN = re.compile(r"<[|｜][^<>\s'\"{}]{1,30}[|｜]>|\[/?[A-Z_]{2,20}\]")


def control_tokens_of(name: str, source: str) -> DemoControlTokens:
    """Those of the real tokenizer; of a template that the table does not know, all that looks like a token."""
    found = sorted(set(_LOOKS_LIKE_A_TOKEN.findall(source)))
    ends = [token for token in found if "end" in token and "head" not in token] or ["</s>"]
    return CONTROL_TOKENS.get(name) or _tokens(ends[:1], found, _THINK_TAGS, "<s>")


def source_of(name: str) -> str:
    """The source of a real template."""
    if SHARED is None:
        raise FileNotFoundError("The real templates (shared/templates) are not here.")
    return (SHARED / "templates" / f"{name}.jinja").read_text("utf-8")


def write_folder(folder: Path, source: str, control: DemoControlTokens) -> Path:
    """Make `folder`, which is there, a model's folder without weights."""
    vocabulary = train(control, NUM_TEXT_TOKENS)
    write_tokenizer(vocabulary, folder, CONTEXT_TOKENS)
    config = {"model_type": "llama", "eos_token_id": vocabulary.end_ids(), "vocab_size": vocabulary.num_rows}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return folder


WHOLE_VOCABULARIES: Mapping[str, tuple[str, str]] = {
    f"{template}, whole vocabulary": (vocabulary, template)
    for vocabulary, template in (
        ("qwen3", "qwen3"),
        ("gemma3", "gemma3"),
        ("gptoss", "gpt_oss"),
        ("llama3_1", "llama3_1"),
        ("deepseek_v3", "deepseek_v3_1"),
    )
}
"""The real tokenizers of shared/tokenizers, each with a template of its family."""


def whole_folder(name: str, root: Path) -> Path:
    """A new folder below `root` for a real template with a real tokenizer."""
    vocabulary, template = WHOLE_VOCABULARIES[name]
    if SHARED is None:
        raise FileNotFoundError("The real tokenizers (shared/tokenizers) are not here.")
    packed, folder = SHARED / "tokenizers" / vocabulary, root / template
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(lzma.decompress((packed / "tokenizer.json.xz").read_bytes()))
    shutil.copyfile(packed / "tokenizer_config.json", folder / "tokenizer_config.json")
    (folder / "chat_template.jinja").write_text(source_of(template), encoding="utf-8")
    return folder


def add_weights(folder: Path) -> Path:
    """Make a folder of a whole vocabulary that of a model, as small as one can be: its embedding is the most of it."""
    tokenizer = load_tokenizer(folder)
    num_rows = 1 + max(tokenizer.backend.get_vocab(with_added_tokens=True).values())
    keys = FAMILIES["qwen3"].configure(THINNEST, num_rows, CONTEXT_TOKENS)
    config = keys | {"eos_token_id": sorted(tokenizer.stop_token_ids), "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def template_folder(name: str, root: Path) -> Path:
    """A new folder below `root` for a real template."""
    if name in WHOLE_VOCABULARIES:
        return whole_folder(name, root)
    folder = root / name
    folder.mkdir()
    source = source_of(name)
    return write_folder(folder, source, control_tokens_of(name, source))
