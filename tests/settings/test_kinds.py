"""What a setting may be, in one table: it says what pydantic says of the same type and bounds."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from kvserve.config import Settings
from kvserve.settings.kinds import DEFAULTS, KINDS, aliases_in

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
    defaults = {name: row.default for name, row in Settings.model_fields.items()}
    assert {name: defaults[name] for name in DEFAULTS} == DEFAULTS
    read = {name: KINDS[name].read(default) for name, default in defaults.items()}
    folders = {"disk_cache_dir": Path.home() / ".cache/kvserve", "state_dir": Path.home() / ".cache/kvserve/run"}
    assert read == {**defaults, **folders} == {name: KINDS[name].read(value) for name, value in read.items()}


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


@pytest.mark.parametrize("pair", ["x", "=y", "*=y", "a=", " = ", "x=~nosuchuser/m"])
def test_an_alias_has_a_name_and_a_model(pair: str) -> None:
    """Of several pairs each has to; a model in the home of nobody is none."""
    with pytest.raises(ValueError):  # readers say nothing, their kind does
        KINDS["model_aliases"].read(f"a=b,{pair}")
    assert aliases_in(("a = b", "c*=~/m")) == {"a": "b", "c*": "~/m"}


@pytest.mark.parametrize(
    "name",
    ["disk_cache_dir", "state_dir", "log_root", "model_folders", "chat_template", "draft_model", "api_keys_file"],
)
@pytest.mark.parametrize("path", ["~nosuchuser/x", "a\0b"])
def test_a_path_that_can_be_none_is_refused(name: str, path: str) -> None:
    """As a value that cannot be used, and not by whatever stumbles over it."""
    with pytest.raises(ValueError):  # the same
        KINDS[name].read(path)


@pytest.mark.parametrize("name", KINDS)
def test_no_text_does_more_than_be_refused(name: str) -> None:
    """However large or odd: a reader takes it or raises ValueError."""
    for text in ("9" * 400, f"{'9' * 400}GB", "9" * 5000, f"0.{'1' * 400} kib", "1e999", "٣ GB", "\0", "~", "=", ","):
        with contextlib.suppress(ValueError):
            KINDS[name].read(text)


def test_drafts_are_left_to_the_server_or_bounded() -> None:
    """A word in any case or a number of tokens."""
    read = KINDS["speculation"].read
    assert [read(said) for said in ("AUTO", " Off ", "1", "15", 8)] == ["auto", "off", 1, 15, 8]
    for said in ("0", "16", "on", "false", "1.5", "-1"):
        with pytest.raises(ValueError):  # the same
            read(said)
