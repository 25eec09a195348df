"""What transformers makes of a conversation with a model's chat template: the text and the ids to compare with.

It knows transformers and the forms in which its users write messages for the templates of different models, nothing of
this server.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from transformers import AutoTokenizer, PreTrainedConfig, TokenizersBackend
from transformers.utils.chat_template_utils import _compile_jinja_template as compile_template

type Wire = dict[str, Any]
"""A message or a tool as OpenAI's clients send it."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
PARTS, INLINE = "parts", "inline"
SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_budget": (None, 0),
}
"""The arguments that switch thinking on and off, where a template reads them; None: it is not given."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is rendered: messages and tools as on the wire. `thinking` None: the template decides."""

    messages: tuple[Wire, ...]
    tools: tuple[Wire, ...] = ()
    thinking: bool | None = False
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a user of transformers hands a conversation over: arguments of calls as objects or as text, ids as given or
    in a form that the template wants, no content beside calls as "" or not at all, and where reasoning stands."""

    arguments_as_text: bool = False
    ids: str = "given"
    omits_content: bool = False
    reasoning: str = REASONING_FIELDS[0]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text that says all that was said."""

    text: str
    spelling: Spelling


@dataclass(frozen=True, slots=True)
class NotRendered:
    """Why transformers cannot write a conversation without an error or a loss."""

    reason: str


class Reference:
    """One folder's tokenizer and template in transformers, or another template in the place of its own."""

    def __init__(self, folder: Path, template_source: str | None = None) -> None:
        self.tokenizer: Any = _tokenizer(folder)
        if template_source is not None:
            self.tokenizer.chat_template = template_source
        template = self.tokenizer.chat_template
        self.source: str = template if isinstance(template, str) else (template or {}).get("default", "")
        self._found: dict[tuple[bool, bool, bool], Spelling] = {}

    @cached_property
    def reads(self) -> frozenset[str]:
        """The variables that the template reads."""
        environment = compile_template(self.source).environment
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(self.source)))

    def ids(self, text: str) -> tuple[int, ...]:
        """As `apply_chat_template(tokenize=True)` has them of its text."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def rendered(self, said: Conversation, *, tail: bool = True, may_move: bool = False) -> Rendered | NotRendered:
        """The conversation in the first spelling in which the template writes all of it; reasoning may be dropped, but
        a spelling that shows it comes first. `may_move`: a template may write it in another order."""
        reason, shown, moved = "", None, None
        for spelling in self._spellings(said):
            text = self.text(said, spelling, tail=tail)
            if isinstance(text, NotRendered):
                reason = reason or text.reason
                continue
            losses = list(_lost(text, said, self._spelt(said, spelling)))
            if losses:
                reason = reason or losses[0]
                if may_move and all(" moves " in loss for loss in losses):
                    moved = moved or Rendered(text, spelling)
                continue
            if all(word in text for word in _reasonings(said)):
                return Rendered(text, spelling)
            shown = shown or Rendered(text, spelling)
        return shown or moved or NotRendered(reason)

    def text(self, said: Conversation, spelling: Spelling, *, tail: bool = True) -> str | NotRendered:
        """What `apply_chat_template` writes."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    self._spelt(said, spelling),
                    tools=deepcopy(list(said.tools)) or None,
                    tokenize=False,
                    add_generation_prompt=tail and not said.continues,
                    continue_final_message=said.continues,
                    **self.arguments(said.thinking),
                )
            )
        except Exception as error:  # noqa: BLE001  # a template raises whatever it likes
            return NotRendered(f"transformers: {type(error).__name__}: {' '.join(str(error).split())[:160]}")

    def _spelt(self, said: Conversation, spelling: Spelling) -> list[Wire]:
        return [_spelt(message, number, said.messages, spelling) for number, message in enumerate(said.messages)]

    def arguments(self, thinking: bool | None) -> dict[str, object]:
        """The template's own arguments for thinking on or off; where it has no switch, the lowest effort for off."""
        if thinking is None:
            return {}
        values = {name: pair[not thinking] for name, pair in SWITCHES.items() if name in self.reads}
        if not values and not thinking and "reasoning_effort" in self.reads:
            values = {"reasoning_effort": "low"}
        return {name: value for name, value in values.items() if value is not None}

    def _spellings(self, said: Conversation) -> Iterator[Spelling]:
        has_calls = any(message.get("tool_calls") for message in said.messages)
        thoughts: tuple[str, ...] = REASONING_FIELDS[:1]
        if next(_reasonings(said), None) is not None:
            thoughts = tuple(name for name in REASONING_FIELDS if re.search(rf"[.'\"]{name}\b", self.source))
            thoughts += (PARTS,) * ("'thinking'" in self.source)
            thoughts = thoughts or (REASONING_FIELDS[0], *([INLINE] if "</think>" in self.source else []))
        ids = ("given", "nine", "functions") if has_calls else ("given",)
        flags = (False, True) if has_calls else (False,)
        for thought, as_text, id_form, omits in product(thoughts, flags, ids, flags):
            yield Spelling(as_text, id_form, omits, thought)


