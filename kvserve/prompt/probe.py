"""Finds what one chat template accepts, at load, by rendering small conversations of marker words.

The result is a `Dialect`. It never sees a request.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvserve.core import ToolCallBlock, ToolSpec
from kvserve.prompt.compiled import CompiledTemplate, Refusal
from kvserve.prompt.conform import Dialect, Place
from kvserve.prompt.control import Sample
from kvserve.prompt.preambles import with_preamble, with_system_joined
from kvserve.prompt.steps import (
    INLINE,
    ROLES,
    THINK_TAGS,
    THINKING_PART,
    CallIds,
    Kind,
    PromptStep,
    ThinkTags,
    WireForm,
    message_dict,
    tool_dicts,
)

PROBE_TOOL = ToolSpec(
    "kwtoolname",
    "kwtooldescription",
    {"type": "object", "properties": {"kwparameter": {"type": "string", "description": "kwparameterdescription"}}},
)
# How templates read an assistant's reasoning, the usual fields first, and what must stand in the template's source: one
# that does not know a form may write it all the same, as the text of a list or as tags that nothing ever strips.
REASONING_FORMS = (
    ("reasoning_content", ("reasoning_content",)),
    ("thinking", ("thinking",)),
    ("reasoning", ("reasoning",)),
    (THINKING_PART, ("'thinking'", '"thinking"')),
    (INLINE, ()),
)
STAND_IN_FOR_EMPTY = "(empty)"

# The shortest conversation that ends at each place.
LEADS: Mapping[Place, tuple[Kind, ...]] = {
    ("nobody", "start"): (),
    ("nobody", "system"): ("system",),
    ("nobody", "later_system"): ("system", "later_system"),
    ("nobody", "calls"): ("calls",),
    ("nobody", "result"): ("calls", "result"),
    ("nobody", "orphan"): ("orphan",),
    ("user", "user"): ("user",),
    ("user", "calls"): ("user", "calls"),
    ("user", "result"): ("user", "calls", "result"),
    ("user", "later_system"): ("user", "later_system"),
    ("user", "orphan"): ("user", "orphan"),
    ("assistant", "assistant"): ("user", "assistant"),
    ("assistant", "calls"): ("user", "assistant", "calls"),
    ("assistant", "result"): ("user", "assistant", "calls", "result"),
    ("assistant", "later_system"): ("user", "assistant", "later_system"),
    ("assistant", "orphan"): ("user", "assistant", "orphan"),
}
TWO_CALLS: tuple[Kind, ...] = ("user", "calls", "result", "calls", "result")
NEXT_KINDS: tuple[Kind, ...] = ("system", "later_system", "user", "assistant", "calls", "result", "orphan")


@dataclass(frozen=True, slots=True)
class Prober:
    """Renders conversations with one template. With `tools` each is rendered with a tool, which changes what some
    templates accept. `arguments` keep past reasoning, if the template has such arguments. `think_tags` are its own.
    """

    template: CompiledTemplate
    tools: tuple[ToolSpec, ...] = ()
    arguments: Mapping[str, object] | None = None
    think_tags: ThinkTags = THINK_TAGS

    def render(
        self, steps: Sequence[PromptStep], form: WireForm, *, tail: bool = True, keep: bool = False
    ) -> str | Refusal:
        """The steps as text, with `tail`: the generation tail, `keep`: the arguments that keep reasoning."""
        messages = [message_dict(step, form) for step in steps]
        arguments = (self.arguments or {}) if keep else {}
        tools = tool_dicts(self.tools, form)
        return self.template.render(messages, tools, add_generation_prompt=tail, arguments=arguments)

    def shows(self, steps: Sequence[PromptStep], form: WireForm, *, tail: bool = True) -> bool:
        """Whether every text and call of the steps is written, in order (reasoning aside)."""
        text = self.render(steps, form, tail=tail)
        return isinstance(text, str) and in_order(text, _words(steps))

    def shows_reasoning(self, steps: Sequence[PromptStep], form: WireForm) -> bool:
        """Whether the reasoning of the steps is written in some setting, and their texts behind it."""
        words = [word for step in steps for word in (step.reasoning, step.text) if word]
        settings = ((tail, keep) for tail in (False, True) for keep in (False, True))
        texts = (self.render(steps, form, tail=tail, keep=keep) for tail, keep in settings)
        # A list of parts that was dumped instead of read shows its keys.
        return any(isinstance(text, str) and in_order(text, words) and "'thinking':" not in text for text in texts)


def in_order(text: str, words: Iterable[str]) -> bool:
    """Whether the words occur in the text in this order."""
    position = 0
    for word in words:
        found = text.find(word, position)
        if found < 0:
            return False
        position = found + len(word)
    return True


def _words(steps: Iterable[PromptStep]) -> Iterator[str]:
    for step in steps:
        if step.text:
            yield step.text
        for call in step.calls:
            yield call.arguments.partition(":")[2].strip('"}') or call.arguments


def talk(kinds: Iterable[Kind], *, text_with_calls: bool = False, calls_each: int = 1) -> list[PromptStep]:
    """Steps of these kinds with a marker word each; a result answers the first call without one."""
    steps: list[PromptStep] = []
    calls: list[ToolCallBlock] = []
    num_results = 0
    for number, kind in enumerate(kinds):
        text = f"kwtext{number}end"
        if kind == "calls":
            made = tuple(_call(f"kwcall{number}of{i}") for i in range(calls_each))
            steps.append(PromptStep("calls", text if text_with_calls else "", calls=made, call_number=len(calls)))
            calls += made
        elif kind == "result" and num_results < len(calls):
            answered = calls[num_results]
            steps.append(
                PromptStep(kind, text, call_id=answered.call_id, call_name=answered.name, call_number=num_results)
            )
            num_results += 1
        else:
            steps.append(PromptStep(kind, text, call_id="kwnone" if kind == "orphan" else ""))
    return steps


def _call(call_id: str) -> ToolCallBlock:
    return ToolCallBlock(call_id, PROBE_TOOL.name, f'{{"kwparameter":"{call_id}end"}}')


def probe(prober: Prober) -> Dialect | None:
    """The dialect of the prober's template, None if it cannot render one user message."""
    form = WireForm(think_tags=prober.think_tags)
    if not prober.shows(talk(["user"]), form):
        form = replace(form, content_as_list=True)
        if not prober.shows(talk(["user"]), form):
            return None
    form = replace(form, empty_text=dict(_empty_texts(prober, form)), named_roles=frozenset(_named_roles(prober, form)))
    dialect = _probe_calls(prober, replace(form, describes_every_tool=_describes_every_tool(prober, form)))
    form = _probe_reasoning(prober, dialect)
    dialect = replace(dialect, form=form, tools=_shows_tools(prober, form))
    form = replace(form, joints=dict(_joints(prober, dialect)), cuts_inline=frozenset(_cuts_inline(prober, dialect)))
    form = with_preamble(with_system_joined(form, prober.render), prober.render, talk(TWO_CALLS))
    dialect = _probe_call_shapes(prober, replace(dialect, form=form)) if dialect.calls else replace(dialect, form=form)
    return replace(dialect, order=frozenset(_order(prober, dialect)))


