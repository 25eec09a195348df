"""Renders a conversation as the model's prompt, with the chat template and its thinking switches.

It knows one model's template and tokenizer, no protocols, caches or engine. `conform.py` brings what a template refuses
into the nearest form; if that is refused too, plainer forms follow, never a server error.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvserve.core import CallRow, Message, TextBlock, TokenSequence, ToolSpec
from kvserve.errors import BadRequest
from kvserve.prompt.call_words import EXAMPLES, CallWords, transcript
from kvserve.prompt.compiled import CompiledTemplate, MessageDict
from kvserve.prompt.conform import ConformMemo, Dialect, conform
from kvserve.prompt.control import ControlTokens, Sample, control_tokens, shown, spared_tags
from kvserve.prompt.guarding import guarded_data, guarded_steps, guarded_tools
from kvserve.prompt.images_text import Runs, without_barriers
from kvserve.prompt.probe import PROBE_TOOL, TWO_CALLS, Prober, probe, sample, talk
from kvserve.prompt.steps import THINK_TAGS, PromptStep, ThinkTags, WireForm, steps_of, tool_dicts
from kvserve.prompt.switches import Switches, find_switches, keep_arguments
from kvserve.prompt.thinking_tags import thinking_tags
from kvserve.prompt.tokenizer import Tokenizer, without_surrogates
from kvserve.prompt.tool_form import find_tool_form, shown_call
from kvserve.prompt.tool_words import ToolDescriber, ToolWords
from kvserve.prompt.words_before import with_words_before, without_words_before
from kvserve.prompt.writing import REASONING_TAGS, RenderedText, Writer

ARGUMENTS_FIELD = "chat_template_kwargs"

MEMORY_BYTES = 64 * 2**20
"""For the beginnings of conversations in all dialects of a template."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as text, not yet as model tokens.

    `opens_reasoning`: it ends inside an opened think tag or channel, so the model's text starts as reasoning.
    `continues`: it ends inside the last message, an assistant's, instead of a generation tail; `begun` is that
    message's text so far. `notes` name changes of form. `adds_special_tokens`: the tokenizer must add its own (BOS).
    `runs` are the ids of the images in the text. The text marks a client's spelling of control tokens; `shown` does
    not.
    """

    text: str
    opens_reasoning: bool
    notes: tuple[str, ...] = ()
    continues: bool = False
    adds_special_tokens: bool = False
    runs: Runs = field(default_factory=dict)
    begun: str = ""

    @property
    def shown(self) -> str:
        """The text without marks, for people."""
        return without_barriers(shown(self.text))


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text and as model tokens.

    `opens_reasoning`: it ends inside an opened think tag or channel, so the model's text starts as reasoning. `notes`
    name changes of form, for the log.
    """

    text: str
    ids: TokenSequence
    opens_reasoning: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _TemplateProfile:
    """A template with what it accepts: without tools (None: it fails without any), with tools (None: it writes none),
    its switches, its description of tools (None: unknown), and tags of thinking that no known family has."""

    template: CompiledTemplate
    dialect: Dialect | None
    tool_dialect: Dialect | None
    switches: Switches
    sample: Sample
    tool_form: ToolDescriber | None
    shown_call: str | None
    own_tags: ThinkTags | None = None

    @property
    def in_words(self) -> Dialect | None:
        """The dialect with everything about tools written as text."""
        if self.dialect is None:
            return None
        words = CallWords(self.dialect.words.row)
        return replace(self.dialect, tools=False, calls=False, results=False, words=words)


type FindRow = Callable[[], CallRow | None]
"""Finds the form of a template's calls before which words are read as words; None without one."""


def no_row() -> None:
    """There is no form of calls behind words."""