def _tokenizer(folder: Path) -> Any:
    """The rules of tokenizer.json as they stand: a class that the folder names may have others of its own."""
    if (folder / "tokenizer.json").is_file():
        return TokenizersBackend.from_pretrained(str(folder), local_files_only=True)
    return AutoTokenizer.from_pretrained(
        str(folder), config=PreTrainedConfig(), local_files_only=True, trust_remote_code=False
    )


def _spelt(message: Wire, number: int, messages: Sequence[Wire], spelling: Spelling) -> Wire:
    """A message as it is handed to the template."""
    spelt = deepcopy(message)
    reasoning = spelt.pop("reasoning_content", None)
    if calls := spelt.get("tool_calls"):
        if spelt.get("content") is None:
            spelt["content"] = ""
        if spelling.omits_content and not spelt["content"]:
            del spelt["content"]
        for place, call in enumerate(calls):
            call["id"] = _id(call["id"], call["function"]["name"], _number(messages, number) + place, spelling)
            if not spelling.arguments_as_text:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    if message["role"] == "tool":
        name, place = _answered(messages, str(message["tool_call_id"]))
        spelt |= {"tool_call_id": _id(message["tool_call_id"], name, place, spelling), "name": name}
    if reasoning is not None:
        text = spelt.get("content") or ""
        if spelling.reasoning == INLINE:
            spelt["content"] = f"<think>\n{reasoning}\n</think>\n\n{text}"
        elif spelling.reasoning == PARTS:
            said = [{"type": "text", "text": text}] if text else []
            spelt["content"] = [{"type": "thinking", "thinking": reasoning}, *said]
        else:
            spelt[spelling.reasoning] = reasoning
    return spelt


def _id(given: str, name: str, number: int, spelling: Spelling) -> str:
    forms = {"given": given, "nine": f"abcdef{number:03d}", "functions": f"functions.{name}:{number}"}
    return forms[spelling.ids]


def _number(messages: Sequence[Wire], before: int) -> int:
    """How many calls stand before a message."""
    return sum(len(message.get("tool_calls") or ()) for message in messages[:before])


def _answered(messages: Sequence[Wire], call_id: str) -> tuple[str, int]:
    """Name and number of a call."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    place = next(place for place, call in enumerate(calls) if call["id"] == call_id)
    return calls[place]["function"]["name"], place


# --- what must be in a text ------------------------------------------------------------------------------------------


def texts_of(message: Wire) -> list[str]:
    """The texts of a message's content."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _reasonings(said: Conversation) -> Iterator[str]:
    yield from (message["reasoning_content"] for message in said.messages if message.get("reasoning_content"))


def _lost(text: str, said: Conversation, spelt: Sequence[Wire]) -> Iterator[str]:
    """What a rendering loses or writes as no model has learnt it."""
    for tool in said.tools:
        if (tool["function"].get("description") or tool["function"]["name"]) not in text:
            yield f"transformers drops the tool {tool['function']['name']}"
    place = 0
    for message in said.messages:
        for word, call in _words(message):
            found = text.find(word, place)
            if found < 0:
                yield f"transformers drops {word!r}" if word not in text[:place] else f"transformers moves {word!r}"
            place = max(place, found + len(word))
            if call is not None:
                yield from _lost_arguments(text if found < 0 else text[place:], call)
        if not isinstance(message.get("content") or "", str) and ("'type'" in text or '"type": "text"' in text):
            yield "transformers writes the list of parts itself"
    if any(text.count(message["tool_call_id"]) == 1 for message in spelt if message["role"] == "tool"):
        yield "transformers names a call by an id that stands at no call"


def _words(message: Wire) -> Iterator[tuple[str, Wire | None]]:
    """The texts of a message, and the names of its calls with these."""
    yield from ((text.strip(), None) for text in texts_of(message) if text.strip())
    yield from ((call["function"]["name"], call) for call in message.get("tool_calls") or ())


def _lost_arguments(text: str, call: Wire) -> Iterator[str]:
    """What is lost of a call in the text behind its name."""
    keys = json.loads(call["function"]["arguments"])
    values = [value for value in keys.values() if isinstance(value, str) and value.isalnum()]
    if any(word not in text for word in (*keys, *values)):
        yield "transformers drops a call's arguments"
    if any(f"{{'{key}'" in text or f'{{\\"{key}' in text or f'{{{{"{key}' in text for key in keys):
        yield "transformers writes a call's arguments in no form of the model's"


def without_tools(said: Conversation) -> Conversation:
    """The conversation alone, for templates that have no place for tools."""
    return replace(said, tools=())
