"""One chat template, compiled: message dicts in, text or a refusal out.

It knows Jinja and how Hugging Face sets it up; nothing of messages as nouns, nor of what to do after a refusal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2
import jinja2.meta
from transformers.utils.chat_template_utils import _compile_jinja_template as compile_template

from kvserve.errors import ModelLoadError

# What a template written for other inputs than ours can raise while it renders.
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
    """The template raised; `reason` is what it said."""

    reason: str


class CompiledTemplate:
    """A template in the sandboxed environment that Hugging Face templates are written for. Thread-safe."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Raises ModelLoadError where `source` is no template. `variables` are the special tokens by name."""
        try:
            self._template = compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"The model's chat template is broken at line {error.lineno}: {error.message}. Mend "
                "chat_template.jinja (or chat_template in tokenizer_config.json), or download the model again."
            ) from error
        environment = self._template.environment
        self.source = source
        self.reads = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        self._variables = dict(variables)
        self._reserved = frozenset({"messages", "tools", "add_generation_prompt", *variables, *environment.globals})

    def is_free(self, name: str) -> bool:
        """Whether a request may set the variable `name`: it is none of those that the rendering itself needs."""
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
