"""Chooses a model's thinking tags and tool forms from tables, by family, template and vocabulary."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from kvserve.core import CallRow, Spelling
from kvserve.output import harmony
from kvserve.output.tool_parsers import derived, qwen_coder
from kvserve.output.tool_parsers.foreign import ForeignCallForm
from kvserve.output.tool_parsers.form import CallForm
from kvserve.output.tool_parsers.glm import GLM
from kvserve.output.tool_parsers.hermes import HERMES
from kvserve.output.tool_parsers.qwen_coder import QWEN_CODER, QWEN_CODER_BARE

ModelFamily = Literal["auto", "qwen3", "glm4", "generic"]


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """`opening` counts only at the beginning of a line, unless `anywhere`: then prose cannot contain it by accident."""

    opening: str
    closing: str
    anywhere: bool = False


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model marks its output. `tool_forms` are tried in order; the first one is the model's own.

    `silent_tags` mark structure and carry no text. `between` is the part of thinking's closing tag that stands before
    calls too, where that is not all of it. `channels` "harmony" means gpt-oss headers instead of thinking tags.
    """

    name: str
    thinking: ThinkingTags | None
    tool_forms: tuple[CallForm, ...]
    silent_tags: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    channels: Literal["tags", "harmony"] = "tags"

    @property
    def thinking_bounds(self) -> ThinkingTags | None:
        """The tags around thinking, also of harmony's channels."""
        return ANALYSIS if self.channels == "harmony" else self.thinking

    @property
    def row(self) -> CallRow | None:
        """The template's derived form of calls, if there is one."""
        return next((form.row for form in self.tool_forms if form.row is not None), None)

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar can say the calls that the model may write in its own form: not where another library reads
        them."""
        return self.tool_forms[0].name != "foreign"

    def content_of(self, begun: str) -> str:
        """The content of an answer's beginning: the text behind the thinking, if it has any."""
        said = begun.lstrip()
        if self.thinking is not None and said.startswith(self.thinking.opening):
            said = said.partition(self.thinking.closing)[2].lstrip()
        return said

    @property
    def tags(self) -> tuple[str, ...]:
        """All structural tags that the model writes; channels have none."""
        thinking = (self.thinking.opening, self.thinking.closing) if self.thinking is not None else ()
        calls = (tag for form in self.tool_forms for tag in (form.open_tag, form.stray_close, *form.inner_tags) if tag)
        return (*thinking, *self.silent_tags, *calls)