def sample(prober: Prober, dialect: Dialect) -> Sample:
    """The prober's template's rendering, with thinking if it has any; only the whole loop has tools."""
    toolless = replace(prober, tools=())

    def written(asked: Prober, *kinds: Kind, tail: bool = False) -> str:
        text = asked.render(talk(kinds), dialect.form, tail=tail, keep=True)
        return text if isinstance(text, str) else ""

    answered = written(toolless, "system", "user", "assistant", "user", tail=True)
    return Sample(
        source=prober.template.source,
        user=written(toolless, "user"),
        talk=answered or written(toolless, "user", "assistant"),
        calls=written(toolless, "user", "calls") if dialect.calls else "",
        loop=written(prober, "user", "calls", "result", tail=True) if dialect.results else "",
    )


def _shows_tools(prober: Prober, form: WireForm) -> bool:
    text = prober.render(talk(["user"]), form)
    words = ("kwtoolname", "kwtooldescription", "kwparameter")
    return isinstance(text, str) and bool(prober.tools) and all(word in text for word in words)


def _describes_every_tool(prober: Prober, form: WireForm) -> bool:
    """Whether a tool without a description is written only with an empty one in its place."""
    bare = replace(prober, tools=tuple(replace(tool, description=None) for tool in prober.tools))
    filled = replace(form, describes_every_tool=True)
    return not _names_tools(bare, form) and _names_tools(bare, filled)


