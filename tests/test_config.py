"""Settings: where they come from, and that a wrong one stops the start with key, value and what was expected."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.config import Settings, load_launch, setting_key
from kvserve.errors import SettingError, StartupError
from kvserve.settings.flags import misspelt
from tests.laws import num_examples


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine, no `.env` of the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(setting_key(name), raising=False)


def test_flags_override_the_environment_which_overrides_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same setting from three places: the flag wins, then the environment, then `.env`."""
    (tmp_path / ".env").write_text("MLX_PORT=1001\nPROXY_PORT=2001\nMODEL_PATH=/from/file\nUNRELATED=1\n")
    monkeypatch.setenv("MLX_PORT", "1002")
    monkeypatch.setenv("PROXY_PORT", "2002")
    settings = load_launch(["--port", "1003"]).settings
    assert (settings.mlx_port, settings.proxy_port, settings.model_path) == (1003, 2002, "/from/file")


def test_both_servers_cannot_have_one_port() -> None:
    """The clash is named before anything is started; without the proxy there is none."""
    with pytest.raises(SettingError, match="another port than MLX_PORT"):
        load_launch(["--port", "5000", "--proxy-port", "5000"])
    load_launch(["--port", "5000", "--proxy-port", "5000", "--no-proxy"])


def test_every_flag_is_accepted() -> None:
    """All flags that users were promised parse, and the cache flags exclude each other."""
    launch = load_launch(["--demo", "--port", "1", "--proxy-port", "2", "--no-proxy", "--ephemeral-cache"])
    assert (launch.demo, launch.with_proxy, launch.disk_cache) == ("smollm2", False, "ephemeral")
    assert (load_launch(["--demo", "tiny"]).demo, load_launch([]).demo) == ("tiny", None)
    assert load_launch(["--demo-remove"]).removes_demo and not launch.removes_demo
    assert load_launch(["--no-disk-cache"]).disk_cache == "off"
    launch = load_launch(["--disk-cache", "/somewhere", "--model", "a/b", "--chat-template", "c.jinja"])
    settings = launch.settings
    assert (launch.disk_cache, settings.disk_cache_dir, settings.model_path, settings.chat_template) == (
        "on",
        Path("/somewhere"),
        "a/b",
        Path("c.jinja"),
    )
    with pytest.raises(StartupError, match="not allowed with"):
        load_launch(["--no-disk-cache", "--ephemeral-cache"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--prot", "1"], "There is no flag --prot (did you mean --port?)."),
        (["--no-proxie"], "did you mean --no-proxy?"),
        (["--ephemeral_cache"], "did you mean --ephemeral-cache?"),
        (["--completely-else"], "There is no flag --completely-else; --help names every flag."),
        (["--port"], "Argument --port: expected one argument"),
        (["--port", "abc"], "--port='abc' cannot be used: expected a port, a whole number from 0 to 65535"),
        (["--proxy-port=0"], "--proxy-port='0' cannot be used: expected a port, a whole number from 1 to 65535"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named_as_it_was_written(argv: list[str], said: str) -> None:
    """In words of ours, with the flag that was meant, and not under the setting that it stands for."""
    with pytest.raises(StartupError) as raised:
        load_launch(argv)
    assert said in str(raised.value)


def test_a_misspelt_setting_in_the_file_stops_the_start(tmp_path: Path) -> None:
    """With the setting that was meant; what other programs have there is left alone."""
    (tmp_path / ".env").write_text("OPENAI_API_KEY=1\nAPP_KEY=2\nexport MLX_PROT = 8081\n# KV_BITZ=4\nkv_bits=8\n")
    with pytest.raises(StartupError, match=r"\.env sets what is no setting: MLX_PROT \(did you mean MLX_PORT\?\)\.$"):
        load_launch([])
    (tmp_path / ".env").write_text("OPENAI_API_KEY=1\nAPP_KEY=2\nkv_bits=8\nMODEL_NAME=x\nPORT=1\n")
    assert load_launch([]).settings.kv_bits == 8


def test_a_name_is_a_setting_where_it_is_read_as_one(tmp_path: Path) -> None:
    """Names are compared in lower case: of these capitals alone would be KV_BITS, and the value was lost unsaid."""
    (tmp_path / ".env").write_text("kv_b\u0131ts=8\n", "utf-8")
    with pytest.raises(StartupError, match=r"kv_b\u0131ts \(did you mean KV_BITS\?\)"):
        load_launch([])
    (tmp_path / ".env").write_text("\u212av_bits=8\n", "utf-8")
    assert load_launch([]).settings.kv_bits == 8


def test_what_cannot_be_seen_in_a_misspelt_name_is_shown(tmp_path: Path) -> None:
    """A byte order mark inside a file, as two files joined leave it, or a space without width: else the name that is
    told looks like the one that was meant."""
    (tmp_path / ".env").write_text("KV_BITS=8\n\ufeffMLX_PORT=1\nPROXY\u200b_PORT=2\nMAX_KV_SÏZE=9\n", "utf-8")
    with pytest.raises(StartupError) as raised:
        load_launch([])
    assert str(raised.value) == (
        r".env sets what is no setting: '\ufeffMLX_PORT' (did you mean MLX_PORT?), "
        r"'PROXY\u200b_PORT' (did you mean PROXY_PORT?), MAX_KV_SÏZE (did you mean MAX_KV_SIZE?)."
    )


def test_only_what_the_file_sets_can_be_misspelt(tmp_path: Path) -> None:
    """A line within a text of several lines is none of the file's names, a name alone sets nothing, and a pipe is left
    to the settings, which read it once."""
    (tmp_path / ".env").write_text("NOTES='first\nMLX_PROT=1\n'\nKV_BITZ\n")
    assert load_launch([]).settings.mlx_port == load_launch([], env_file=None).settings.mlx_port
    (tmp_path / ".env").write_text("NOTES='first\nsecond'\nMLX_PROT=1\n")
    with pytest.raises(StartupError, match=r"MLX_PROT \(did you mean MLX_PORT\?\)"):
        load_launch([])


def test_a_misspelt_setting_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is everybody's: the start goes on."""
    assert load_launch([]).warnings == ()
    monkeypatch.setenv("MAX_KV_SIZES", "1")
    assert load_launch([]).warnings == (
        "The environment sets what is no setting: MAX_KV_SIZES (did you mean MAX_KV_SIZE?).",
    )


@given(st.sampled_from(sorted(map(setting_key, Settings.model_fields))), st.data())
@settings(max_examples=num_examples(40))
def test_a_slip_of_the_hand_is_recognised(key: str, data: st.DataObject) -> None:
    """A letter left out, doubled, or swapped with its neighbour: the setting is the nearest of all."""
    at = data.draw(st.integers(0, len(key) - 2))
    slips = {
        "left out": key[:at] + key[at + 1 :],
        "doubled": key[: at + 1] + key[at:],
        "swapped": key[:at] + key[at + 1] + key[at] + key[at + 2 :],
    }
    known = [setting_key(name) for name in Settings.model_fields]
    for slip in slips.values():
        assert misspelt([slip], known) == ([(slip, key)] if slip not in known else [])
    assert misspelt(known, known) == []


def test_the_demo_takes_no_model() -> None:
    """--demo and --model contradict each other."""
    with pytest.raises(SettingError, match="--model"):
        load_launch(["--demo", "--model", "x"])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("KV_BITS", "3", "OFF, 4 or 8"),
        ("KV_GROUP_SIZE", "48", "32, 64 or 128"),
        ("MLX_PORT", "70000", "a whole number from 0 to 65535"),
        ("PROXY_PORT", "abc", "a whole number from 1 to 65535"),
        ("MAX_KV_SIZE", "0", "greater than or equal to 1"),
        ("PROMPT_CACHE_BLOCK_SIZE", "0", "greater than or equal to 1"),
        ("PROMPT_CACHE_MAX_BYTES", "0", "positive size"),
        ("PROMPT_CACHE_MAX_BYTES", "many", "positive size"),
        ("DEFAULT_THINKING", "maybe", "boolean"),
        ("DEFAULT_TEMPERATURE", "-1", "greater than or equal to 0"),
        ("DEFAULT_TOP_P", "1.5", "less than or equal to 1"),
        ("GENERATION_WATCHDOG_SECONDS", "nan", "finite"),
        ("MODEL_FAMILY", "llama", "'auto', 'qwen3', 'glm4' or 'generic'"),
        ("MAX_QUEUED_REQUESTS", "-1", "greater than or equal to 0"),
        ("IMAGE_HOSTS", "127.0.0.1", "host names by comma"),
        ("IMAGE_HOSTS", "[::1]:443", "host names by comma"),
        ("IMAGE_HOSTS", "*.example.com", "host names by comma"),
        ("IMAGE_HOSTS", "https://example.com", "host names by comma"),
        ("IMAGE_FETCH_SECONDS", "0", "greater than 0"),
    ],
)
def test_a_wrong_value_names_key_value_and_expectation(
    monkeypatch: pytest.MonkeyPatch, key: str, value: str, expected: str
) -> None:
    """Whoever set it reads what to mend."""
    monkeypatch.setenv(key, value)
    with pytest.raises(SettingError) as raised:
        load_launch([])
    assert raised.value.key == key
    assert key in str(raised.value)
    assert value.lstrip("-") in str(raised.value)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("written", "size"),
    [("1000", 1000), ("4GB", 4 * 10**9), ("1.5 GiB", 3 * 2**29), ("64mib", 64 * 2**20), ("AUTO", None)],
)
def test_sizes_have_units(monkeypatch: pytest.MonkeyPatch, written: str, size: int | None) -> None:
    """Bytes, decimal and binary units, AUTO where the machine decides."""
    monkeypatch.setenv("MAX_BATCH_BYTES", written)
    assert load_launch([]).settings.max_batch_bytes == size


