"""What can be refused before anything slow begins is refused in the same words by the bootstrap and by the start, and
nothing that a start would take."""

import errno
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvserve.canonical.rules import RULES
from kvserve.config import Launch, Settings, load_launch, setting_key
from kvserve.errors import ModelLoadError, StartupError
from kvserve.settings.kinds import DEFAULTS, KINDS
from kvserve.settings.rule_policies import SETTABLE
from kvserve.settings.start_checks import (
    DEMO_NAMES,
    known_settings,
    local_folder,
    refuse_unusable,
    refuse_unusable_folder,
    refuse_unusable_start,
)
from tests.laws import num_examples
from tests.ports import free_port

FLAGS = ("--demo=tiny", "--no-disk-cache", "--no-proxy", "--port=0")
"""With them nothing but values can be refused, of every setting but the port."""
ODD = ("abc", "-1", "0", "99999", "nan", "1.5", "maybe", "AUTO", "*", "8", "~nosuchuser/x", "a=b", "")


@pytest.fixture(scope="module", autouse=True)
def empty_environment() -> Iterator[None]:
    """No setting of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in Settings.model_fields:
            patch.delenv(setting_key(name), raising=False)
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder; what is kept is kept below it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def usable(folder: Path, **settings: str) -> dict[str, str]:
    """An environment with which nothing is refused, and what a test puts in its place."""
    base = {"MODEL_PATH": "a/b", "MLX_PORT": "0", "PROXY_PORT": str(free_port())}
    return {**base, "DISK_CACHE_DIR": str(folder / "kv"), "STATE_DIR": str(folder / "state"), **settings}


def early(argv: Sequence[str], environ: Mapping[str, str], text: str = "") -> str:
    """What is said before the installation, in the working folder."""
    Path(".env").write_text(text, "utf-8")
    try:
        refuse_unusable(argv, environ, Path(".env"))
    except StartupError as error:
        return str(error)
    return ""


def launched(argv: Sequence[str], environ: Mapping[str, str], text: str = "") -> tuple[Launch | None, str]:
    """What the start reads of the same, and what it says at once."""
    Path(".env").write_text(text, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environ.items():
            patch.setenv(key, value)
        try:
            launch = load_launch(argv)
        except StartupError as error:
            return None, str(error)
    try:
        refuse_unusable_start(
            dict(launch.settings),
            demo=launch.demo,
            with_proxy=launch.with_proxy,
            writes_kv=launch.disk_cache != "off",
        )
    except StartupError as error:
        return launch, str(error)
    return launch, ""


def late(argv: Sequence[str], environ: Mapping[str, str], text: str = "") -> str:
    return launched(argv, environ, text)[1]


# --- values -----------------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(sorted(map(setting_key, KINDS)))


@settings(max_examples=num_examples(20))
@given(st.dictionaries(KEYS, st.sampled_from(ODD), max_size=3), st.data())
def test_both_say_the_same_of_values(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, str], data: st.DataObject
) -> None:
    """In `.env` or in the environment; of several that cannot be used they name the same one."""
    in_file = {key: value for key, value in values.items() if data.draw(st.booleans(), key)}
    environ = {key: value for key, value in values.items() if key not in in_file}
    text = "".join(f"{key}={value}\n" for key, value in in_file.items())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.getbasetemp())
        assert early(FLAGS, environ, text) == late(FLAGS, environ, text)


NAMES = st.sampled_from(("MLX_PORT", "mlx_port", "MODEL_PATH", "KV_BITS", "Kv_bits", "OTHER"))
WRITTEN = st.sampled_from(
    ("=1", "=2", "=", "='8'", '="4"', "=${OTHER}", "", ' = "\\t"', " # none", "= # none", "='8\n8'")
)
LINES = st.builds("{}{}{}\n".format, st.sampled_from(("", "export ", "\ufeff", "x ")), NAMES, WRITTEN)


@settings(max_examples=num_examples(12))
@given(st.lists(LINES, max_size=4).map("".join), st.sampled_from(({}, {"MLX_PORT": "3"}, {"kv_bits": ""})))
@example("MLX_PORT=1\nmlx_port=2\nMLX_PORT=3\n", {})
@example("OTHER=8\nKV_BITS=${OTHER}\n", {})
@example("KV_BITS='8\n8'\n", {"MLX_PORT": "3"})
@example('MLX_PORT = "\\t"\nKV_BITS=1\n', {})
@example("KV_BITS=1\n\ufeffMLX_PORT=1\n", {})
@example("MLX_PROT=${OTHER}\nKV_BITS=1\nkv_bitz=2\nKV_BITZ\n", {})
def test_what_is_known_of_a_file_is_what_the_start_reads(
    tmp_path_factory: pytest.TempPathFactory, text: str, environ: dict[str, str]
) -> None:
    """Whatever its lines are: a value is the start's own or it is not known, and of what the start takes nothing is
    refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.getbasetemp())
        launch, said = launched(FLAGS[:3], environ, text)
        if launch is None:
            assert early(FLAGS, environ, text) in ("", said, launched(FLAGS, environ, text)[1])
            return
        known = known_settings({}, environ, text)
    assert {name: getattr(launch.settings, name) for name in known} == known