def _names_tools(prober: Prober, form: WireForm) -> bool:
    text = prober.render(talk(["user"]), form)
    return isinstance(text, str) and all(tool.name in text for tool in prober.tools)


def _empty_texts(prober: Prober, form: WireForm) -> Iterator[tuple[str, str]]:
    """The replacement of an empty text in each role; none if the template accepts empty text."""
    places: tuple[tuple[str, tuple[Kind, ...], int], ...] = (
        ("system", ("system", "user"), 0),
        ("user", ("user", "assistant", "user"), 0),
        ("assistant", ("user", "assistant", "user"), 1),
        ("tool", ("user", "calls", "result"), 2),
    )
    for role, kinds, position in places:
        steps = talk(kinds)
        steps[position] = replace(steps[position], text="")
        yield role, "" if prober.shows(steps, form) else STAND_IN_FOR_EMPTY


def _joints(prober: Prober, dialect: Dialect) -> Iterator[tuple[str, str]]:
    """What the template writes between two texts in a list, for each role where it writes the same as of one text."""
    places: tuple[tuple[Kind, ...], ...] = (("user",), ("system",), ("user", "calls", "result"))
    for kinds in places[: 3 if dialect.results else 2]:
        *lead, last = talk(kinds)
        rest = talk(["user"]) if kinds[-1] == "system" else []
        texts = ("kwleft", "kwright")
        dicts = [message_dict(step, dialect.form) for step in (*lead, last, *rest)]
        dicts[len(lead)]["content"] = [{"type": "text", "text": text} for text in texts]
        tools = tool_dicts(prober.tools, dialect.form)
        text = prober.template.render(dicts, tools, add_generation_prompt=True, arguments={})
        if isinstance(text, str) and in_order(text, texts):
            joint = text.partition(texts[0])[2].partition(texts[1])[0]
            whole = [*lead, replace(last, text=joint.join(texts)), *rest]
            # words between two texts would be the template's own, tags perhaps, which a client's text cannot be
            if not joint.strip() and prober.render(whole, dialect.form) == text:
                yield ROLES[kinds[-1]], joint


def _named_roles(prober: Prober, form: WireForm) -> Iterator[str]:
    """The roles whose messages are written with their names."""
    places: tuple[tuple[tuple[Kind, ...], int], ...] = (
        (("system", "user"), 0),
        (("user",), 0),
        (("user", "assistant", "user"), 1),
    )
    for kinds, position in places:
        steps = talk(kinds)
        steps[position] = replace(steps[position], name="kwname")
        text = prober.render(steps, form)
        if isinstance(text, str) and "kwname" in text:
            yield ROLES[kinds[position]]


def _probe_calls(prober: Prober, form: WireForm) -> Dialect:
    """Whether calls and their results are written, and in which form."""
    endings: tuple[Kind, ...] = ("result", "user")
    ids: tuple[CallIds, ...] = ("given", "nine_characters", "numbered")
    flags = (False, True)
    fills = flags if form.empty_text.get("assistant") else (False,)
    for ending, as_text, fill, omits, call_ids in product(endings, flags, fills, flags, ids):
        tried = replace(form, omits_empty_content=omits, call_ids=call_ids, arguments_as_text=as_text, fills_calls=fill)
        kinds: tuple[Kind, ...] = ("user", "calls", ending)
        if prober.shows(talk(kinds), tried) and _names_calls(prober, tried, kinds):
            tried = _probe_numbers(prober, _probe_raw_arguments(prober, tried, kinds))
            return Dialect(form=tried, calls=True, results=ending == "result")
    return Dialect(form=form)


