"""Finds the thinking switches that one chat template really has, and makes the arguments that set them.

The table has the names that templates use; a switch counts only if it changes the rendering.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.probe import Prober, talk
from kvserve.prompt.steps import PromptStep, WireForm

UNSET = object()
"""Stands for an argument that is not passed."""


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """A template's argument with the value for on and the value for off."""

    name: str
    on: object
    off: object

    def arguments(self, is_on: bool) -> dict[str, object]:
        value = self.on if is_on else self.off
        return {} if value is UNSET else {self.name: value}


THINKING_SWITCHES = (
    ThinkingSwitch("enable_thinking", True, False),
    ThinkingSwitch("thinking", True, False),
    ThinkingSwitch("reasoning", True, False),
    ThinkingSwitch("thinking_budget", UNSET, 0),
)
# On keeps the thinking of earlier turns.
PRESERVE_SWITCHES = (
    ThinkingSwitch("preserve_thinking", True, False),
    ThinkingSwitch("clear_thinking", False, True),
    ThinkingSwitch("keep_past_thinking", True, False),
    ThinkingSwitch("truncate_history_thinking", False, True),
    ThinkingSwitch("drop_thinking", False, True),
)
EFFORT_ARGUMENT = "reasoning_effort"
EFFORT_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
USUAL_LEVELS = ("low", "medium", "high")


@dataclass(frozen=True, slots=True)
class Switches:
    """The switches that work. `efforts` are the levels that the template knows, lowest first."""

    thinking: tuple[ThinkingSwitch, ...] = ()
    preserve: tuple[ThinkingSwitch, ...] = ()
    efforts: tuple[str, ...] = ()

    @property
    def turn_thinking_off(self) -> bool:
        """Whether thinking can be switched off; a lowest effort other than "none" is still some thinking."""
        return bool(self.thinking) or self.efforts[:1] == ("none",)

    def arguments(
        self, given: Mapping[str, object], *, thinking: bool, preserve: bool | None, effort: str | None
    ) -> dict[str, object]:
        """The template's arguments for a request; None leaves a value to the template.

        `given` are the request's own template arguments. They override `preserve`, which may be only a setting;
        thinking and effort were resolved from them already.
        """
        arguments: dict[str, object] = {}
        for switch in self.preserve if preserve is not None else ():
            arguments |= switch.arguments(bool(preserve))
        resolved = {switch.name for switch in self.thinking if switch.on is not UNSET}
        resolved |= {EFFORT_ARGUMENT} if self.efforts else set()
        arguments |= {name: value for name, value in given.items() if name not in resolved}
        for switch in self.thinking:
            arguments |= switch.arguments(thinking)
        level = self._level(thinking, effort)
        return arguments if level is None else arguments | {EFFORT_ARGUMENT: level}

    def _level(self, thinking: bool, effort: str | None) -> str | None:
        """The effort to pass: the nearest known level; the lowest for thinking off without another switch."""
        if not self.efforts or (not thinking and self.thinking):
            return None
        if not thinking:
            return self.efforts[0]
        if effort not in EFFORT_LEVELS:
            return None
        wanted = EFFORT_LEVELS.index(effort)
        thoughtful = [level for level in self.efforts if level != "none"] or list(self.efforts)
        return min(thoughtful, key=lambda level: abs(EFFORT_LEVELS.index(level) - wanted))


def keep_arguments(template: CompiledTemplate) -> Mapping[str, object]:
    """The arguments that would switch thinking on and keep it, for every name that the template mentions."""
    arguments: dict[str, object] = {}
    for switch in (*THINKING_SWITCHES, *PRESERVE_SWITCHES):
        if switch.name in template.reads:
            arguments |= switch.arguments(True)
    return arguments


def find_switches(prober: Prober, form: WireForm) -> Switches:
    """The switches of the prober's template that change what it writes."""
    return Switches(
        thinking=tuple(s for s in THINKING_SWITCHES if _works(prober, form, s)),
        preserve=tuple(s for s in PRESERVE_SWITCHES if _preserves(prober, form, s)),
        efforts=tuple(_efforts(prober, form)),
    )


def _thoughtful_talk() -> Sequence[PromptStep]:
    user, assistant, later = talk(["user", "assistant", "user"])
    return user, replace(assistant, reasoning="kwreasoning"), later


def _render(prober: Prober, form: WireForm, arguments: Mapping[str, object]) -> tuple[object, ...]:
    """A fresh and an older conversation; a refusal compares equal to one with the same reason."""
    tried = replace(prober, arguments=arguments)
    return tuple(tried.render(steps, form, keep=True) for steps in (talk(["user"]), _thoughtful_talk()))


def _works(prober: Prober, form: WireForm, switch: ThinkingSwitch) -> bool:
    if switch.name not in prober.template.reads:
        return False
    on, off = (_render(prober, form, switch.arguments(is_on)) for is_on in (True, False))
    return on != off and all(isinstance(text, str) for text in (*on, *off))


def _preserves(prober: Prober, form: WireForm, switch: ThinkingSwitch) -> bool:
    """Whether earlier thinking is written with the switch on and gone with it off, thinking itself being on."""
    if switch.name not in prober.template.reads:
        return False
    thinking: dict[str, object] = {}
    for other in THINKING_SWITCHES:
        thinking |= other.arguments(True) if other.name in prober.template.reads else {}
    kept, gone = (_render(prober, form, thinking | switch.arguments(is_on))[1] for is_on in (True, False))
    return isinstance(kept, str) and isinstance(gone, str) and "kwreasoning" in kept and "kwreasoning" not in gone


def _efforts(prober: Prober, form: WireForm) -> Iterator[str]:
    """The levels that the template takes: the usual three and those it names itself, if they make a difference."""
    if EFFORT_ARGUMENT not in prober.template.reads:
        return
    source = prober.template.source
    named = [level for level in EFFORT_LEVELS if f"'{level}'" in source or f'"{level}"' in source]
    levels = [level for level in EFFORT_LEVELS if level in named or level in USUAL_LEVELS]
    thinking: dict[str, object] = {}
    for switch in THINKING_SWITCHES:
        thinking |= switch.arguments(True) if switch.name in prober.template.reads else {}
    texts = {level: _render(prober, form, thinking | {EFFORT_ARGUMENT: level}) for level in levels}
    taken = [level for level in levels if all(isinstance(text, str) for text in texts[level])]
    if len({texts[level] for level in taken}) > 1:
        yield from taken