@pytest.mark.parametrize(
    "text",
    [
        *("ZERO=0\nMLX_PORT=${ZERO}\n", 'MLX_PORT=0\nAPI_KEY="a\\"b"\n', "MLX_PORT=0\nFOO\n"),
        *("\ufeffMLX_PORT=0\n", "MLX_PORT=0\nsource x.sh\n", "MLX_PORT=TAKEN\nmlx_port=0\nMLX_PORT=TAKEN\n"),
        *("API_KEY='a\nb'\nMLX_PORT=0\n", 'MLX_PORT="0\\\n"\n'),
    ],
)
def test_a_port_that_the_file_does_not_plainly_say_is_not_judged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The default port is taken; the start reads another one. The control: a file that says nothing is judged by it."""
    environ = usable(folder)
    del environ["MLX_PORT"]
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        monkeypatch.setitem(DEFAULTS, "mlx_port", port)
        assert early(["--no-proxy"], environ, text.replace("TAKEN", str(port))) == ""
        assert f"Port {port} on 127.0.0.1 is taken" in early(["--no-proxy"], environ, "# MLX_PORT=0\n")


@pytest.mark.parametrize("key", ["DISK_CACHE_DIR", "PROXY_PORT", "MODEL_PATH", "STATE_DIR", "MODEL_FOLDERS"])
def test_what_is_not_known_skips_its_check(folder: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Of each setting that is looked behind: its default is unusable, and judged only where the file says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        unusable = holder.getsockname()[1] if key == "PROXY_PORT" else ("/proc/x",) if "FOLDERS" in key else "/proc/x"
        monkeypatch.setitem(DEFAULTS, key.lower(), unusable)
        environ = usable(folder)
        environ.pop(key, None)
        assert early([], environ, f"{key}=${{ELSEWHERE}}\n") == ""
        assert key in early([], environ)


def test_a_pipe_is_not_judged_and_a_file_that_cannot_be_read_is_refused(folder: Path) -> None:
    """Its text comes once, and the server reads it; the other one stops every start, in these words."""
    Path(".env").write_bytes(b"API_KEY=\xe9\n")
    said = []
    for start in (lambda: refuse_unusable(FLAGS, {}, Path(".env")), lambda: load_launch(FLAGS)):
        with pytest.raises(StartupError, match=r"^\.env cannot be read: 'utf-8' codec") as raised:
            start()
        said.append(str(raised.value))
    assert said[0] == said[1]
    assert known_settings({}, {"KV_BITS": "8"}, None) == {"kv_bits": 8}


@pytest.mark.parametrize(
    "argv",
    [["--demo", "--model", "x"], ["--port=1", "--proxy-port=1"], ["--prot", "1"], ["--port", "abc"], ["--port="]],
)
def test_both_say_the_same_of_flags(folder: Path, argv: list[str]) -> None:
    """Also of two that contradict each other."""
    assert (said := late(argv, {}))
    assert early(argv, {}) == said


def test_flags_override_the_environment_which_overrides_the_file(folder: Path) -> None:
    """The value that counts is judged, no other; an empty one sets nothing."""
    assert early(FLAGS, {"kv_bits": "8"}, "KV_BITS=3\n") == ""
    assert "KV_BITS='3'" in early(FLAGS, {"KV_BITS": ""}, "KV_BITS=3\n")
    assert early(FLAGS, {"MLX_PORT": "x"}) == ""


# --- what leads nowhere -----------------------------------------------------------------------------------------------

NOWHERE = [
    ("DISK_CACHE_DIR", "~nosuchuser/x", "a home folder that is known"),
    ("DISK_CACHE_DIR", "/proc/x", "--no-disk-cache"),
    ("DISK_CACHE_DIR", "/dev/null", "a folder that can be written to"),
    ("DISK_CACHE_DIR", "/tmp/" + "x" * 300, "a folder that can be written to"),
    ("STATE_DIR", "/proc/x", "--no-proxy"),
    ("MODEL_PATH", "~nosuchuser/m", "Give a local folder"),
    ("MODEL_PATH", "/" + "x" * 300, "Give a local folder"),
    ("MODEL_PATH", "models/my model", "or a hub name such as"),
    ("MODEL_PATH", "org/name/", "A hub name has no / at its end: MODEL_PATH=org/name."),
    ("MODEL_PATH", "/usr", "it has no config.json. Give a local folder"),
    ("CHAT_TEMPLATE", "/nope/x.jinja", "a file that is there"),
    ("CHAT_TEMPLATE", "/usr", "a file that is there"),
    ("CHAT_TEMPLATE", sys.executable, "it is no text in UTF-8"),
    ("CHAT_TEMPLATE", "~nosuchuser/x", "a home folder that is known"),
    ("API_KEYS_FILE", "/etc/hostname", "API_KEY to be set beside it: the operator's key on both ports"),
    ("API_KEYS_FILE", "~nosuchuser/x", "a home folder that is known"),
    ("MODEL_ALIASES", "x", "name=model pairs, by comma"),
    ("MODEL_ALIASES", "a=b,x=~nosuchuser/m", "a home folder that is known"),
    ("MODEL_FOLDERS", "/nope", "folders that are there"),
    ("MODEL_FOLDERS", "~nosuchuser/m", "a home folder that is known"),
    ("CACHE_RULE_POLICIES", "nope=never", "one of the rules cch, "),
    ("CACHE_RULE_POLICIES", "cch", "rule=policy pairs, by comma"),
    ("CACHE_RULE_POLICIES", "cch=maybe", "one of the policies always, history, never, off"),
    ("CACHE_RULE_POLICIES", "call_ids=never", "one of the policies off"),
    ("MLX_HOST", "192.0.2.1", "an address that can be listened on"),
    ("MLX_HOST", "a..b", "an address that can be listened on"),
    ("MLX_HOST", "é..b", "an address that can be listened on"),
    ("MLX_HOST", "::zz", "an address that can be listened on"),
]


@pytest.mark.parametrize(("key", "value", "advice"), NOWHERE, ids=lambda text: str(text)[:20])
def test_what_leads_nowhere_is_refused_in_one_line(folder: Path, key: str, value: str, advice: str) -> None:
    """With the setting, its value and what to do; by the start in the same words; nothing is made for it."""
    environ = usable(folder, **{key: value})
    said = early([], environ)
    assert said.startswith(key) and value.split(",")[-1].split("=")[0] in said and advice in said, said
    assert "\n" not in said and said == late([], environ)
    assert sorted(path.name for path in folder.iterdir()) == [".env"]


def test_a_file_of_keys_needs_a_key_of_the_operators(folder: Path) -> None:
    """Beside it the file is taken, if it is there; both say the same."""
    file = folder / "keys.toml"
    environ = usable(folder, API_KEYS_FILE=str(file), API_KEY="k")
    said = early([], environ)
    assert said == late([], environ) and "a file that is there; `kvserve keys new NAME`" in said
    file.write_text("", "utf-8")
    assert early([], environ) == late([], environ) == ""
    assert "API_KEY to be set beside it" in early([], {**environ, "API_KEY": ""})


def test_who_has_no_home_is_told_which_folder_to_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is in no list: the default lies below a home."""

    def expanduser(self: Path) -> Path:
        if self.parts[:1] == ("~",):
            raise RuntimeError("Could not determine home directory.")
        return self

    monkeypatch.setattr(Path, "expanduser", expanduser)
    assert (said := early(FLAGS, {})).startswith("DISK_CACHE_DIR='~/.cache/kvserve' cannot be used")
    assert late(FLAGS, {}) == said
    assert early([], usable(folder)) == ""