def _probe_numbers(prober: Prober, form: WireForm) -> WireForm:
    """Whether the template writes its own numbers into calls, and given ids into results, as some do."""
    counted: tuple[CallIds, ...] = ("numbered", "numbered_in_message")
    if form.call_ids != "given" or _names_results(prober, form):
        return form
    others = (replace(form, call_ids=call_ids) for call_ids in counted)
    return next((other for other in others if _names_results(prober, other)), form)


def _names_results(prober: Prober, form: WireForm) -> bool:
    """Whether a result of one of two consecutive calls is written without its id."""
    steps: list[PromptStep] = [*talk(["user"])]
    for number in range(2):
        call = ToolCallBlock(f"kwid{number}", PROBE_TOOL.name, '{"kwparameter":"kwvalue"}')
        steps.append(PromptStep("calls", calls=(call,), call_number=number))
        steps.append(PromptStep("result", "kwtext", call_id=call.call_id, call_name=call.name, call_number=number))
    text = prober.render(steps, form)
    if not isinstance(text, str):
        return False
    dicts = [message_dict(step, form) for step in steps]
    ids = [str(message["tool_call_id"]) for message in dicts if message["role"] == "tool"]
    return all(text.count(call_id) in (0, 2 * ids.count(call_id)) for call_id in ids)


def _names_calls(prober: Prober, form: WireForm, kinds: tuple[Kind, ...]) -> bool:
    """Whether the name of a called tool is written, and the missing content is not written as None."""
    steps = [replace(s, calls=tuple(replace(c, name="kwothername") for c in s.calls)) for s in talk(kinds)]
    text, plain = prober.render(steps, form), prober.render(talk(["user"]), form)
    assert isinstance(plain, str), "a user message alone was rendered before"
    return isinstance(text, str) and "kwothername" in text and text.count("None") <= plain.count("None")


def _probe_raw_arguments(prober: Prober, form: WireForm, kinds: tuple[Kind, ...]) -> WireForm:
    """Whether the template iterates the arguments, so that those that are not JSON objects must be wrapped."""
    steps = [replace(s, calls=tuple(replace(c, arguments="kwraw") for c in s.calls)) for s in talk(kinds)]
    return form if prober.shows(steps, form) else replace(form, wraps_raw_arguments=True)


def _probe_reasoning(prober: Prober, dialect: Dialect) -> WireForm:
    form = dialect.form
    answer = [talk(["user"])[0], PromptStep("assistant", "kwtext1end", "kwreasoning")]
    places = [answer, [*answer, *talk(["user"])]]
    if dialect.calls:
        user, calls, result = talk(["user", "calls", "result" if dialect.results else "user"])
        places.append([user, replace(calls, reasoning="kwreasoning"), result])
    for name, hints in REASONING_FORMS:
        tried = replace(form, reasoning=name)
        is_known = any(hint in prober.template.source for hint in hints or prober.think_tags[1:])
        if is_known and any(prober.shows_reasoning(steps, tried) for steps in places):
            return replace(tried, keeps_think_tags=_keeps_think_tags(prober, tried))
    return form