def _probed(
    template: CompiledTemplate, row: CallRow | None = None, row_behind_words: FindRow = no_row
) -> _TemplateProfile | None:
    """The template's profile, None if it cannot render one user message with or without a tool; `row` is its form of
    calls."""
    own_tags = thinking_tags(template)
    prober = Prober(template, arguments=keep_arguments(template), think_tags=own_tags or THINK_TAGS)
    dialect = probe(prober)
    with_tools = replace(prober, tools=(PROBE_TOOL,))
    tool_dialect = probe(with_tools) if "tools" in template.reads else None
    if tool_dialect is not None and not tool_dialect.tools:
        tool_dialect = None
    spoken = tool_dialect or dialect
    if spoken is None:
        return None
    asked = prober if tool_dialect is None else with_tools
    form = find_tool_form(with_tools, tool_dialect.form) if tool_dialect is not None else None
    called = shown_call(asked, spoken) if row is None else CallWords(row).calls(EXAMPLES[:1])
    if dialect is not None:
        dialect = replace(dialect, words=CallWords(row, called if row is None and dialect.calls else None))
    if tool_dialect is not None and not tool_dialect.calls:
        tool_dialect = replace(tool_dialect, words=CallWords(row))
    if spoken.calls and not spoken.text_with_calls and (behind := row_behind_words()) is not None:
        dialect, tool_dialect = (
            each and with_words_before(each, behind.opening, by.render, talk(TWO_CALLS))
            for each, by in ((dialect, prober), (tool_dialect, with_tools))
        )
    switches = find_switches(prober, dialect.form) if dialect is not None else find_switches(asked, spoken.form)
    found = sample(asked, spoken)
    if dialect is None:  # nothing is written without tools, and a tag that stands there is no call's own
        text = asked.render(talk(["user"]), spoken.form)
        found = replace(found, user=text, talk=text) if isinstance(text, str) else found
    return _TemplateProfile(template, dialect, tool_dialect, switches, found, form, called, own_tags)


