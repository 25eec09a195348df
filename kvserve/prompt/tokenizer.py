"""Loads the model's tokenizer: text to ids and back, stop tokens, and the source of the chat template.

It knows the files of a model folder in Hugging Face format; it renders nothing and knows no messages.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import tokenizers
from transformers import AutoTokenizer, PreTrainedConfig, TokenizersBackend

from kvserve.errors import ModelLoadError
from kvserve.prompt.compiled import by_tools, fault_of
from kvserve.prompt.detokenizer import DecoderForm, Detokenizer, decoder_form, make_detokenizer, token_bytes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

# Tokens that end an assistant's turn in some family. They count only if the model's own template writes them: a
# folder's configuration often names just one of several.
END_OF_TURN_TOKENS = (
    "<|im_end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|user|>",
    "<|observation|>",
    "<|return|>",
    "<|call|>",
    "<|tool_response>",
)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Text <-> model tokens. Immutable and thread-safe.

    The ids of all tokens that have a text are below `vocab_size`; the model's logits may have more rows, or fewer.
    `template_variables` are the special tokens under the names that chat templates read (`bos_token`, ...).
    """

    backend: tokenizers.Tokenizer
    decoder: DecoderForm
    vocab_size: int
    stop_token_ids: frozenset[int]
    special_tokens: frozenset[str]
    chat_template: str | None
    template_variables: Mapping[str, str]

    def encode(self, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        """The ids of `text`; `add_special_tokens` adds what the tokenizer itself puts around a text (BOS).

        Tokens spelt out in the text become those tokens. Lone surrogates, which UTF-8 cannot encode, become U+FFFD.
        """
        return tuple(self.backend.encode(without_surrogates(text), add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included. Ids without a token have no text."""
        text: str = self.backend.decode([i for i in ids if i >= 0], skip_special_tokens=False)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, None if there is none."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def token_bytes(self, token: int) -> bytes:
        """A token's text inside a text, as UTF-8 that may begin or end inside a character; b"" without a token."""
        return token_bytes(self.backend, self.decoder, token)

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """An incremental decoder for ids that follow `after`; its pieces joined are `decode` of all of them."""
        return make_detokenizer(self.backend, self.decoder, after)


def without_surrogates(text: str) -> str:
    """`text` with each lone surrogate replaced by U+FFFD; the length stays the same."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
    return text


def load_tokenizer(model_dir: Path, template: str | None = None) -> Tokenizer:
    """The tokenizer of a model folder; reads only local files and runs no code of the folder. `template` is the source
    of the chat template that stands for the folder's, if one does.

    Raises ModelLoadError that names the file and says what to do.
    """
    if not model_dir.is_dir():
        raise ModelLoadError(f"{model_dir} is not a folder. MODEL_PATH must be a model folder in Hugging Face format.")
    try:
        # With a config handed in transformers does not look the architecture up: it knows fewer of them than mlx-lm.
        loaded = AutoTokenizer.from_pretrained(
            str(model_dir), config=PreTrainedConfig(), local_files_only=True, trust_remote_code=False
        )
        backend = _as_written(model_dir, loaded)
    except Exception as error:  # the Rust tokenizer raises bare Exception for a file that it cannot read
        raise ModelLoadError(_diagnosis(model_dir, error)) from error
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(
            f"{model_dir} has a {type(loaded).__name__}, which has no fast form. Add a tokenizer.json to the folder."
        )
    # The wrapper sets these on every call, a race between threads; the bare backend never changes.
    backend.no_padding()
    backend.no_truncation()
    if template is None:
        template = _chat_template(model_dir, loaded.chat_template or _processors_template(model_dir))
    return Tokenizer(
        backend=backend,
        decoder=decoder_form(backend),
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
        stop_token_ids=frozenset(_stop_token_ids(model_dir, backend, loaded.eos_token, template)),
        special_tokens=frozenset(t.content for t in backend.get_added_tokens_decoder().values() if t.special),
        chat_template=template,
        template_variables=MappingProxyType(
            {name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)}
        ),
    )


def _as_written(model_dir: Path, loaded: object) -> object:
    """The tokenizer of tokenizer.json with its own rules: of many classes transformers puts the class's in their place,
    and folders name classes that are not theirs (Granite, MiniMax and OLMo that of GPT-2, Qwen3.5 that of Qwen2)."""
    if type(loaded) is not TokenizersBackend and (model_dir / "tokenizer.json").is_file():
        loaded = TokenizersBackend.from_pretrained(str(model_dir), local_files_only=True)
    return getattr(loaded, "backend_tokenizer", None)


def _processors_template(model_dir: Path) -> object:
    """The template that older folders of models that see have in a file of their processor's alone."""
    return _json_object(model_dir / "chat_template.json").get("chat_template")


def _chat_template(model_dir: Path, template: object) -> str | None:
    """The template's source. Of several named ones `tool_use` is for requests with tools, as in transformers, and the
    default for all others."""
    if template is None or isinstance(template, str):
        return template
    named = template if isinstance(template, dict) else {}
    default, with_tools = named.get("default"), named.get("tool_use")
    if not isinstance(default, str):
        raise ModelLoadError(f"{model_dir} has several chat templates, none of them named default. Name one so.")
    if not isinstance(with_tools, str):
        return default
    for name, source in (("default", default), ("tool_use", with_tools)):
        if (fault := fault_of(source)) is not None:
            raise ModelLoadError(f"The chat template {name!r} in {model_dir} is broken at {fault}. Mend it.")
    return by_tools(default, with_tools)


def _stop_token_ids(
    model_dir: Path, backend: tokenizers.Tokenizer, tokenizer_eos: object, template: str | None
) -> Iterator[int]:
    if tokenizer_eos is not None:  # by its name: a class that has ids of its own adds one that the file may not have
        yield from _ids(backend.token_to_id(str(tokenizer_eos)))
    for name in ("generation_config.json", "config.json"):
        configuration = _json_object(model_dir / name)
        yield from _ids(configuration.get("eos_token_id"))
        if isinstance(text := configuration.get("text_config"), dict):
            yield from _ids(text.get("eos_token_id"))
    for token in END_OF_TURN_TOKENS:
        if template is not None and token in template:
            yield from _ids(backend.token_to_id(token))


def _ids(value: object) -> Iterator[int]:
    """The ids in a configuration's value, which is an id, a list of ids or null."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not isinstance(item, bool):
            yield item


def _json_object(path: Path) -> Mapping[str, object]:
    """The object in a JSON file, {} where there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error}). Download the model again.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object. Download the model again.")
    return value


def _diagnosis(model_dir: Path, error: Exception) -> str:
    """One paragraph on why a tokenizer could not be loaded."""
    for name in TOKENIZER_FILES:
        try:
            _json_object(model_dir / name)
        except ModelLoadError as broken:
            return str(broken)
    if not any((model_dir / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return f"{model_dir} has no tokenizer.json. Download the model again; a tokenizer belongs to it."
    reason = " ".join(str(error).split())[:300]
    return f"The tokenizer in {model_dir} (tokenizer.json) cannot be loaded: {reason}. Download the model again."