def test_what_leads_somewhere_is_taken(folder: Path) -> None:
    """The control: of each of these settings a value that can be used, of which nothing is made yet."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    environ = usable(
        folder,
        MODEL_PATH=str(model),
        CHAT_TEMPLATE=str(model / "config.json"),
        MODEL_ALIASES="x=y,claude-*=default,z=~/m",
        MODEL_FOLDERS=str(folder),
        CACHE_RULE_POLICIES="cch=off, thinking=history",
        MLX_HOST="0.0.0.0",
        DISK_CACHE_DIR=str(folder / "a" / "b"),
        STATE_DIR="here/state",
    )
    assert early([], environ) == late([], environ) == ""
    assert sorted(path.name for path in folder.iterdir()) == [".env", "model"]


def test_a_name_server_that_gives_no_answer_now_may_give_one_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that there is not is refused."""
    environ = usable(folder, MLX_HOST="nas")
    for number, is_refused in ((socket.EAI_NONAME, True), (socket.EAI_AGAIN, False)):

        class Unresolved(socket.socket):
            def bind(self, address: object, number: int = number) -> None:
                raise socket.gaierror(number, "no name")

        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", Unresolved)
            patch.setattr(socket, "create_connection", lambda *_, **__: socket.socket().bind(("", 0)))
            said = early(["--no-proxy"], environ)
        assert ("MLX_HOST='nas' cannot be used" in said) == is_refused, said