class ChatTemplate:
    """The chat template of one model, compiled and probed once. Thread-safe: its memory does not change the text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_bytes: int = MEMORY_BYTES,
        tags: Collection[str] = (),
        row: CallRow | None = None,
        row_behind_words: FindRow = no_row,
        silent: Collection[str] = (),
    ) -> None:
        """`max_bytes` bounds the memory of earlier conversations, `tags` are those that the readers of answers look
        for, of which `silent` ones carry no text; `row` is the form of calls; `row_behind_words` is asked where words
        beside calls have no place. Raises ModelLoadError for a broken template. Without a template the prompt is
        labelled plain text.
        """
        self._tokenizer = tokenizer
        self._words = CallWords(row)
        source = tokenizer.chat_template
        compiled = CompiledTemplate(source, tokenizer.template_variables) if source is not None else None
        self._profile = _probed(compiled, row, row_behind_words) if compiled is not None else None
        dialects = (self._profile.dialect, self._profile.tool_dialect) if self._profile is not None else ()
        spoken = [dialect for dialect in dialects if dialect is not None]
        self._memories = [(dialect, ConformMemo(max_bytes // len(spoken))) for dialect in spoken]
        self.control = _control_of(tokenizer, self._profile.sample if self._profile is not None else None, tags, silent)

    def clear(self) -> None:
        """Forget earlier conversations."""
        for _, memory in self._memories:
            memory.clear()

    @property
    def own_tags(self) -> ThinkTags | None:
        """The tags of thinking that the template writes and no known family has."""
        return self._profile.own_tags if self._profile is not None else None

    @property
    def reasoning_tags(self) -> tuple[ThinkTags, ...]:
        """The tags that may open thinking."""
        return REASONING_TAGS if self.own_tags is None else (self.own_tags, *REASONING_TAGS)

    @property
    def needed_tools(self) -> tuple[ToolSpec, ...]:
        """The tools to ask it with: one if it fails without any."""
        return (PROBE_TOOL,) if self._profile is not None and self._profile.dialect is None else ()

    @property
    def why_plain(self) -> str | None:
        """Why prompts are plain text though there is a template: what comes of a user's message. None else."""
        source = self._tokenizer.chat_template
        if source is None or self._profile is not None:
            return None
        template = CompiledTemplate(source, self._tokenizer.template_variables)
        text = template.render([{"role": "user", "content": "hello"}], None, add_generation_prompt=True, arguments={})
        return "it leaves out what a user says" if isinstance(text, str) else " ".join(text.reason.split())

    @property
    def accepts_tools(self) -> bool:
        """Whether the template writes tools itself; else they are described in the system message."""
        return self._profile is not None and self._profile.tool_dialect is not None

    @property
    def counts_calls(self) -> bool:
        """Whether the template numbers calls itself, and results name these numbers."""
        dialect = (self._profile.tool_dialect or self._profile.dialect) if self._profile is not None else None
        return dialect is not None and dialect.form.call_ids in ("numbered", "numbered_in_message")

    @property
    def parts_words(self) -> bool:
        """Whether words before a call stand in a message of their own: no place beside the call was found."""
        dialect = (self._profile.tool_dialect or self._profile.dialect) if self._profile is not None else None
        return dialect is not None and dialect.calls and not dialect.text_with_calls and dialect.preamble is None

    @property
    def shown_call(self) -> str | None:
        """The template's rendering of the first of `EXAMPLES`; None if it writes no calls."""
        return self._profile.shown_call if self._profile is not None else None

    @property
    def image_words(self) -> str | None:
        """The template's text for an image among the parts of a message; None if it writes nothing."""
        if self._profile is None:
            return None
        left, right = "kvserve-left", "kvserve-right"
        content = [{"type": "text", "text": left}, {"type": "image"}, {"type": "text", "text": right}]
        arguments = self._profile.switches.arguments({}, thinking=False, preserve=None, effort=None)
        messages: list[MessageDict] = [{"role": "user", "content": content}]
        text = self._profile.template.render(messages, None, add_generation_prompt=False, arguments=arguments)
        if not isinstance(text, str) or left not in text or right not in text:
            return None
        return text.partition(left)[2].partition(right)[0] or None

    @property
    def accepts_thinking(self) -> bool:
        """Whether the template has a thinking switch."""
        return self._profile is not None and bool(self._profile.switches.thinking)

    def thinks_unasked(self, tags: Collection[str]) -> bool:
        """Whether the model may think although the request switched thinking off: the template names one of these
        thinking tags and has no switch."""
        if self._profile is None or self._profile.switches.turn_thinking_off:
            return False
        return any(tag in self._profile.template.source for tag in tags)

    @property
    def accepts_preserve_thinking(self) -> bool:
        """Whether the template has a switch to keep the thinking of earlier turns."""
        return self._profile is not None and bool(self._profile.switches.preserve)

    @property
    def efforts(self) -> tuple[str, ...]:
        """The reasoning efforts that the template knows, lowest first."""
        return self._profile.switches.efforts if self._profile is not None else ()

    def write(
        self,
        messages: tuple[Message, ...],
        tools: tuple[ToolSpec, ...] = (),
        *,
        thinking: bool,
        preserve_thinking: bool | None = None,
        effort: str | None = None,
        template_arguments: Mapping[str, object] | None = None,
        call_ids: Mapping[str, str] | None = None,
    ) -> PromptText:
        """The text for the next assistant message, or up to the end of the last one if that is the assistant's.

        `preserve_thinking` and `effort` None leave the template its default. `template_arguments` that the rendering
        itself sets (`messages`, `bos_token`, ...) or that `thinking` and `effort` decide are ignored. `call_ids` maps
        the calls' ids to the ids to write. Raises BadRequest for an image, and for template arguments with which the
        template fails.
        """
        profile = self._profile
        tools = guarded_tools(tools, self.control)
        if profile is None:
            return self._plain(messages, tools, ())
        given = self._free_arguments(profile, template_arguments or {})
        arguments = profile.switches.arguments(given, thinking=thinking, preserve=preserve_thinking, effort=effort)
        switched = profile.switches.arguments({}, thinking=thinking, preserve=preserve_thinking, effort=effort)
        refusals: list[str] = []
        for dialect, said, control in _attempts(profile, messages, tools, self.control):
            words = self._tool_words(dialect, tools)
            memory = self._memory_of(dialect) if control is self.control else None
            conformed = conform(said, tools, dialect, memory, control, words.said, call_ids)
            offered = tool_dicts(tools, dialect.form) if dialect.tools else None
            writer = Writer(profile.template, dialect.form, offered, arguments, self.reasoning_tags)
            written = writer.write(conformed)
            if isinstance(written, RenderedText):
                notes = (*refusals, *conformed.notes)
                # A chat template itself writes every special token, BOS included.
                text = self.control.settled(without_surrogates(written.text))
                begun = without_barriers(shown(without_surrogates(written.begun)))
                return PromptText(text, written.opens_reasoning, notes, continues=conformed.continues, begun=begun)
            is_tried_again = dialect.form.call_opening is not None  # with words before calls in messages of their own
            switched_writer = replace(writer, arguments=switched)
            if given and not is_tried_again and isinstance(switched_writer.write(conformed), RenderedText):
                reason = f"The chat template fails with these arguments: {shown(written.reason)}"
                raise BadRequest(reason, param=ARGUMENTS_FIELD)
            refusals.append(f"the chat template refused ({shown(written.reason)}): a plainer form was tried")
        return self._plain(messages, tools, tuple(refusals))

    def render(
        self,
        messages: tuple[Message, ...],
        tools: tuple[ToolSpec, ...] = (),
        *,
        thinking: bool,
        preserve_thinking: bool | None = None,
        effort: str | None = None,
        template_arguments: Mapping[str, object] | None = None,
    ) -> RenderedPrompt:
        """`write`, with the model tokens. Raises as `write` does."""
        prompt = self.write(
            messages,
            tools,
            thinking=thinking,
            preserve_thinking=preserve_thinking,
            effort=effort,
            template_arguments=template_arguments,
        )
        ids = self.control.encode(prompt.text, add_special_tokens=prompt.adds_special_tokens)
        return RenderedPrompt(prompt.shown, TokenSequence(ids), prompt.opens_reasoning, prompt.notes)

    def _plain(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], notes: tuple[str, ...]) -> PromptText:
        """The conversation as labelled text, without the model's template."""
        describe = ToolWords(explains=not tools, control=self.control, calls=self._words).said
        said = [step for index, message in enumerate(messages) for step in steps_of(message, index, describe)]
        steps = [PromptStep("system", self._words.tools(tools))] if tools else []
        steps += guarded_steps(said, WireForm(), self.control)
        continues = bool(steps) and steps[-1].kind == "assistant" and bool(steps[-1].text)
        text = without_surrogates(transcript(steps, self._words.calls) + ("" if continues else "\n\n[assistant]\n"))
        notes = (*notes, "no chat template: rendered as labelled plain text")
        text = self.control.settled(text)
        begun = without_barriers(shown(steps[-1].text)) if continues else ""
        return PromptText(text, False, notes, continues, adds_special_tokens=True, begun=begun)

    def _tool_words(self, dialect: Dialect, tools: tuple[ToolSpec, ...]) -> ToolWords:
        """The words for changes of tools: in the form of the tools in front, or, without any, with instructions."""
        form = self._profile.tool_form if self._profile is not None and dialect.tools else None
        return ToolWords(form, explains=not tools, control=self.control, calls=dialect.words)

    def _free_arguments(self, profile: _TemplateProfile, given: Mapping[str, object]) -> dict[str, object]:
        """The request's arguments without the names that the rendering itself sets."""
        free = {name: value for name, value in given.items() if profile.template.is_free(name)}
        return {name: guarded_data(value, self.control) for name, value in free.items()}

    def _memory_of(self, dialect: Dialect) -> ConformMemo | None:
        """The memory of a probed dialect; dialects tried after a refusal have none."""
        return next((memory for known, memory in self._memories if known is dialect), None)