def test_hosts_of_pictures_are_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """In lower case, with a port where it is not that of https."""
    monkeypatch.setenv("IMAGE_HOSTS", "Images.Example.com:443, cdn.example.com:8443,nas")
    assert load_launch([]).settings.image_hosts == ("images.example.com", "cdn.example.com:8443", "nas")


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """`API_KEY=` in a file means no key, not an empty one."""
    monkeypatch.setenv("API_KEY", "")
    assert load_launch([]).settings.api_key is None


def test_the_listed_model_follows_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """PROXY_MODEL_ID is a pattern."""
    monkeypatch.setenv("MODEL_PATH", "/models/mine")
    assert load_launch([]).settings.listed_model_id == "openai//models/mine"
    monkeypatch.setenv("PROXY_MODEL_ID", "openai/house")
    assert load_launch([]).settings.listed_model_id == "openai/house"


def test_one_of_several_ranks_drafts_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks cannot do together is off whatever was set, and a person is told; alone nothing changes."""
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["10.0.0.1:5000"], ["10.0.0.2:5000"]]', "utf-8")
    monkeypatch.setenv("SPECULATION", "4")
    assert load_launch([], env_file=None).settings.speculation == 4
    monkeypatch.setenv("MLX_HOSTFILE", str(hosts))
    monkeypatch.setenv("MLX_RANK", "1")
    launch = load_launch([], env_file=None)
    assert launch.ranks is not None
    assert (launch.ranks.rank, launch.ranks.size) == (1, 2)
    assert (launch.settings.speculation, launch.settings.warm_next_turn, launch.settings.prewarm_prefixes) == (
        "off",
        False,
        0,
    )
    assert any("rank 1 of 2" in line and "SPECULATION" in line for line in launch.warnings)
