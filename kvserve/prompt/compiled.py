"""Renders one compiled chat template: message dicts in, text or a refusal out.

It knows Jinja and Hugging Face's environment for it, not what to do after a refusal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.meta
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers.utils.chat_template_utils import _compile_jinja_template as compile_template

from kvserve.errors import ModelLoadError

# The errors that a template written for other inputs can raise while it renders.
RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

type MessageDict = dict[str, object]
type ToolDict = dict[str, object]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The template raised an error; `reason` is its text."""

    reason: str


_DICT_NAMES = frozenset(dir(dict))
_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
"""The methods of a text that the sandbox allows unchanged; it wraps the two others."""
_LOOP_NAMES = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))
_PLAIN_TYPES = frozenset((bool, int, float, str))
"""Values that are returned as they are; a method is checked first."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Hugging Face's environment with shortcuts to the same results, which halve the time of a long conversation.

    Jinja looks `message.role` up as an attribute before a key, so every field of every message raises an
    AttributeError; and it checks the safety of `loop.first` each time with fifteen type checks.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_safe: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The sandbox's answer, which depends only on the object's type and the name."""
        kind = type(obj), attr
        is_safe = self._is_safe.get(kind)
        if is_safe is None:
            is_safe = self._is_safe[kind] = super().is_safe_attribute(obj, attr, value)
        return is_safe

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The sandbox's result, with a shortcut for the types of values in messages."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _STR_METHODS) or (kind is LoopContext and attribute in _LOOP_NAMES):
            return getattr(obj, attribute)
        if issubclass(kind, Namespace) and not attribute.startswith("_"):
            value = getattr(obj, attribute, None)
            if type(value) in _PLAIN_TYPES:
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """The sandbox's call, with a shortcut for methods of texts and for macros, which are both safe: methods take
        nothing of the template, macros its escaping."""
        kind = type(__obj)
        if kind is Macro:
            args = (__context.eval_ctx, *args)
        elif kind is not BuiltinMethodType or type(__obj.__self__) is not str:
            return super().call(__context, __obj, *args, **kwargs)
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        return __obj(*args, **kwargs)


@lru_cache(maxsize=64)
def _compiled(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """The template in a sandbox with Hugging Face's filters, globals and tags, and the variables that it reads. Cached,
    because it takes tens of milliseconds and a model that is loaded again has the same source.
    """
    theirs = compile_template("").environment  # the same for every source; that of this one would be compiled too
    ours = _Sandbox(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=[type(extension) for extension in theirs.extensions.values()],
    )
    ours.filters.update(theirs.filters)
    ours.globals.update(theirs.globals)
    parsed = ours.parse(source)
    return ours.from_string(parsed), frozenset(jinja2.meta.find_undeclared_variables(parsed))


def fault_of(source: str) -> str | None:
    """Where and why `source` is no template, None where it is one."""
    try:
        _compiled(source)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {(error.message or '').rstrip('.')}"
    return None


def by_tools(without: str, with_tools: str) -> str:
    """One template that is `with_tools` where a request has tools and `without` where it has none, to the letter: the
    line end behind a tag goes with the tag, `+` keeps the white space before one, and Jinja itself leaves out a last
    line end."""
    return (
        f"{{%+ if tools is not none %}}\n{_without_last_line_end(with_tools)}"
        f"{{%+ else %}}\n{_without_last_line_end(without)}{{%+ endif %}}"
    )


def _without_last_line_end(source: str) -> str:
    return source.removesuffix("\n").removesuffix("\r") if source.endswith("\n") else source.removesuffix("\r")


class CompiledTemplate:
    """A template in Hugging Face's sandboxed environment. Thread-safe."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Raises ModelLoadError if `source` is not a template. `variables` are the special tokens by name."""
        if (fault := fault_of(source)) is not None:
            raise ModelLoadError(
                f"The model's chat template is broken at {fault}. Mend chat_template.jinja (or chat_template in "
                "tokenizer_config.json), or download the model again."
            )
        self._template, self.reads = _compiled(source)
        self.source = source
        self._variables = dict(variables)
        own = self._template.environment.globals
        self._reserved = frozenset({"messages", "tools", "add_generation_prompt", *variables, *own})

    def is_free(self, name: str) -> bool:
        """Whether a request may set the variable `name`, which the rendering itself does not need."""
        return name not in self._reserved

    def render(
        self,
        messages: Sequence[MessageDict],
        tools: Sequence[ToolDict] | None,
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, object],
    ) -> str | Refusal:
        """The conversation as text. `arguments` are further variables of the template."""
        variables: dict[str, object] = {
            "documents": None,
            **arguments,
            **self._variables,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return str(self._template.render(variables))
        except RENDER_ERRORS as error:
            return Refusal(f"{type(error).__name__}: {error}")