def _control_of(
    tokenizer: Tokenizer, sample: Sample | None, tags: Collection[str], silent: Collection[str]
) -> ControlTokens:
    known = {*tags, *(tag for pair in REASONING_TAGS for tag in pair)}
    tokens = control_tokens(tokenizer, sample, known)
    # no template looks in an answer's text for tags around it, and no client sends them back
    return ControlTokens(tokenizer, tokens, spared_tags(tokenizer, tokens, sample, known) - {*silent})


def _attempts(
    profile: _TemplateProfile, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], control: ControlTokens
) -> Iterator[tuple[Dialect, tuple[Message, ...], ControlTokens]]:
    """The forms to try, nearest first: as probed; with words before calls in messages of their own; with an assistant's
    tags as words; tools in words; everything in one user message."""
    first = profile.tool_dialect if tools and profile.tool_dialect is not None else profile.dialect
    if first is not None:
        yield first, messages, control
        if first.form.call_opening is not None:  # a real call may be written otherwise than those that were tried
            yield without_words_before(first), messages, control
        if _are_said(control.spared, messages):
            yield first, messages, control.sparing_none
    in_words = profile.in_words
    if in_words is None:
        return
    yield in_words, messages, control
    is_answer = bool(messages) and messages[-1].role == "assistant"
    told, answer = (messages[:-1], messages[-1:]) if is_answer else (messages, ())
    describe = ToolWords(explains=not tools, calls=in_words.words).said
    steps = (step for index, message in enumerate(told) for step in steps_of(message, index, describe))
    yield in_words, (Message("user", (TextBlock(transcript(steps, in_words.words.calls)),)), *answer), control


def _are_said(tags: Collection[str], messages: tuple[Message, ...]) -> bool:
    """Whether an assistant's text has one of these tags."""
    answers = (message.blocks for message in messages if message.role == "assistant")
    texts = ("".join(block.text for block in blocks if isinstance(block, TextBlock)) for blocks in answers)
    return any(tag in text for text in texts for tag in tags)