@pytest.mark.parametrize(
    ("argv", "key"), [(["--port=80", "--no-proxy"], "MLX_PORT"), (["--proxy-port=80"], "PROXY_PORT")]
)
def test_a_port_that_only_root_may_have_is_tried(
    folder: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], key: str
) -> None:
    """By the one who starts it: whoever may have it gets it."""

    class Privileged(socket.socket):
        def bind(self, address: tuple[str, int]) -> None:
            if address[1] == 80:
                raise PermissionError(errno.EACCES, "Permission denied")
            super().bind(address)

    environ = {name: value for name, value in usable(folder).items() if name != key}
    monkeypatch.setattr(socket, "socket", Privileged)
    assert f"{key}=80 cannot be used" in (said := early(argv, environ)) and "Permission denied" in said
    assert late(argv, environ) == said


def test_state_that_cannot_be_written_is_refused_to_those_who_write_it(folder: Path) -> None:
    """LiteLLM and the demo model; a server of another model answers without, and so does one whose demo is built."""
    (folder / "file").write_text("")
    environ = usable(folder, STATE_DIR=str(folder / "file"))
    assert "for the demo model" in (said := early(["--demo", "--no-proxy"], environ)) and "STATE_DIR" in said
    assert late(["--demo", "--no-proxy"], environ) == said
    assert early(["--no-proxy"], environ) == ""
    (folder / "state").mkdir()
    (folder / "state" / DEMO_NAMES["smollm2"]).symlink_to(folder)
    assert early(["--demo", "--no-proxy"], usable(folder)) == ""
    assert early(["--demo", "tiny", "--no-proxy"], usable(folder)) == ""


