"""The script that looks at kept KV, on folders that a real engine has written, and against stock mlx-lm."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load_model

from kvserve.cache.disk_blob import BlobHead, BlobName, pack_blob, parent_of_first, unpack_blob
from kvserve.cache.disk_store import FolderStore
from kvserve.cache.token_run import TokenRun, pack
from kvserve.core import TokenSequence
from kvserve.engine.engine_settings import DiskSettings
from tests.engine.engines import assert_exact, cached, cold, generate, prompt_of, running_engine, turn
from tests.engine.test_disk_cache import usable
from tests.engine.test_windows import NEW_TOKENS, converse
from tests.laws import THREE_KINDS, TWO_KINDS, sampled, sampled_cells
from tests.models import tiny_model
from tests.scripts.conftest import run_script, start_script
from tests.serving import AppUnderTest

FAMILIES = sampled((*THREE_KINDS, "glm4_moe_lite", "gpt_oss"), TWO_KINDS)
PROMPT = prompt_of(300)
NUM_ANSWER_TOKENS = 16


def on(folder: Path) -> DiskSettings:
    return DiskSettings(folder, None, 0, 24)


def written(family: str, folder: Path) -> tuple[int, ...]:
    """Let an engine keep the prompt on disk; its answer."""
    with running_engine(family, disk=on(folder)) as engine:
        [result] = generate(engine, turn(PROMPT, NUM_ANSWER_TOKENS))
    return result.tokens


def greedy(module: Any, caches: list[Any], tokens: list[int]) -> tuple[int, ...]:
    """What stock caches lead to."""
    answer: list[int] = []
    chunk = tokens
    for _ in range(NUM_ANSWER_TOKENS):
        logits = module(mx.array([chunk]), cache=caches)[0, -1]
        chunk = [int(mx.argmax(logits).item())]
        answer += chunk
    return tuple(answer)


def last_blob(folder: Path, num_tokens: int, kind: str) -> Path:
    """The blob at the end of so many tokens."""
    shown = run_script("inspect_mlx_cache.py", "list", "--dir", str(folder)).stdout
    rows = [line.split() for line in shown.splitlines() if line.lstrip().startswith(kind)]
    [name] = [row[-1] for row in rows if int(row[4]) == num_tokens]
    [path] = folder.rglob(f"{name}.safetensors")
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_mlx_lm_goes_on_from_an_export(family: str, tmp_path: Path) -> None:
    """The file loads with load_prompt_cache; the same greedy tokens follow."""
    expected = written(family, tmp_path / "kv")
    is_dense = family in ("qwen3", "glm4_moe_lite")
    num_tokens = usable(len(PROMPT), family)
    blob = last_blob(tmp_path / "kv", num_tokens, "segment" if is_dense else "checkpoint")
    file, model = tmp_path / "exported.safetensors", str(tiny_model(family))
    done = run_script("inspect_mlx_cache.py", "export", str(blob), str(file), "--model", model)
    assert done.returncode == 0, done.stderr
    caches, metadata = load_prompt_cache(str(file), return_metadata=True)
    assert json.loads(metadata["tokens"]) == PROMPT[:num_tokens]
    module, _ = load_model(tiny_model(family))
    assert greedy(module, caches, PROMPT[num_tokens:]) == expected


def test_an_export_has_whole_windows(tmp_path: Path) -> None:
    """Of a state that has only what came since another one: the same greedy tokens follow."""
    with running_engine("gemma3", disk=on(tmp_path / "kv")) as engine:
        ids = converse(engine, 4)
    with running_engine("gemma3") as engine:
        expected = generate(engine, turn(ids, NUM_ANSWER_TOKENS))[0].tokens
    num_tokens = len(ids) - (NEW_TOKENS - 4)
    blob = last_blob(tmp_path / "kv", num_tokens, "checkpoint")
    assert unpack_blob(blob.read_bytes(), BlobName(blob.stem)).head.base
    file, model = tmp_path / "exported.safetensors", str(tiny_model("gemma3"))
    done = run_script("inspect_mlx_cache.py", "export", str(blob), str(file), "--model", model)
    assert done.returncode == 0, done.stderr
    module, _ = load_model(tiny_model("gemma3"))
    assert greedy(module, load_prompt_cache(str(file)), ids[num_tokens:]) == expected
    verified = run_script("inspect_mlx_cache.py", "verify", "--dir", str(tmp_path / "kv"))
    assert verified.returncode == 0, verified.stdout


@sampled_cells(lambda family: family != "gemma3")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_server_goes_on_from_an_import(family: str, tmp_path: Path) -> None:
    """A file of save_prompt_cache is found by a server that starts, and leads to what a cold one writes."""
    module, _ = load_model(tiny_model(family))
    caches = make_prompt_cache(module)
    for start in range(0, 280, 70):
        module(mx.array([PROMPT[start : start + 70]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    file = str(tmp_path / "saved.safetensors")
    save_prompt_cache(file, caches, {"tokens": json.dumps(PROMPT)})
    with running_engine(family, disk=on(tmp_path / "kv")):
        pass
    [folder] = [path for path in (tmp_path / "kv").iterdir() if path.is_dir()]
    done = run_script("inspect_mlx_cache.py", "import", file, str(folder), "--model", str(tiny_model(family)))
    assert done.returncode == 0, done.stderr
    with running_engine(family, disk=on(tmp_path / "kv")) as engine:
        [warm] = generate(engine, turn(PROMPT, NUM_ANSWER_TOKENS))
        assert cached(warm) == 280
        assert_exact(warm, cold(engine, PROMPT, NUM_ANSWER_TOKENS))


@pytest.mark.long
def test_kv_goes_out_and_in_by_processes(tmp_path: Path) -> None:
    """Started as a person starts it, the script writes a file that it can read: another server goes on from that."""
    expected = written("qwen3", tmp_path / "kv")
    blob, file = last_blob(tmp_path / "kv", len(PROMPT) - 1, "segment"), str(tmp_path / "exported.safetensors")
    model = str(tiny_model("qwen3"))
    done = start_script("inspect_mlx_cache.py", "export", str(blob), file, "--model", model)
    assert done.returncode == 0, done.stderr
    with running_engine("qwen3", disk=on(tmp_path / "other")):
        pass
    [folder] = [path for path in (tmp_path / "other").iterdir() if path.is_dir()]
    done = start_script("inspect_mlx_cache.py", "import", file, str(folder), "--model", model)
    assert done.returncode == 0, done.stderr
    with running_engine("qwen3", disk=on(tmp_path / "other")) as engine:
        [warm] = generate(engine, turn(PROMPT, NUM_ANSWER_TOKENS))
    assert cached(warm) == len(PROMPT) - 1
    assert warm.tokens == expected


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    """Caches that the model does not have: nothing is written, exit code 2."""
    module, _ = load_model(tiny_model("qwen3"))
    caches = make_prompt_cache(module)
    module(mx.array([PROMPT]), cache=caches)
    file = str(tmp_path / "saved.safetensors")
    save_prompt_cache(file, caches, {"tokens": json.dumps(PROMPT)})
    folder = tmp_path / ("0" * 32)
    folder.mkdir()
    done = run_script("inspect_mlx_cache.py", "import", file, str(folder), "--model", str(tiny_model("gemma3")))
    assert done.returncode == 2 and "another model" in done.stderr, (done.stdout, done.stderr)
    assert list(folder.iterdir()) == []


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    """Whole blobs: exit code 0. One flipped byte, or a blob that another stands on gone: 1, with the file."""
    written("qwen3_5", tmp_path)
    done = run_script("inspect_mlx_cache.py", "verify", "--dir", str(tmp_path))
    assert done.returncode == 0 and "blobs are whole" in done.stdout, done.stdout
    blobs = sorted(tmp_path.rglob("*.safetensors"))
    content = bytearray(blobs[0].read_bytes())
    content[len(content) // 2] ^= 4
    blobs[0].write_bytes(content)
    done = run_script("inspect_mlx_cache.py", "verify", "--dir", str(tmp_path))
    assert done.returncode == 1 and str(blobs[0]) in done.stdout
    assert run_script("inspect_mlx_cache.py", "list", "--dir", str(tmp_path)).returncode == 1


def test_a_tenants_kv_is_whole(tmp_path: Path) -> None:
    """In a partition with a name the first blob says that name where its parent would stand."""
    model = "0" * 32
    heads = [BlobHead(model, "segment", parent_of_first("a key"), pack(TokenSequence((1, 2, 3))), "user")]
    heads.append(BlobHead(model, "checkpoint", heads[0].name, TokenRun(3, b""), "user"))
    for head in heads:
        FolderStore(tmp_path, model).write(head.name, pack_blob(head, "", []))
    assert run_script("inspect_mlx_cache.py", "verify", "--dir", str(tmp_path)).returncode == 0
    (tmp_path / model / f"{heads[0].name}.safetensors").unlink()
    assert run_script("inspect_mlx_cache.py", "verify", "--dir", str(tmp_path)).returncode == 1


def test_ram_is_listed_over_http(server: AppUnderTest) -> None:
    """The figures of the running server, those of the disk among them."""
    done = run_script("inspect_mlx_cache.py", "list", "--server-url", f"http://127.0.0.1:{server.port}")
    assert done.returncode == 0, done.stderr
    assert "ram_bytes" in done.stdout and "disk.num_hits" in done.stdout


@pytest.mark.parametrize("arguments", [["verify", "--dir", "."], ["list", "--server-url", "http://127.0.0.1:9"]])
def test_nothing_there_is_exit_code_2(arguments: list[str], tmp_path: Path) -> None:
    """One line and no traceback."""
    done = start_script("inspect_mlx_cache.py", *[str(tmp_path) if each == "." else each for each in arguments])
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
