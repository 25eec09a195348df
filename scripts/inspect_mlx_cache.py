"""What kvserve keeps: in RAM, asked over HTTP, and on disk, read offline; and files that stock mlx-lm writes and reads.

list                     what a running server holds, and with --dir the blobs in its folder
verify --dir DIR         every blob against its checksum and its name
export BLOB FILE         the tokens up to a blob as a file that mlx_lm's load_prompt_cache reads
import FILE              a file of save_prompt_cache into a model's folder; a server finds it within half a minute
"""

import argparse
import json
from array import array
from pathlib import Path

from probing.blobs import BlobFile, RawTensor, blobs_of, model_folders, read_blob, write_blob
from probing.report import Expectations, Table, run
from probing.wire import ProbeError, Server

DEFAULT_DIR = Path("~/.cache/kvserve").expanduser()


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Look at the KV that kvserve keeps; exchange it with stock mlx-lm.",
        allow_abbrev=False,
        epilog="Exit code: 0, 1 where a blob is damaged, 2 where it could not be done.",
    )
    todo = parser.add_subparsers(dest="todo", required=True, metavar="TODO")
    listing = todo.add_parser("list", help="what RAM and disk hold")
    listing.add_argument("--server-url", default="http://127.0.0.1:8080", metavar="URL", help="(%(default)s)")
    listing.add_argument("--api-key", default="none", metavar="KEY", help="sent as Bearer (%(default)s)")
    listing.add_argument(
        "--dir", type=Path, metavar="DIR", help="list the blobs below DISK_CACHE_DIR, asking no server"
    )
    verifying = todo.add_parser("verify", help="check every blob on disk")
    verifying.add_argument("--dir", type=Path, default=DEFAULT_DIR, metavar="DIR", help="DISK_CACHE_DIR (%(default)s)")
    exporting = todo.add_parser("export", help="write a prompt cache for stock mlx-lm")
    exporting.add_argument("blob", type=Path, help="the last blob; one of a checkpoint where layers cannot be cut")
    exporting.add_argument("file", type=Path, help="what to write (.safetensors)")
    importing = todo.add_parser("import", help="take in a prompt cache of stock mlx-lm")
    importing.add_argument("file", type=Path, help="what save_prompt_cache wrote")
    importing.add_argument("folder", type=Path, help="the folder of the model below DISK_CACHE_DIR, as list shows it")
    importing.add_argument(
        "--tokens", type=Path, metavar="FILE", help="JSON list of token ids, where the file has none"
    )
    for each in (exporting, importing):
        each.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="the model's own folder")
    return parser.parse_args()


def list_ram(options: argparse.Namespace) -> int:
    """The figures of GET /v1/cache."""
    report = Server(options.server_url, options.api_key, 10).get("/v1/cache")
    if report is None:
        raise ProbeError(f"{options.server_url} has no /v1/cache")
    disk = report.pop("disk", None) or {}
    for name, value in (report | {f"disk.{name}": value for name, value in disk.items()}).items():
        print(f"{name:32} {json.dumps(value)}")
    return 0


def list_disk(root: Path) -> int:
    """One row per blob, by model."""
    is_sound = True
    for folder in model_folders(root):
        print(f"=== {folder}")
        table = Table("kind", "tokens", "from", "to", "bytes", "blob")
        for blob in blobs_of(folder):
            if isinstance(blob, str):
                print(f"damaged: {blob}")
                is_sound = False
                continue
            kind = f"{blob.kind} ({blob.boundary})"
            table.add(
                kind, f"{blob.end - blob.start}", f"{blob.start}", f"{blob.end}", f"{blob.num_bytes:,}", blob.name
            )
    return 0 if is_sound else 1


def verify(root: Path) -> int:
    """Every blob, and that what it stands on is there."""
    expectations = Expectations()
    for folder in model_folders(root):
        found = list(blobs_of(folder))
        sound = {blob.name for blob in found if isinstance(blob, BlobFile)}
        for blob in found:
            if isinstance(blob, str):
                expectations.expect(False, blob)
            elif any(each and each not in sound for each in (blob.stands_on, blob.base)):
                expectations.expect(False, f"{blob.path}: what it stands on is gone")
        expectations.expect(len(sound) == len(found), f"{folder.name}: {len(sound)} of {len(found)} blobs are whole")
    return expectations.exit_code


def export(options: argparse.Namespace) -> int:
    """A chain of blobs as one prompt cache, its tokens in the metadata."""
    from mlx_lm.models.cache import save_prompt_cache  # here: listing needs no mlx
    from probing.caches import stock_caches

    last, tensors = _read(options.blob)
    states = [(last, tensors)] if last.kind == "checkpoint" else []
    while states and states[0][0].base:
        states.insert(0, _read(options.blob.parent / f"{states[0][0].base}.safetensors"))
    segments: list[tuple[BlobFile, list[RawTensor], int]] = []
    end, name = last.end, last.parent if states else last.name
    while name:
        blob, tensors = _read(options.blob.parent / f"{name}.safetensors")
        segments.insert(0, (blob, tensors, end))
        end, name = blob.start, blob.stands_on
    ids = [token for blob, _, stop in segments for token in array("I", blob.ids)[: stop - blob.start]]
    if any(json.loads(blob.images) for blob, _, _ in segments):
        raise ProbeError("there are images in it, which a file of mlx-lm cannot name")
    caches = stock_caches(options.model, segments, states)
    save_prompt_cache(str(options.file), caches, {"tokens": json.dumps(ids), "model": str(options.model)})
    print(f"{len(ids)} tokens in {len(segments)} segments -> {options.file}")
    return 0


def take_in(options: argparse.Namespace) -> int:
    """A prompt cache as one segment and, where layers cannot be cut, a checkpoint."""
    from mlx_lm.models.cache import load_prompt_cache
    from probing.caches import check_caches, num_tokens_of, parts_of

    caches, metadata = load_prompt_cache(str(options.file), return_metadata=True)  # type: ignore[no-untyped-call]
    check_caches(options.model, caches)
    text = options.tokens.read_text("utf-8") if options.tokens is not None else metadata.get("tokens")
    if text is None:
        raise ProbeError(f"{options.file} does not name its tokens: give them with --tokens")
    num_tokens = num_tokens_of(caches)
    ids = array("I", json.loads(text)[:num_tokens])
    if len(ids) < num_tokens or not options.folder.is_dir():
        raise ProbeError(f"{len(ids)} tokens are named for KV of {num_tokens}, to be put into {options.folder}")
    segment, state = parts_of(caches)
    name = write_blob(options.folder.resolve(), "segment", "", 0, ids.tobytes(), *segment)
    if state is not None:
        write_blob(options.folder.resolve(), "checkpoint", name, num_tokens, b"", *state)
    print(f"{num_tokens} tokens -> {options.folder / name}")
    return 0


def _read(path: Path) -> tuple[BlobFile, list[RawTensor]]:
    try:
        return read_blob(path)
    except (OSError, ValueError) as error:
        raise ProbeError(f"{path}: {error}") from error


def main() -> int:
    """Do what the command line asks for."""
    options = parse_options()
    if options.todo == "list":
        return list_ram(options) if options.dir is None else list_disk(options.dir)
    if options.todo == "verify":
        return verify(options.dir)
    return export(options) if options.todo == "export" else take_in(options)


if __name__ == "__main__":
    run(main)