THINK = ThinkingTags("<think>", "</think>")
ANALYSIS = ThinkingTags(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", "<|end|>", anywhere=True)

_BY_VOCABULARY: tuple[tuple[tuple[str, ...], str, ThinkingTags, tuple[str, ...]], ...] = (
    (("<|channel>", "<channel|>"), "gemma4", ThinkingTags("<|channel>thought", "<channel|>", anywhere=True), ()),
    (("<longcat_think>", "</longcat_think>"), "longcat", ThinkingTags("<longcat_think>", "</longcat_think>"), ()),
    (
        ("<|think:start|>", "<|think:end|>"),
        "think_tokens",
        ThinkingTags("<|think:start|>", "<|think:end|>", anywhere=True),
        (),
    ),
    (
        ("<|open|>", "<|close|>", "<|sep|>"),
        "xtml",
        ThinkingTags("<|open|>think<|sep|>", "<|close|>think<|sep|>", anywhere=True),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    (("[THINK]", "[/THINK]"), "mistral", ThinkingTags("[THINK]", "[/THINK]", anywhere=True), ()),
    (
        ("<seed:think>", "</seed:think>"),
        "seed",
        ThinkingTags("<seed:think>", "</seed:think>", anywhere=True),
        ("<seed:tool_call>", "</seed:tool_call>"),
    ),
    (
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        "command",
        ThinkingTags("<|START_THINKING|>", "<|END_THINKING|>", anywhere=True),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    (
        ("<|inner_prefix|>", "<|inner_suffix|>"),
        "apertus",
        ThinkingTags("<|inner_prefix|>", "<|inner_suffix|>", anywhere=True),
        (),
    ),
)
"""(required tokens, name, thinking tags, silent tags); the first row that fits counts."""

_GLM_FIRST = (GLM, HERMES, QWEN_CODER, QWEN_CODER_BARE)
_CODER_FIRST = (QWEN_CODER, QWEN_CODER_BARE, HERMES, GLM)
_HERMES_FIRST = (HERMES, QWEN_CODER, QWEN_CODER_BARE, GLM)


def select_format(
    model_family: str,
    template_text: str,
    special_tokens: Collection[str],
    foreign: ForeignCallForm | None,
    row: CallRow | None = None,
    thinking: tuple[str, str] | None = None,
    around: tuple[str, ...] = (),
    between: tuple[str, ...] = (),
) -> OutputFormat:
    """The format of a model. `special_tokens` are the tokenizer's added tokens, special or not.

    `model_family` is the setting MODEL_FAMILY: it decides which form comes first, never which forms are read.
    `row` is the template's own form of calls, `foreign` another library's reader of them. A foreign form that begins
    with a tag that is read here is not used: the readers here are exact. Of such a row only the spelling of values is
    taken. `thinking` are the template's own tags, where no family that is known has them; `around` those around what is
    said, `between` the part of the closing tag of thinking that stands before calls too.
    """
    forms = _own_forms(model_family, template_text)
    own_tags = {form.open_tag for form in forms}
    if row is not None and derived.form_of(row).open_tag not in own_tags:
        written = derived.forms_of(row, has_python_tag=derived.PYTHON_TAG in special_tokens)
        forms = (*written, *forms) if model_family == "auto" else (*forms, *written)
    elif row is not None and row.pairs is not None:
        forms = tuple(_spelt(form, row.pairs.spelling) for form in forms)
    elif foreign is not None and foreign.open_tag not in own_tags:
        forms = (foreign.form(), *forms)
    if {harmony.CHANNEL, harmony.MESSAGE} <= set(special_tokens):
        return OutputFormat("harmony", None, forms, channels="harmony")
    if thinking is not None:
        opening, closing = thinking
        own = ThinkingTags(opening, closing, opening in special_tokens)
        return OutputFormat(forms[0].name, own, forms, around, between)
    if "<think>" not in special_tokens:
        for tokens, name, known, silent_tags in _BY_VOCABULARY:
            if set(tokens) <= set(special_tokens):
                of_calls = {tag for form in forms if form.row is not None for tag in (form.open_tag, *form.inner_tags)}
                silent = dict.fromkeys((*silent_tags, *around))
                return OutputFormat(name, known, forms, tuple(tag for tag in silent if tag not in of_calls), between)
    return OutputFormat(forms[0].name, THINK, forms, around, between)


def _spelt(form: CallForm, spelling: Spelling) -> CallForm:
    """The form with values in this spelling; only Qwen-coder's templates have different ones."""
    return next((each for each in qwen_coder.forms(spelling) if each.name == form.name), form)


def may_spell_values(template_text: str) -> bool:
    """Whether a template may write a form that is read here anyway, with values in a spelling of its own."""
    return qwen_coder.FUNCTION_OPEN in template_text


def own_call_tag(template_text: str) -> str | None:
    """The tag in a template's text of a form that is read whatever the template writes; None if none stands there."""
    tags = (*(form.open_tag for form in _HERMES_FIRST), harmony.CHANNEL)
    return next((tag for tag in tags if tag in template_text), None)


def _own_forms(model_family: str, template_text: str) -> tuple[CallForm, ...]:
    if model_family == "glm4" or (model_family == "auto" and "<arg_key>" in template_text):
        return _GLM_FIRST
    if model_family in ("auto", "qwen3") and may_spell_values(template_text):
        return _CODER_FIRST
    return _HERMES_FIRST
