"""What can be refused before anything slow begins is refused in the same words by the bootstrap and by the start."""

import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.config import Settings, load_launch, setting_key
from kvserve.errors import ModelLoadError, StartupError
from kvserve.first_checks import local_folder, refuse_unusable
from kvserve.flags import settings_in_example
from kvserve.values import KINDS
from tests.laws import num_examples

DEFAULTS = settings_in_example((Path(__file__).resolve().parent.parent / ".env.example").read_text("utf-8"))
FLAGS = ("--demo", "--no-disk-cache", "--no-proxy", "--port=0")
"""With them nothing but values can be refused, of every setting but the port."""
ODD = ("abc", "-1", "0", "99999", "nan", "1.5", "maybe", "AUTO", "*", "8")


def said_of(what: object, *arguments: object, **options: object) -> str:
    try:
        what(*arguments, **options)  # type: ignore[operator]
    except StartupError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module", autouse=True)
def empty_environment() -> object:
    """No setting of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in Settings.model_fields:
            patch.delenv(setting_key(name), raising=False)
        yield


@settings(max_examples=num_examples(40))
@given(st.dictionaries(st.sampled_from(sorted(map(setting_key, KINDS))), st.sampled_from(ODD), max_size=3), st.data())
def test_both_say_the_same_of_values(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, str], data: st.DataObject
) -> None:
    """In `.env` or in the environment; of several that cannot be used they name the same one."""
    in_file = {key: value for key, value in values.items() if data.draw(st.booleans(), key)}
    text = "".join(f"{key}={value}\n" for key, value in in_file.items())
    env_file = tmp_path_factory.getbasetemp() / "values.env"
    env_file.write_text(text, "utf-8")
    environ = {key: value for key, value in values.items() if key not in in_file}
    early = said_of(refuse_unusable, list(FLAGS), environ, text, DEFAULTS)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environ.items():
            patch.setenv(key, value)
        late = said_of(load_launch, list(FLAGS), env_file=env_file)
    assert early == late


@pytest.mark.parametrize(
    "argv", [["--demo", "--model", "x"], ["--port=1", "--proxy-port=1"], ["--prot", "1"], ["--port", "abc"]]
)
def test_both_say_the_same_of_flags(argv: list[str]) -> None:
    """Also of two that contradict each other."""
    assert (said := said_of(load_launch, argv, env_file=None))
    assert said_of(refuse_unusable, argv, {}, "", DEFAULTS) == said


def test_flags_override_the_environment_which_overrides_the_file() -> None:
    """The value that counts is judged, no other; an empty one sets nothing."""
    assert said_of(refuse_unusable, FLAGS, {"kv_bits": "8"}, "KV_BITS=3\n", DEFAULTS) == ""
    assert "KV_BITS='3'" in said_of(refuse_unusable, FLAGS, {"KV_BITS": ""}, "KV_BITS=3\n", DEFAULTS)
    assert said_of(refuse_unusable, FLAGS, {"MLX_PORT": "x"}, "", DEFAULTS) == ""


def test_a_path_that_is_no_folder_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    """An absolute or relative path that does not exist is an error of its own, without any network."""
    for path in (str(tmp_path / "missing"), "./missing", "~/missing", "one/two/three", "name"):
        with pytest.raises(ModelLoadError, match="is not a folder"):
            local_folder(path)
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder("somebody/something") is None


def test_a_proxy_of_a_former_run_is_the_starts_to_judge(tmp_path: Path) -> None:
    """It may be one that the start would end; without its note the port is taken."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        arguments = ["--demo", "--no-disk-cache", "--port=0", f"--proxy-port={port}"], {"STATE_DIR": str(tmp_path)}
        assert f"Port {port} for the LiteLLM proxy is taken by " in said_of(refuse_unusable, *arguments, "", DEFAULTS)
        (tmp_path / f"litellm-{port}").mkdir()
        (tmp_path / f"litellm-{port}" / "process.json").write_text("{}")
        assert said_of(refuse_unusable, *arguments, "", DEFAULTS) == ""
