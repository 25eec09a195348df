"""What could at best be reused of recorded requests: client bodies, their volatile spans frozen, rendered as they are.

Beside the server: own table of spans, the model's template and tokenizer as transformers reads them, own bookkeeping.
A span that the server fails to normalise cannot lower this; a message that is gone from the next request does, and so
does whatever the template itself writes differently there.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig

from benchmarks.recordings import Request, Wire
from benchmarks.reuse_oracle import CONVENTIONS, Computed, Convention, common_prefix, possible_reuse

FROZEN: Mapping[str, tuple[re.Pattern[str], str]] = {
    "cch": (re.compile(r"\bcch=[0-9a-f]*"), "cch=0"),
    "billing header": (re.compile(r"x-anthropic-billing-header: [^\n]*"), "x-anthropic-billing-header: none"),
    "total tokens": (re.compile(r"<total_tokens>\d+ tokens left</total_tokens>"), "<total_tokens></total_tokens>"),
    "message id": (re.compile(r'"message_id(_full)?": "[^"\n]*"'), '"message_id": ""'),
    "inbound context": (re.compile(r"## Inbound Context \(trusted metadata\)\n[^`]*```json\n[^`]*```\n?"), ""),
    "metadata": (re.compile(r"(?:Conversation info|Sender) \(untrusted metadata\):\n```json\n[^`]*```\n*"), ""),
    "reminder": (
        re.compile(
            r"<system-reminder>\n(?:(?!</system-reminder>|^Contents of |^Today's date is ).)*</system-reminder>\n*",
            re.DOTALL | re.MULTILINE,
        ),
        "",
    ),
    "aider": (re.compile(r"\n\n# \*SEARCH/REPLACE block\* Rules:\n.*\Z", re.DOTALL), ""),
    "statistics": (re.compile(r"Stats: runtime [^\n]*"), "Stats: runtime"),
    "time": (re.compile(r"Current time is[^\n<]*"), "Current time is"),
    "date": (re.compile(r"(Current date|Today's date(?: is|:)) ?[^\n]*"), r"\1"),
}
"""What clients are known to change in messages of system and user between two requests, and what is put for it.

A reminder with the contents of files or the date counts: where these change, the model must read them anew.
"""

REASONING_FIELDS = ("reasoning_content", "reasoning", "reasoning_text")


@dataclass(frozen=True, slots=True)
class Possible:
    """A frozen prompt's tokens, and how many of them an earlier one had, as far as layers can be restored there."""

    num_prompt_tokens: int
    num_reusable_tokens: int


class FrozenOracle:
    """One family's bound for one conversation after the other."""

    def __init__(self, family: str, folder: Path, convention: Convention | None = None) -> None:
        """`convention` of a model that is of no family listed."""
        self._convention = convention or CONVENTIONS[family]
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, config=PreTrainedConfig())
        self._tokenizer = tokenizer
        self._ends = frozenset(tokenizer.convert_tokens_to_ids(list(self._convention.ends)))
        added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, added)) + ")")
        self._piece: Callable[[str], tuple[int, ...]] = cache(self._encoded)
        self._computed = Computed()

    def forget(self) -> None:
        """Another server, which has computed nothing."""
        self._computed = Computed()

    def judge(self, request: Request) -> Possible:
        """What of this request was computed before; afterwards it is too, with its answer."""
        chat = request.chat
        messages = _frozen(chat["messages"])
        tools = chat.get("tools") or []
        thinking = _is_thinking(chat)
        prompt = self._ids(messages, tools, thinking=thinking, is_open=True)
        known = self._computed.longest_prefix(prompt)
        ends = [] if self._convention.is_cuttable else self._message_ends(prompt, messages, tools, thinking=thinking)
        reusable = possible_reuse(prompt, known, ends, is_cuttable=self._convention.is_cuttable)
        self._computed.add(prompt)
        if request.reply is not None:
            self._answered(prompt, [*messages, _template_form(request.reply.message)], tools, thinking=thinking)
        return Possible(len(prompt), reusable)

    def _answered(self, prompt: list[int], whole: list[Wire], tools: Sequence[Wire], *, thinking: bool) -> None:
        """The answer was computed too: as the template writes it at the end and, where that goes on from this very
        prompt, as it writes it before other messages (at the end some put an empty thinking block before it)."""
        self._computed.add(self._ids(whole, tools, thinking=thinking, is_open=False))
        role = "tool" if whole[-1].get("tool_calls") else "user"
        later, other = (
            self._ids([*whole, {"role": role, "content": said}], tools, thinking=thinking, is_open=False)
            for said in ("Amber lake", "Violet moon")
        )
        parting = common_prefix(later, other)
        end = max((offset + 1 for offset in range(parting) if later[offset] in self._ends), default=0)
        if later[: len(prompt)] == prompt:
            self._computed.add(later[:end])

    def _ids(self, messages: Sequence[Wire], tools: Sequence[Wire], *, thinking: bool, is_open: bool) -> list[int]:
        """The tokens of the template's text; what stands between two special tokens is tokenised once."""
        convention = self._convention
        said = list(messages) if convention.takes_tools else list(_in_words(messages, tools))
        text = self._tokenizer.apply_chat_template(
            _in_order(said, convention),
            tools=(list(tools) or None) if convention.takes_tools else None,
            tokenize=False,
            add_generation_prompt=is_open,
            **convention.keeping,
            **(convention.thinking if thinking else convention.not_thinking),
        )
        return [token for piece in self._special.split(str(text)) if piece for token in self._piece(piece)]

    def _encoded(self, piece: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(piece, add_special_tokens=False))

    def _message_ends(
        self, prompt: Sequence[int], messages: Sequence[Wire], tools: Sequence[Wire], *, thinking: bool
    ) -> list[int]:
        """Offsets behind which a message is over: after its closing token, after a system text that is folded into the
        first user message, and where messages are joined because turns must alternate."""
        ends = [offset + 1 for offset, token in enumerate(prompt) if token in self._ends]
        if self._convention.alternates:  # another may follow in the same turn: the words end before the token
            ends += [end - 1 for end in ends]
            roles = ["user" if message["role"] == "tool" else message["role"] for message in messages]
            for number, (before, behind) in enumerate(pairwise(roles), 1):
                if before == behind and before != "system":
                    part = self._ids(messages[:number], tools, thinking=thinking, is_open=False)
                    ends.append(common_prefix(prompt, part))
        if self._convention.folds_system and messages[0]["role"] == "system":
            probe = Computed()
            probe.add(self._ids([messages[0], _user("Amber lake")], tools, thinking=thinking, is_open=True))
            ends.append(probe.longest_prefix(prompt))
        return sorted(ends)


