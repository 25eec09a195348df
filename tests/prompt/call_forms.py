"""Templates that write calls in forms of their own, small and real ones, for tests of the rows derived from them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from kvserve.app.learned_template import read_calls
from kvserve.core import (
    CallParts,
    CallRow,
    CallSlot,
    JsonObject,
    Message,
    TextBlock,
    ToolCallBlock,
    ToolCallPiece,
    ToolCallStart,
    ToolResultBlock,
    ToolSpec,
)
from kvserve.output.formats import OutputFormat, may_spell_values, own_call_tag
from kvserve.output.splitter import Splitter
from kvserve.output.tool_parsers.derived import form_of
from kvserve.prompt.call_row import NoRow, find_call_row
from kvserve.prompt.call_words import CallWords
from kvserve.prompt.compiled import CompiledTemplate
from kvserve.prompt.told_row import find_told_row
from tests.calls import calls_of
from tests.prompt.vocabularies import SHARED, TEMPLATES

HEAD = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content or '' }}{% if m.tool_calls %}"
)
TAIL = "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
CALLS = "{% for call in m.tool_calls %}{% set c = call.function %}"
SMALL = {
    "tags": f"{HEAD}<|calls|>{CALLS}<|call|>functions.{{{{ c.name }}}}:{{{{ loop.index0 }}}}<|args|>"
    f"{{{{ c.arguments | tojson }}}}<|call_end|>{{% endfor %}}<|calls_end|>{TAIL}",
    "names": f"{HEAD}{CALLS}[CALLS]{{{{ c.name }}}}[ID]{{{{ call.id }}}}[ARGS]{{{{ c.arguments | tojson }}}}"
    f"{{% endfor %}}{TAIL}",
    "list": f'{HEAD}[CALLS][{CALLS}{{"name": "{{{{ c.name }}}}", "arguments": {{{{ c.arguments | tojson }}}}, '
    f'"id": "{{{{ call.id }}}}"}}{{{{ ", " if not loop.last }}}}{{% endfor %}}]{TAIL}',
    "fences": f"{HEAD}<calls>{CALLS}<call>{{{{ c.name }}}}\n```json\n{{{{ c.arguments | tojson }}}}\n```</call>"
    f"{{% endfor %}}</calls>{TAIL}",
    "bare": f"{HEAD}{{% if m.tool_calls | length > 1 %}}{{{{ raise_exception('one') }}}}{{% endif %}}{CALLS}"
    f'{{"name": "{{{{ c.name }}}}", "parameters": {{{{ c.arguments | tojson }}}}}}{{% endfor %}}{TAIL}',
    "attributes": f'{HEAD}{CALLS}<call name="{{{{ c.name }}}}">{{{{ c.arguments | tojson }}}}</call>\n'
    f"{{% endfor %}}{TAIL}",
    "counted": f'{HEAD}<calls>[{CALLS}{{"number": "{{{{ loop.index0 }}}}", "tool": "{{{{ c.name }}}}", "with": '
    f"{{{{ c.arguments | tojson }}}}}}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]</calls>{TAIL}",
}
"""Sources by what they show."""

PAIR = "{% for k, v in c.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
TOLD = "{{ 'text' if v is string else 'json' }}"
PAIRS = {
    "invoked": f'{HEAD}<calls>\n{CALLS}<invoke name="{{{{ c.name }}}}">\n{PAIR}<arg name="{{{{ k }}}}">{VALUE}</arg>\n'
    f"{{% endfor %}}</invoke>\n{{% endfor %}}</calls>{TAIL}",
    "told": f'{HEAD}<|calls|>{CALLS}<|call|>{{{{ c.name }}}}{PAIR}<arg name="{{{{ k }}}}" as="{TOLD}">{VALUE}</arg>'
    f"{{% endfor %}}<|end_call|>{{% endfor %}}<|end_calls|>{TAIL}",
    "own_lines": f"{HEAD}{CALLS}<call>\n<fn={{{{ c.name }}}}>\n{PAIR}<arg={{{{ k }}}}>\n{VALUE}\n</arg>\n"
    f"{{% endfor %}}</fn>\n</call>{{{{ '\n' if not loop.last }}}}{{% endfor %}}{TAIL}",
    "joined": f"{HEAD}{CALLS}[CALL]{{{{ c.name }}}}({PAIR}[KEY]{{{{ k }}}}: {VALUE}[END_VALUE]"
    f"{{{{ ',\n' if not loop.last }}}}{{% endfor %}})[END_CALL]{{% endfor %}}{TAIL}",
    "shown": f"{HEAD}{CALLS}<call>\n<fn={{{{ c.name }}}}>\n{PAIR}<arg={{{{ k }}}}>{{{{ v | string }}}}</arg>\n"
    f"{{% endfor %}}</fn>\n</call>{{{{ '\n' if not loop.last }}}}{{% endfor %}}{TAIL}",
}
"""Those that write arguments as keys and values."""

REAL_PAIRS = {"deepseek_v3_2", "minimax_m2", "seed_oss"}
"""The real templates that do so, of which a row is derived."""

REAL_MARKED = {"gemma4", "lfm2_5_8b"}
"""Those of which one is derived whose strings stand between marks."""

HELD_BY_TOKENS = ("tags", "list", "fences", "bare", "kimi_k2_moonshot")
"""Where a law is asked of every form once, with two of something: these have the first, the others the second."""

BROKEN_IN_EVERY_RUN = ("tags", "list", "bare", "attributes", "mistral_nemo")
"""Forms with and without tags, with one and with several calls between them."""

REAL_ROWS = {
    "apertus", "cohere_r7b", "deepseek_v3_1", "devstral_2507", "kimi_k2_moonshot", "llama3_1", "ministral3_reasoning",
    "mistral_nemo", "mistral_small_3_2", "nemotron_nano_v2",
}  # fmt: skip
"""The real templates of which a row is derived."""

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def source_of(name: str) -> str:
    """The source of a small or a real template."""
    if (small := SMALL.get(name) or PAIRS.get(name)) is not None:
        return small
    assert SHARED is not None
    return (SHARED / "templates" / f"{name}.jinja").read_text("utf-8")


@cache
def found_row(name: str) -> CallRow | NoRow:
    """What is derived from a template that is not read by the forms that are known anyway."""
    source = source_of(name)
    known = own_call_tag(source)
    if known is not None and not may_spell_values(source):
        return NoRow(f"{known} is read anyway")
    found = find_call_row(CompiledTemplate(source, VARIABLES), read_calls)
    if known is not None and isinstance(found, CallRow) and own_call_tag(form_of(found).open_tag) is not None:
        return NoRow(f"{known} is read anyway, with values as they are spelt")
    return found


def told_or_found_row(name: str) -> CallRow | NoRow:
    """The same, or what a template asks for in words and does not write."""
    found = found_row(name)
    told = find_told_row(CompiledTemplate(source_of(name), VARIABLES), read_calls) if isinstance(found, NoRow) else None
    return found if told is None else told


class DerivedRows(Mapping[str, CallRow]):
    """Every row that is derived, by template: named at once, derived when it is asked for, because each worker of a run
    imports every file."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> CallRow:
        row = found_row(name)
        assert isinstance(row, CallRow), f"{name}: {row.reason}"
        return row


