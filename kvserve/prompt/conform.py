"""Brings a conversation into the nearest form that one template accepts; every part stays in place, none is dropped.

It knows which neighbours a template accepts (`Dialect`, from `probe.py`) and a remedy for each of the others. Every
decision looks backwards only, so a longer conversation begins with the steps of the shorter one, and a next turn
continues from the remembered steps of the last one.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvserve.core import Message, ToolSpec
from kvserve.prompt.call_words import HERMES, CallWords
from kvserve.prompt.compiled import MessageDict
from kvserve.prompt.control import ControlTokens
from kvserve.prompt.guarding import guarded_steps
from kvserve.prompt.memo import Memo
from kvserve.prompt.preambles import with_words_joined
from kvserve.prompt.steps import (
    ROLES,
    DescribeTools,
    Kind,
    Preamble,
    PromptStep,
    Speaker,
    WireForm,
    hermes_result,
    message_dict,
    named,
    speaker_after,
    steps_of,
)
from kvserve.prompt.tool_words import AS_JSON

NO_RESULT = "(no result)"
FILLERS: tuple[Kind, ...] = ("user", "assistant", "result")

type Place = tuple[Speaker, Kind]
"""The state of a conversation: who spoke last in plain text, and the kind of its last step."""


@dataclass(frozen=True)
class Dialect:
    """What one template accepts. `order` holds the kinds of step that may follow at each place, the end included;
    `words` write what it has no place for."""

    form: WireForm = WireForm()
    tools: bool = False
    calls: bool = False
    results: bool = False
    parallel_calls: bool = False
    text_with_calls: bool = False
    reasoning_with_text_and_calls: bool = False
    order: frozenset[tuple[Place, Kind]] = field(default_factory=frozenset)
    words: CallWords = HERMES

    @cached_property
    def bridges(self) -> Mapping[tuple[Place, Kind], tuple[Kind, ...]]:
        """For every refused step the shortest sequence of fillers after which it is accepted, if there is one."""
        places, kinds = {place for place, _ in self.order}, {kind for _, kind in self.order}
        found = {(place, kind): self._bridge(place, kind) for place in places for kind in kinds}
        return {refused: bridge for refused, bridge in found.items() if bridge}

    @cached_property
    def preamble(self) -> Preamble | None:
        """The form of words before a call in a running loop; None where a filler could end it and so hide them."""
        if self.form.preamble is None or not self.calls:
            return None
        return None if any("assistant" in bridge for bridge in self.bridges.values()) else self.form.preamble

    def _bridge(self, start: Place, kind: Kind) -> tuple[Kind, ...]:
        rows: deque[tuple[Place, tuple[Kind, ...]]] = deque([(start, ())])
        seen = {start}
        while rows:
            place, row = rows.popleft()
            if (place, kind) in self.order:
                return row
            for filler in FILLERS:
                after = (speaker_after(place[0], filler), filler)
                if (place, filler) in self.order and after not in seen:
                    seen.add(after)
                    rows.append((after, (*row, filler)))
        return ()


@dataclass(frozen=True, slots=True)
class Conformed:
    """The steps to render, and the template's dict of each; the dicts must not be changed, they are rendered again.

    `continues`: the last step, an assistant's, is to be continued. `notes` are for the log.
    """

    steps: tuple[PromptStep, ...]
    dicts: tuple[MessageDict, ...]
    continues: bool
    notes: tuple[str, ...]


def conform(
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    dialect: Dialect,
    memory: "ConformMemo | None" = None,
    control: ControlTokens | None = None,
    describe: DescribeTools = AS_JSON,
    call_ids: Mapping[str, str] | None = None,
) -> Conformed:
    """The messages as steps in the template's dialect; tools that it does not take are described in the system message.

    `memory` is this dialect's, `describe` writes where tools come and go. `call_ids` maps the calls' ids to the ids to
    write. With `control` the messages are guarded; the tools must be already. Raises BadRequest for an image.
    """
    call_ids = call_ids or {}
    described = dialect.words.tools(tools) if tools and not dialect.tools else ""
    known = memory.find(messages, call_ids, described) if memory is not None else None
    placing, num_known = (known.placing.copy(), len(known.messages)) if known is not None else (_Placing(dialect), 0)
    placing.call_ids = call_ids
    new = enumerate(messages[num_known:], num_known)
    steps = [step for index, message in new for step in steps_of(message, index, describe, dialect.form.joints)]
    for step in steps:
        if step.own:
            placing.note("tools described where they change", step.index)
    steps = with_words_joined(steps) if dialect.preamble is not None else steps
    if control is not None:
        steps = list(guarded_steps(steps, dialect.form, control))
    if described and known is None:
        steps = list(_with_tools_described(steps, described))
        placing.note("tools described in the system message", 0)
    num_given = len(steps)
    while steps and _says_nothing(steps[-1], dialect):
        steps.pop()
    answered = max((number for number, step in enumerate(steps) if step.kind == "assistant"), default=-1)
    for number, step in enumerate(steps):
        for lowered in placing.lowered(placing.with_name(step), is_running=number > answered):
            placing.place(lowered)
    ends_with_answer = bool(steps) and steps[-1].kind == "assistant"
    if memory is not None and messages and steps and len(steps) == num_given and not ends_with_answer:
        memory.keep(messages, placing, steps, described)
    continues = ends_with_answer and placing.last_kind == "assistant"
    if not continues:
        placing.bridge_to_answer(len(messages))
    return Conformed(tuple(placing.steps), tuple(placing.dicts), continues, tuple(placing.notes()))


def _says_nothing(step: PromptStep, dialect: Dialect) -> bool:
    """Whether a last step gives the model nothing to continue: no text, and no thinking that the template accepts."""
    return step.kind == "assistant" and not step.text and not (step.reasoning and dialect.form.reasoning)


def _with_tools_described(steps: Sequence[PromptStep], description: str) -> Iterator[PromptStep]:
    """The steps with the tools at the end of the first system message, or in their own one at the beginning."""
    if steps and steps[0].kind == "system":
        text = f"{steps[0].text}\n\n{description}" if steps[0].text else description
        yield replace(steps[0], text=text)
        yield from steps[1:]
    else:
        yield PromptStep("system", description)
        yield from steps


@dataclass(frozen=True, slots=True)
class _PlacedTalk:
    """A placed beginning of a conversation, its last step complete. `placing` is never changed, only copied."""

    messages: tuple[Message, ...]
    placing: "_Placing"


class ConformMemo:
    """The placed beginnings of conversations in one dialect, within a number of bytes.

    They are found by the identity of the message objects: a next turn has those of the last one while these are
    remembered. `described` are the tools that stand in words at the beginning.
    """

    def __init__(self, max_bytes: int) -> None:
        self._known: Memo[_PlacedTalk] = Memo(max_bytes)

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()

    def find(self, messages: Sequence[Message], call_ids: Mapping[str, str], described: str) -> _PlacedTalk | None:
        """The longest known beginning whose calls are written with these ids; none with words as they are said in a
        running loop if that was answered since."""
        is_answered = False
        for index in range(len(messages) - 1, -1, -1):
            known = self._known.get((index, id(messages[index]), described))
            if known is None or known.messages != tuple(messages[: index + 1]):
                continue
            in_loop = known.placing.speaks_in_loop
            is_answered = is_answered or (in_loop and any(map(_has_answer, messages[index + 1 :])))
            if known.placing.wrote_with(call_ids) and not (in_loop and is_answered):
                return known
        return None

    def keep(self, messages: Sequence[Message], placing: "_Placing", new: Sequence[PromptStep], described: str) -> None:
        """Remember these placed messages; all but the `new` steps were found here."""
        num_bytes = _BYTES_PER_PLACED * len(messages) + sum(map(_num_bytes, new))
        key = (len(messages) - 1, id(messages[-1]), described)
        self._known.put(key, _PlacedTalk(tuple(messages), placing.copy()), num_bytes + len(described))


def _has_answer(message: Message) -> bool:
    """Whether it is an answer, or holds one."""
    steps = with_words_joined(list(steps_of(message, 0, AS_JSON))) if message.role == "assistant" else []
    return any(step.kind == "assistant" for step in steps)


_BYTES_PER_PLACED = 128
"""References to a message, its step and its dict, and the id of its call."""

_BYTES_PER_STEP = 1_024
"""A message, a step and a dict, beside the texts that they share."""


def _num_bytes(step: PromptStep) -> int:
    return _BYTES_PER_STEP + len(step.text) + len(step.reasoning) + 4 * sum(len(call.arguments) for call in step.calls)


class _Placing:
    """Places steps one behind the other, each in the nearest form that may follow the one before."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.steps: list[PromptStep] = []
        self.dicts: list[MessageDict] = []
        self._names: dict[str, str] = {}
        self._numbers: dict[str, tuple[int, int]] = {}
        self.call_ids: Mapping[str, str] = {}
        self._num_calls = 0
        self._pending: list[str] = []
        self._changes: dict[str, list[int]] = {}
        self._speaker: Speaker = "nobody"
        self.speaks_in_loop = False

    def copy(self) -> "_Placing":
        """An independent copy of this state."""
        twin = _Placing(self._dialect)
        twin.steps, twin.dicts, twin._pending = list(self.steps), list(self.dicts), list(self._pending)
        twin._names, twin._numbers = dict(self._names), dict(self._numbers)
        twin._changes = {change: list(indices) for change, indices in self._changes.items()}
        twin._num_calls, twin._speaker, twin.call_ids = self._num_calls, self._speaker, self.call_ids
        twin.speaks_in_loop = self.speaks_in_loop
        return twin

    def wrote_with(self, call_ids: Mapping[str, str]) -> bool:
        """Whether the calls so far are written as with these ids."""
        same = (call_ids.get(call_id) == self.call_ids.get(call_id) for call_id in self._names)
        return (not call_ids and not self.call_ids) or all(same)

    @property
    def last_kind(self) -> Kind:
        return self.steps[-1].kind if self.steps else "start"

    def note(self, change: str, index: int) -> None:
        self._changes.setdefault(change, []).append(index)

    def notes(self) -> Iterator[str]:
        for change, indices in self._changes.items():
            where = ", ".join(str(index) for index in dict.fromkeys(indices[:8]))
            yield f"{change} (message {where}{', ...' if len(indices) > 8 else ''})"

    def with_name(self, step: PromptStep) -> PromptStep:
        """The step with its name in the text, if the template would not write it."""
        if not step.name or ROLES[step.kind] in self._dialect.form.named_roles:
            return step
        self.note("name put before the text", step.index)
        return replace(step, text=named(step.text, step.name))

    def lowered(self, step: PromptStep, *, is_running: bool) -> Iterator[PromptStep]:
        """One assistant's step as steps that the template writes without losing a part; `is_running`: no answer follows
        it."""
        if step.kind != "calls":
            yield step
            return
        if not self._dialect.calls:
            self.note("tool calls written as text", step.index)
            said = [step.text] if step.text else []
            text = "\n".join([*said, self._dialect.words.calls(step.calls)])
            yield replace(step, kind="assistant", text=text, calls=())
            return
        mixed = bool(step.reasoning and step.text) and not self._dialect.reasoning_with_text_and_calls
        preamble = self._dialect.preamble
        if step.text and preamble is not None and is_running:
            self.note("text before tool calls put behind their thinking", step.index)
            step = replace(step, text="", reasoning=preamble.behind(step.reasoning, step.text))
            self.speaks_in_loop = True
        elif step.text and (mixed or not self._dialect.text_with_calls):
            self.note("text before tool calls put into a message of its own", step.index)
            yield replace(step, kind="assistant", reasoning="", calls=())
            # The reasoning stays with the calls: beside a plain text many templates drop it.
            step = replace(step, text="")
        if len(step.calls) > 1 and not self._dialect.parallel_calls:
            self.note("parallel tool calls put into a message each", step.index)
            yield replace(step, calls=step.calls[:1])
            yield from (replace(step, text="", reasoning="", calls=(call,)) for call in step.calls[1:])
            return
        yield step

    def place(self, step: PromptStep) -> None:
        """Append the step, or its replacement."""
        step = self._settled(step)
        if self._takes(step.kind):
            self._append(step)
        elif step.kind == "system" or (step.kind == "later_system" and self.last_kind != "system"):
            self.note("system message rendered as a user message", step.index)
            self.place(self._dialect.form.as_question(step))
        elif step.kind in ("result", "orphan") and self._bridge_to(step.kind) != ("user",):
            self.note("tool result rendered as a user message", step.index)
            self.place(replace(step, kind="user", text=hermes_result(step.text)))
        elif self._can_merge(step):
            self.note(f"{ROLES[step.kind]} message merged into the one before", step.index)
            self._merge(step)
        else:
            self.bridge(step.kind, step.index)
            self._append(step)

    def bridge(self, kind: Kind, index: int) -> None:
        """Put fillers before a step of this kind, if the template needs some."""
        if self._takes(kind):
            return
        for filler in self._bridge_to(kind):
            self.note(f"empty {ROLES[filler]} message put before", index)
            pending = self._pending[0] if self._pending else ""
            text = NO_RESULT if filler == "result" else ""
            self._append(self._settled(PromptStep(filler, text, call_id=pending, index=index)))

    def bridge_to_answer(self, index: int) -> None:
        """Put fillers before the generation tail, the same that the answer will have once it is history."""
        can_wait = self._takes("assistant") or not self._bridge_to("assistant")
        self.bridge("end" if can_wait else "assistant", index)

    def _bridge_to(self, kind: Kind) -> tuple[Kind, ...]:
        return self._dialect.bridges.get(((self._speaker, self.last_kind), kind), ())

    def _takes(self, kind: Kind) -> bool:
        return ((self._speaker, self.last_kind), kind) in self._dialect.order

    def _settled(self, step: PromptStep) -> PromptStep:
        """The step with its kind as it depends on what stands before."""
        if step.kind == "system" and self.steps:
            return replace(step, kind="later_system")
        if step.kind in ("result", "orphan"):
            answers = step.call_id in self._pending and self.last_kind in ("calls", "result")
            name = self._names.get(step.call_id, step.call_name)
            number, place = self._numbers.get(step.call_id, (0, 0))
            kind: Kind = "result" if answers else "orphan"
            return replace(step, kind=kind, call_name=name, call_number=number, call_place=place)
        return step

    def _can_merge(self, step: PromptStep) -> bool:
        last = self.last_kind
        if step.kind == "later_system":
            return last == "system"
        if step.kind == "calls":
            joint = bool(self.steps and self.steps[-1].text) or bool(step.text)
            return last == "assistant" and (self._dialect.text_with_calls or not joint)
        return step.kind == last and step.kind in ("user", "assistant")

    def _append(self, step: PromptStep) -> None:
        if step.kind == "calls":
            if self.last_kind != "calls":
                self._pending.clear()
            self._pending += [call.call_id for call in step.calls]
            self._names.update((call.call_id, call.name) for call in step.calls)
            self._numbers.update((call.call_id, (self._num_calls + i, i)) for i, call in enumerate(step.calls))
            step = replace(step, call_number=self._num_calls)
            self._num_calls += len(step.calls)
        self._speaker = speaker_after(self._speaker, step.kind)
        # cutting the tags off would leave their line ends
        is_cut = (step.kind, self.last_kind == "result") in self._dialect.form.cuts_inline
        self.steps.append(step)
        written = self._as_written(replace(step, reasoning="") if is_cut else step)
        self.dicts.append(message_dict(written, self._dialect.form))

    def _as_written(self, step: PromptStep) -> PromptStep:
        """The step with the ids to write of its calls, or of the call that it answers; a result has the number that the
        model wrote if the template numbers calls."""
        if not self.call_ids or not (step.calls or step.call_id):
            return step
        if self._dialect.form.call_ids in ("numbered", "numbered_in_message"):
            number = self.call_ids.get(step.call_id, "")
            return replace(step, call_number=int(number), call_place=int(number)) if number.isdecimal() else step
        calls = tuple(replace(call, call_id=self.call_ids.get(call.call_id, call.call_id)) for call in step.calls)
        return replace(step, calls=calls, call_id=self.call_ids.get(step.call_id, step.call_id))

    def _merge(self, step: PromptStep) -> None:
        """Join the step to the last one; only what follows the last one's text changes."""
        last = self.steps.pop()
        self.dicts.pop()
        joined = replace(
            last,
            kind=last.kind if last.kind == "system" else step.kind,
            text="\n\n".join(text for text in (last.text, step.text) if text),
            reasoning="\n\n".join(text for text in (last.reasoning, step.reasoning) if text),
            calls=step.calls,
        )
        self._append(joined)