def _cuts_inline(prober: Prober, dialect: Dialect) -> Iterator[tuple[Kind, bool]]:
    """Where inline reasoning is not shown once anything follows, whatever the template is told."""
    if dialect.form.reasoning != INLINE:
        return
    names = filter(prober.template.is_free, prober.template.reads)
    told = ({**(prober.arguments or {}), name: value} for name, value in product(names, (True, False)))
    asked = [prober, *(replace(prober, arguments=arguments) for arguments in told)]
    kinds: tuple[Kind, ...] = ("assistant", "calls") if dialect.calls else ("assistant",)
    for kind, is_behind in product(kinds, (False, True) if dialect.results else (False,)):
        lead: tuple[Kind, ...] = ("user", "calls", "result") if is_behind else ("user",)
        after: Kind = "result" if dialect.results else "user"
        # some templates cut it off only behind a question
        laters: list[tuple[Kind, ...]] = [("user",), ("assistant",), ("calls", after)]
        laters = laters[: 3 if dialect.calls else 2] if kind == "assistant" else [(after,)]
        talks = (talk((*lead, kind, *later)) for later in laters)
        written = [steps for steps in talks if prober.shows(steps, dialect.form)]
        for steps in written:
            steps[len(lead)] = replace(steps[len(lead)], reasoning="kwreasoning")
        if written and not any(each.shows_reasoning(steps, dialect.form) for steps in written for each in asked):
            yield kind, is_behind


def _keeps_think_tags(prober: Prober, form: WireForm) -> bool:
    """Whether a literal </think> in an answer costs the text before it, and an empty reasoning field saves it."""
    steps = [*talk(["user"]), PromptStep("assistant", f"kwbefore{form.think_tags[1]}kwafter"), *talk(["user"])]
    return not prober.shows(steps, form) and prober.shows(steps, replace(form, keeps_think_tags=True))


def _probe_call_shapes(prober: Prober, dialect: Dialect) -> Dialect:
    form = dialect.form
    parallel = talk(["user", "calls", "result", "result"], calls_each=2)
    running = talk(["user", "calls", "result"], text_with_calls=True)
    past = talk(["user", "calls", "result", "assistant", "user"], text_with_calls=True)
    thought = [replace(step, reasoning="kwreasoning") if step.calls else step for step in past]
    return replace(
        dialect,
        parallel_calls=prober.shows(parallel, form),
        text_with_calls=prober.shows(running, form) and prober.shows(past, form),
        reasoning_with_text_and_calls=prober.shows(thought, form),
    )


def _order(prober: Prober, dialect: Dialect) -> Iterator[tuple[Place, Kind]]:
    """The kinds of step, by place, that the template writes completely and in order."""
    for place, lead in LEADS.items():
        if lead and _is_shown(prober, dialect, lead, tail=True):
            yield place, "end"
        for kind in NEXT_KINDS:
            conversations = _conversations(lead, kind, dialect)
            if conversations and all(_is_shown(prober, dialect, kinds) for kinds in conversations):
                yield place, kind


def _conversations(lead: tuple[Kind, ...], kind: Kind, dialect: Dialect) -> tuple[tuple[Kind, ...], ...]:
    """The conversations with the step behind the lead that must all be written; none if it cannot occur."""
    before: Kind = lead[-1] if lead else "start"
    match before, kind:
        case "start", "system":
            # Some templates move the system text to the newest user message: the prompt's start changes each turn.
            return (kind, "user"), (kind, "user", "assistant", "user")
        case (_, "system") | ("start", "later_system"):
            return ()
        case _, "assistant":
            return (*lead, kind), (*lead, kind, "user")
        case "calls", "calls":
            return ((*lead, kind, *(("result", "result") if dialect.results else ("user",))),)
        case _, "calls":
            return ((*lead, kind, "result" if dialect.results else "user"),)
        case "result", "result":
            calls: tuple[Kind, ...] = ("calls",) if dialect.parallel_calls else ("calls", "calls")
            return ((*lead[:-2], *calls, "result", "result"),)
        case ("calls", "result") | (_, "user" | "later_system" | "orphan"):
            return ((*lead, kind),)
        case _:
            return ()


def _is_shown(prober: Prober, dialect: Dialect, kinds: tuple[Kind, ...], *, tail: bool | None = None) -> bool:
    if not kinds:
        return True
    if not dialect.calls and ("calls" in kinds or "result" in kinds):
        return False
    parallel = kinds.count("calls") == 1 and kinds[-2:] == ("result", "result")
    tail = ROLES[kinds[-1]] != "assistant" if tail is None else tail
    return prober.shows(talk(kinds, calls_each=2 if parallel else 1), dialect.form, tail=tail)
