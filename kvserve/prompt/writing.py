"""Renders steps with one template: with the generation tail, or cut off inside the last step to continue it.

It knows reasoning tags and the end of a message in rendered text, not which steps a template accepts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvserve.prompt.compiled import CompiledTemplate, MessageDict, Refusal, ToolDict
from kvserve.prompt.conform import Conformed
from kvserve.prompt.steps import PromptStep, ThinkTags, WireForm, message_dict
from kvserve.prompt.words_before import has_words_before, placed, without_marks

# The opening and closing tags of reasoning. A prompt that ends with an opening tag starts inside reasoning.
REASONING_TAGS: tuple[ThinkTags, ...] = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("[THINK]", "[/THINK]"),
)
# Added to the last message's text while it is rendered; it and the template's text behind it are cut off.
CONTINUATION_MARK = "kvserve-continues-here-5f0c1e"


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A prompt's text, and whether the model's own text starts inside reasoning. `begun`: the answer's text that it
    already holds."""

    text: str
    opens_reasoning: bool
    begun: str = ""


@dataclass(frozen=True, slots=True)
class Writer:
    """One template with a request's fixed values, and the tags of reasoning to look for."""

    template: CompiledTemplate
    form: WireForm
    tools: Sequence[ToolDict] | None
    arguments: Mapping[str, object]
    reasoning_tags: Sequence[ThinkTags] = REASONING_TAGS

    def write(self, conversation: Conformed) -> RenderedText | Refusal:
        """The conversation up to where the model continues."""
        written = self._written(conversation)
        if isinstance(written, Refusal) or not any(has_words_before(step, self.form) for step in conversation.steps):
            return written
        bare = self._written(replace(conversation, dicts=tuple(without_marks(conversation.dicts))))
        if isinstance(bare, Refusal):
            return bare
        text = placed(written.text, bare.text, conversation.steps, self.form)
        return text if isinstance(text, Refusal) else replace(written, text=text)

    def _written(self, conversation: Conformed) -> RenderedText | Refusal:
        if conversation.continues:
            return self._continued(conversation.dicts[:-1], conversation.steps[-1])
        text = self._render(conversation.dicts, tail=True)
        if isinstance(text, Refusal):
            return text
        return RenderedText(text, open_tag(text, self.reasoning_tags) is not None)

    def _render(self, messages: Sequence[MessageDict], *, tail: bool) -> str | Refusal:
        text = self.template.render(messages, self.tools, add_generation_prompt=tail, arguments=self.arguments)
        if self.form.preamble is None or isinstance(text, Refusal):
            return text
        # Words without thinking: these letters have one that is in no client's text.
        return text.replace(self.form.preamble.unthought, "")

    def _continued(self, before: Sequence[MessageDict], said: PromptStep) -> RenderedText | Refusal:
        """The text up to the end of the assistant's unfinished message, its white space included."""
        last = _with_open_reasoning(said, self.form, self.reasoning_tags)
        thinks = bool(last.reasoning) and not last.text
        marked = (
            replace(last, reasoning=last.reasoning + CONTINUATION_MARK)
            if thinks
            else replace(last, text=last.text + CONTINUATION_MARK)
        )
        text = self._render((*before, message_dict(marked, self.form)), tail=False)
        if isinstance(text, str) and (end := text.rfind(CONTINUATION_MARK)) >= 0:
            return RenderedText(text[:end], opens_reasoning=thinks, begun="" if thinks else last.text)
        return self._behind_tail(before, last, said.text if thinks else None)

    def _behind_tail(
        self, before: Sequence[MessageDict], last: PromptStep, opening: str | None
    ) -> RenderedText | Refusal:
        """The same for templates that write no unfinished assistant message: the message follows the tail.

        `opening`: the message is unfinished thinking; its text if it opened the tag itself.
        """
        text = self._render(before, tail=True)
        if isinstance(text, Refusal):
            return text
        opened = open_tag(text, self.reasoning_tags)
        if opening is not None:
            return RenderedText(text + (last.reasoning if opened else opening), bool(opened or opening))
        closing = f"{last.reasoning}\n{opened[1]}\n\n" if opened else ""
        return RenderedText(text + closing + last.text, opens_reasoning=False, begun=last.text)


def open_tag(text: str, tags: Sequence[ThinkTags] = REASONING_TAGS) -> ThinkTags | None:
    """The reasoning tag, with its closing one, that is open at the end of a prompt."""
    end = text.rstrip()
    return next((tag for tag in tags if end.endswith(tag[0])), None)


def _with_open_reasoning(step: PromptStep, form: WireForm, tags: Sequence[ThinkTags]) -> PromptStep:
    """A last message with an unclosed think tag as unfinished reasoning, if the template has reasoning."""
    if form.reasoning is None or step.reasoning:
        return step
    said = step.text.lstrip()
    for opening, closing in tags:
        if said.startswith(opening) and closing not in said:
            return replace(step, reasoning=said[len(opening) :].removeprefix("\n"), text="")
    return step