# --- bodies as a template reads them ---------------------------------------------------------------------------------


def _is_thinking(body: Wire) -> bool:
    """The request's own switch, else on as the server has it."""
    given = (body.get("chat_template_kwargs") or {}).get("enable_thinking", body.get("enable_thinking"))
    return True if given is None else bool(given)


def _frozen(messages: Sequence[Wire]) -> list[Wire]:
    return [_template_form(message, is_frozen=message["role"] != "assistant") for message in messages]


def _template_form(message: Wire, *, is_frozen: bool = False) -> Wire:
    """Text as one string, the reasoning under one name, arguments as objects, no ids."""
    role = "system" if message["role"] == "developer" else message["role"]
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part["text"] for part in content if part["type"] == "text")
    if is_frozen and role != "tool":
        for pattern, constant in FROZEN.values():
            content = pattern.sub(constant, content)
    plain: Wire = {"role": role, "content": content}
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if reasoning:
        plain["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        plain["tool_calls"] = [_call(call["function"]) for call in message["tool_calls"]]
    return plain


def _call(function: Wire) -> Wire:
    arguments = function["arguments"]
    parsed = arguments if isinstance(arguments, dict) else json.loads(arguments or "{}")
    return {"type": "function", "function": {"name": function["name"], "arguments": parsed}}


def _in_order(messages: Sequence[Wire], convention: Convention) -> list[Wire]:
    """One system message, at the front; later ones as a user's. Neighbours joined where turns must alternate."""
    ordered: list[Wire] = []
    for message in messages:
        last = ordered[-1] if ordered else None
        if message["role"] == "system" and (last is None or (len(ordered) == 1 and last["role"] == "system")):
            ordered = [message if last is None else _joined(last, message)]
        elif message["role"] == "system":
            ordered.append({**message, "role": "user"})
        else:
            ordered.append(message)
    if all(message["role"] in ("system", "assistant", "tool") for message in ordered):
        ordered.insert(int(ordered[0]["role"] == "system"), _user(""))
    if not convention.alternates:
        return ordered
    alternating: list[Wire] = []
    for message in ordered:
        if alternating and alternating[-1]["role"] == message["role"]:
            alternating[-1] = _joined(alternating[-1], message)
        else:
            alternating.append(message)
    talk = next(index for index, message in enumerate(alternating) if message["role"] != "system")
    if alternating[talk]["role"] == "assistant":
        alternating.insert(talk, _user(""))
    return alternating


def _in_words(messages: Sequence[Wire], tools: Sequence[Wire]) -> Iterator[Wire]:
    """Tools, calls and results as text, for templates that write none."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    if tools and messages[0]["role"] != "system":
        yield {"role": "system", "content": listed}
    for index, message in enumerate(messages):
        calls = "".join(f"\n{json.dumps(call['function'])}" for call in message.get("tool_calls") or ())
        role = "user" if message["role"] == "tool" else message["role"]
        is_head = tools and index == 0 and role == "system"
        yield {"role": role, "content": message["content"] + calls + (f"\n{listed}" if is_head else "")}


def _joined(first: Wire, second: Wire) -> Wire:
    return {**first, "content": f"{first['content']}\n\n{second['content']}"}


def _user(text: str) -> Wire:
    return {"role": "user", "content": text}
