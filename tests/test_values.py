"""What a setting may be, in one table: it says what pydantic says of the same type and bounds, and reads `.env` as
python-dotenv does where it reads it at all."""

import io
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
from dotenv import dotenv_values
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter, ValidationError

from kvserve.config import Settings
from kvserve.values import KINDS, values_in
from tests.laws import num_examples

SPELLINGS = (
    *(
        "0",
        "1",
        "16",
        "32",
        "64",
        "1024",
        "65535",
        "65536",
        "8193",
        "10",
        "1.0",
        "10.",
        "2.5",
        "-1",
        "+5",
        " 7 ",
        "1_000",
    ),
    *(
        "nan",
        "inf",
        "-inf",
        "1e3",
        "0x10",
        "1,5",
        "abc",
        "1.0.0",
        "true",
        "FALSE",
        "on",
        "Off",
        "yes",
        "N",
        "t",
        "tru",
        " true",
    ),
    *("auto", "uniform", "turboquant", "glm4", "GLM4", "", "１６"),
)
BOUNDED: dict[str, Any] = {
    "mlx_port": Annotated[int, Field(ge=0, le=65535)],
    "proxy_port": Annotated[int, Field(ge=1, le=65535)],
    "max_kv_size": Annotated[int, Field(ge=1)],
    "prefill_step_size": Annotated[int, Field(ge=16, le=8192)],
    "quantized_kv_start": Annotated[int, Field(ge=0)],
    "eviction_interval_seconds": Annotated[float, Field(ge=60, allow_inf_nan=False)],
    "proxy_startup_wait_seconds": Annotated[float, Field(ge=0, allow_inf_nan=False)],
    "image_fetch_seconds": Annotated[float, Field(gt=0, allow_inf_nan=False)],
    "disk_cache_ttl_hours": Annotated[float, Field(gt=0)],
    "default_top_p": Annotated[float, Field(gt=0, le=1)],
    "warm_max_time_share": Annotated[float, Field(ge=0, le=1)],
    "default_temperature": Annotated[float, Field(ge=0, le=2)],
    "default_thinking": bool,
    "model_family": Settings.model_fields["model_family"].annotation,
    "kv_quant_scheme": Settings.model_fields["kv_quant_scheme"].annotation,
}


def test_every_setting_has_its_kind() -> None:
    """In the order of the settings, so that of several faults the same one is named first; each default is one that may
    be, and is read as it is."""
    assert list(KINDS) == list(Settings.model_fields)
    assert {name: KINDS[name].read(row.default) for name, row in Settings.model_fields.items()} == {
        name: row.default for name, row in Settings.model_fields.items()
    }


@pytest.mark.parametrize("name", BOUNDED)
def test_values_are_read_as_pydantic_reads_them(name: str) -> None:
    """Every spelling of a number or a switch is taken or refused alike."""
    adapter = TypeAdapter(BOUNDED[name])
    for spelling in SPELLINGS:
        try:
            theirs: object = adapter.validate_python(spelling)
        except ValidationError:
            theirs = None
        try:
            ours = KINDS[name].read(spelling)
        except ValueError:
            ours = None
        assert ours == theirs, spelling


NAMES = st.sampled_from(("MLX_PORT", "kv_bits", "A", "B1"))
TEXTS = st.text(st.sampled_from("ab1 #'\"\\$={}\t"), max_size=8)
LINES = st.builds(
    "{}{}{}{}".format, st.sampled_from(("", "export ", "  ", "# ")), NAMES, st.sampled_from(("=", " = ")), TEXTS
)


@settings(max_examples=num_examples(200))
@given(st.lists(LINES, max_size=4))
@example(["A='x # y' # z", 'B1="1"', "MLX_PORT=8080 # mine", "kv_bits=a#b"])
@example(["A=1", "A=$B1"])
def test_what_is_read_of_a_file_python_dotenv_reads_too(lines: list[str]) -> None:
    """Less than that is allowed, something else is not: of a line that only it can read nothing is said."""
    text = "\n".join(lines)
    theirs = dotenv_values(stream=io.StringIO(text), interpolate=True)
    ours = values_in(text)
    assert {name: theirs.get(name) for name in ours} == ours


def test_plain_lines_are_read() -> None:
    """All that most files have; the example's own lines, put into force, too."""
    assert values_in("A=1\n export B = 'x y' # z\r\nC=a # b\n\n# D=1\nE=\nF=$A\nA=2\n") == {
        "A": "2",
        "B": "x y",
        "C": "a",
        "E": "",
    }
    example_text = (Path(__file__).resolve().parent.parent / ".env.example").read_text("utf-8")
    put_in_force = re.sub("^#([A-Z][A-Z0-9_]*=)", r"\1", example_text, flags=re.MULTILINE)
    assert set(values_in(put_in_force)) == {name.upper() for name in KINDS}