DERIVED = DerivedRows([*SMALL, *(name for name in TEMPLATES if name in REAL_ROWS)])
PAIRED = DerivedRows([*PAIRS, *(name for name in TEMPLATES if name in REAL_PAIRS)])
WITH_IDS = [name for name in DERIVED if name in ("names", "list", "mistral_nemo", "mistral_small_3_2")]
"""Those whose calls say their id."""

BARE_ROWS = [name for name in DERIVED if name in ("bare", "llama3_1")]
"""Those whose calls have no tag."""

MISTRALS = [name for name in DERIVED if name in REAL_ROWS and "tral" in name]
"""Those that `[TOOL_CALLS]` opens."""


def conversation(calls: Sequence[tuple[str, JsonObject]]) -> tuple[Message, ...]:
    """A question, these calls, and a result for each."""
    made = tuple(ToolCallBlock(f"call{i}", name, json.dumps(arguments)) for i, (name, arguments) in enumerate(calls))
    results = (Message("tool", (ToolResultBlock(call.call_id, (TextBlock("done"),)),)) for call in made)
    return (Message("user", (TextBlock("hi"),)), Message("assistant", made), *results)


def rendered(source: str, calls: Sequence[tuple[str, JsonObject]]) -> str:
    """The answer that these calls are in a template made of HEAD and TAIL."""
    shown = CompiledTemplate(source, VARIABLES).render(
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                    for i, (name, arguments) in enumerate(calls)
                ],
            },
        ],
        None,
        add_generation_prompt=False,
        arguments={},
    )
    assert isinstance(shown, str)
    return shown.partition("<|turn|>assistant\n")[2].rpartition("<|end|>")[0]


def as_written(text: str, row: CallRow, calls: Sequence[tuple[str, JsonObject]]) -> str:
    """The calls as they stand in a rendered text; raises where they do not stand there in the row's form."""
    if row.pairs is not None:
        made = [ToolCallBlock("", name, json.dumps(arguments)) for name, arguments in calls]
        said = CallWords(row).calls(made)
        assert said in text, f"not {said!r} in {text!r}"
        return said
    leads = [row.opening, *[row.between or ()] * (len(calls) - 1)]
    pattern = "".join(
        f"{_pattern(lead)}{re.escape(name)}{_pattern(row.middle)}{re.escape(json.dumps(arguments, ensure_ascii=False))}"
        for lead, (name, arguments) in zip(leads, calls, strict=True)
    )
    found = re.search(pattern.removeprefix(r"\s*") + _pattern(row.closing), text)
    assert found is not None, f"not in {text!r}"
    return found.group()


def _pattern(parts: CallParts) -> str:
    slots = {CallSlot.ID: r"[A-Za-z0-9]+", CallSlot.NUMBER: r"\d+"}
    return r"\s*" * bool(parts) + "".join(re.escape(p) if isinstance(p, str) else slots[p] for p in parts)


def check_goes_out_as_written(output_format: OutputFormat, text: str) -> None:
    """The text is a call of `read_file` with the path `abcdef` and 3 lines: its name goes out before the path's first
    character, each piece of the path as it comes."""
    splitter = Splitter(output_format, starts_in_reasoning=False, tools=(READ, ANY))
    head, mark, rest = text.partition("abc")
    events = splitter.feed(head + mark)
    assert [type(event) for event in events] == [ToolCallStart, ToolCallPiece]
    assert [event.text for event in events if isinstance(event, ToolCallPiece)] == ['{"path": "abc']
    assert calls_of([*events, *splitter.feed(rest), *splitter.finish(cut=False)])[0].call.arguments == (
        '{"path": "abcdef", "lines": 3}'
    )


READ = ToolSpec(
    "read_file",
    "Reads.",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
        "required": ["path"],
        "additionalProperties": False,
    },
    strict=True,
)
ANY = ToolSpec("any", "Anything.", {"type": "object", "properties": {}})