def test_to_remove_the_demo_needs_nothing_that_a_server_needs(folder: Path) -> None:
    """No port, no model; a server may run meanwhile. It is asked for alone."""
    (folder / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = usable(folder, MLX_PORT=str(holder.getsockname()[1]), STATE_DIR=str(folder / "file"), MODEL_PATH="./x")
        assert early(["--demo-remove"], taken) == ""
    for argv in (["--demo", "--demo-remove"], ["--demo", "large"]):
        assert early(argv, usable(folder)) == late(argv, usable(folder)) != ""


def test_traces_that_cannot_be_written_stop_no_start(folder: Path) -> None:
    """The server says so and goes on."""
    assert early([], usable(folder, LOG_ROOT="/proc/x")) == ""


def test_a_start_that_is_refused_leaves_no_folder(folder: Path) -> None:
    """Whichever check comes first, and also where nothing is refused."""
    assert early([], usable(folder, MODEL_PATH="./absent")) and early([], usable(folder)) == ""
    assert [path.name for path in folder.iterdir()] == [".env"]
    (folder / "kv").mkdir()
    assert early([], usable(folder)) == "" and (folder / "kv").is_dir()


def test_a_folder_that_another_start_makes_meanwhile_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers on one new folder: neither takes away what the other is about to write in."""
    real = tempfile.TemporaryFile

    def write_beside_another(dir: Path) -> IO[bytes]:
        (folder / "a" / "b").mkdir(parents=True, exist_ok=True)
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", write_beside_another)
    refuse_unusable_folder(folder / "a" / "b")
    assert (folder / "a" / "b").is_dir()


# --- the model --------------------------------------------------------------------------------------------------------


def test_a_path_that_is_no_folder_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    """An absolute or relative path that does not exist is an error of its own, without any network."""
    for path in (str(tmp_path / "missing"), "./missing", "~/missing", "one/two/three", "name"):
        with pytest.raises(ModelLoadError, match="is not a folder"):
            local_folder(path)
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder("somebody/something") is None


@settings(max_examples=num_examples(100))
@given(st.builds("{}/{}".format, *[st.text(st.sampled_from("aé1_.- g~@"), max_size=6)] * 2))
@example("a/b.git")
@example("a/b.")
@example("a" * 96 + "/b")
@example("a" * 97 + "/b")
@example("a/b--c")
def test_a_name_is_refused_where_the_hub_refuses_it(name: str) -> None:
    """Neither more names nor fewer."""
    try:
        validate_repo_id(name)
        is_name = True
    except HFValidationError:
        is_name = False
    try:
        is_taken = local_folder(name) is None
    except ModelLoadError:
        is_taken = False
    assert is_taken == is_name


# --- others -----------------------------------------------------------------------------------------------------------


def test_the_rules_that_can_be_set_are_those_of_the_table() -> None:
    """In its order, but for those that the readers of the protocols carry out; each may have its own policy or has a
    fixed one."""
    rows = [rule for rule in RULES if rule.scope != "wire"]
    assert list(SETTABLE) == [rule.name for rule in rows]
    assert all(SETTABLE[rule.name] == ("off",) or rule.policy in SETTABLE[rule.name] for rule in rows)


def test_a_proxy_of_a_former_run_is_the_starts_to_judge(folder: Path) -> None:
    """It may be one that the start would end; without its note the port is taken."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        argv, environ = ["--demo", "--no-disk-cache", f"--proxy-port={port}"], usable(folder)
        assert f"Port {port} for the LiteLLM proxy is taken by " in early(argv, environ)
        (folder / "state" / f"litellm-{port}").mkdir(parents=True)
        (folder / "state" / f"litellm-{port}" / "process.json").write_text("{}")
        assert early(argv, environ) == ""
