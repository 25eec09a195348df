"""The ids that a model wrote for its calls are found again in what it wrote, wherever its form has them."""

import json

import pytest

from kvserve.core import CallRow, CallSlot
from kvserve.output.formats import select_format
from kvserve.output.written_ids import written_ids
from tests.prompt.call_forms import DERIVED, SMALL, WITH_IDS

NAMES = ("read_file", "any", "any")
ARGUMENTS = ({"path": '", "id": "none00000"}, [ID]none00000[ARGS]{'}, {}, {"id": "none00001"})


def text_of(row: CallRow, ids: tuple[str, ...]) -> str:
    """Three calls with these ids, as the row has it."""
    leads = [row.opening, row.between or (), row.between or ()]
    text = ""
    for number, (lead, name, arguments) in enumerate(zip(leads, NAMES, ARGUMENTS, strict=True)):
        before = ids[number - 1] if CallSlot.ID in row.closing else ids[number]
        for part in lead:
            text += part if isinstance(part, str) else before
        text += name + "".join(part if isinstance(part, str) else ids[number] for part in row.middle)
        text += json.dumps(arguments)
    return text + "".join(part if isinstance(part, str) else ids[-1] for part in row.closing)


@pytest.mark.parametrize("name", WITH_IDS)
def test_each_call_has_its_own_id(name: str) -> None:
    """Behind prose and thinking, and whatever the arguments say."""
    row = DERIVED[name]
    output_format = select_format("auto", SMALL.get(name, ""), (), None, row)
    ids = ("abcdefghi", "AbCdEf123", "abcdefghi")
    for before in ("", "I call read_file.\n", "<think>\nread_file?\n</think>\n\n"):
        text = before + text_of(row, ids)
        assert written_ids(output_format, text, NAMES, in_reasoning=False) == ids
        assert written_ids(output_format, text, NAMES[:2], in_reasoning=False) == (), "other calls were read"


@pytest.mark.parametrize("name", WITH_IDS)
def test_an_id_that_the_template_refuses_is_none(name: str) -> None:
    """Where it takes nine letters and digits only, the others have theirs all the same."""
    row = DERIVED[name]
    output_format = select_format("auto", SMALL.get(name, ""), (), None, row)
    found = written_ids(output_format, text_of(row, ("abcdefghi", "0", "AbCdEf123")), NAMES, in_reasoning=False)
    assert found == ("abcdefghi", "" if row.has_short_ids else "0", "AbCdEf123")
    assert row.has_short_ids == (name not in SMALL)


def test_an_id_that_is_left_out_is_none() -> None:
    """In a list the ids of the others stay theirs."""
    output_format = select_format("auto", SMALL["list"], (), None, DERIVED["list"])
    text = '[CALLS][{"name": "any", "arguments": {}}, {"name": "any", "arguments": {}, "id": "b"}]'
    assert written_ids(output_format, text, ("any", "any"), in_reasoning=False) == ("", "b")


def test_a_form_without_ids_has_none() -> None:
    output_format = select_format("auto", SMALL["tags"], (), None, DERIVED["tags"])
    text = "<|calls|><|call|>functions.any:0<|args|>{}<|call_end|><|calls_end|>"
    assert written_ids(output_format, text, ("any",), in_reasoning=False) == ()
