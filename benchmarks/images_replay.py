"""Recorded browsing sessions with a screenshot in every turn, on a tiny vision model, against the most possible.

    python -m benchmarks.images_replay [--shared FOLDER] [--skip N] [--conversations N] [--width PIXELS] [--save]

Screenshots are scaled to the tiny model's sizes. What was possible is found out beside the server: mlx-vlm's own
processor makes the tokens, an image's token is told by the picture's bytes and its place in it, and of a prompt the
longest beginning that any earlier prompt of the conversation had can be reused. The family can be cut anywhere, so
nothing else counts. Exit code 1 when less than that, by more than a hundredth, was reused, or an image was cut. What is
saved takes the place of the same conversations' rows, so that they can be played in parts.
"""

import argparse
import base64
import hashlib
import http.client
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlx_vlm.utils import load_processor, prepare_inputs
from PIL import Image

from benchmarks.client import BenchmarkError
from benchmarks.recordings import IMAGES, Wire, shared_folder
from benchmarks.rig import serving
from kvserve.demo.build import TINY, build_model

FAMILY = "qwen3_vl"
IMAGE_TOKEN = "<|image_pad|>"
TOLERANCE = 0.01
RESULTS = Path(__file__).parent / "results" / "images.md"
TITLE = (
    "# Reuse on recorded browsing sessions with screenshots",
    "",
    "`python -m benchmarks.images_replay --save`: over HTTP on a tiny model of the family qwen3_vl, screenshots scaled",
    "to 192 pixels of width, each conversation on an empty cache. Shares of prompt tokens, the first request counted",
    "too; the oracle knows every prompt of the conversation. A row passes when reuse >= oracle - 0.01 and no image was",
    "cut.",
)
HEAD = "| conversation | requests | prompt tokens | reuse | oracle | vlm_retreat | result |"

type Token = int | tuple[bytes, int]
"""An id or, inside an image, its picture and the place in it."""


@dataclass(frozen=True, slots=True)
class Share:
    """Prompt tokens, and how many of them were reused and could have been."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_reusable_tokens: int


@dataclass(frozen=True, slots=True)
class Played:
    """A conversation that was played to its end, and how often an image was cut in it."""

    name: str
    shares: tuple[Share, ...]
    num_retreats: int

    def row(self) -> str:
        reuse, possible = _reuse(self.shares)
        total = sum(share.num_prompt_tokens for share in self.shares)
        result = "pass" if is_at_oracle(self.shares) and not self.num_retreats else "missed"
        cells = [
            self.name,
            len(self.shares),
            f"{total:,}",
            f"{reuse:.4f}",
            f"{possible:.4f}",
            self.num_retreats,
            result,
        ]
        return f"| {' | '.join(map(str, cells))} |"


class Oracle:
    """What a server could reuse of a prompt, from the processor's own tokens."""

    def __init__(self, folder: Path) -> None:
        self._processor: Any = load_processor(folder, add_detokenizer=False, trust_remote_code=False)
        self._image_token = int(self._processor.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
        self._seen: list[list[Token]] = []

    def judge(self, messages: Sequence[Wire]) -> tuple[int, int]:
        """Tokens of the prompt and how many of them an earlier prompt began with; remembers the prompt."""
        tokens = list(self._tokens(messages))
        reusable = max((_num_common(tokens, other) for other in self._seen), default=0)
        self._seen.append(tokens)
        return len(tokens), min(reusable, len(tokens) - 1)

    def _tokens(self, messages: Sequence[Wire]) -> Iterator[Token]:
        pictures = [_picture(part) for part in _parts(messages) if part["type"] == "image_url"]
        text = self._processor.tokenizer.apply_chat_template(
            [_for_template(message) for message in messages],
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=False,
            preserve_thinking=True,
        )
        inputs = prepare_inputs(self._processor, images=pictures or None, prompts=[text])
        digests = iter([hashlib.sha256(picture.tobytes()).digest() for picture in pictures])
        digest, place = b"", -1
        for token in np.array(inputs["input_ids"])[0].tolist():
            if token != self._image_token:
                place = -1
                yield token
                continue
            if place < 0:
                digest = next(digests)
            place += 1
            yield digest, place


def _num_common(one: Sequence[Token], other: Sequence[Token]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _parts(messages: Sequence[Wire]) -> Iterator[Wire]:
    for message in messages:
        if isinstance(message["content"], list):
            yield from message["content"]


def _for_template(message: Wire) -> Wire:
    if not isinstance(message["content"], list):
        return message
    content = [{"type": "image"} if part["type"] == "image_url" else part for part in message["content"]]
    return {**message, "content": content}


def _picture(part: Wire) -> Image.Image:
    content = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    return Image.open(io.BytesIO(content)).convert("RGB")


def _scaled(message: Wire, width: int) -> Wire:
    """The message with its screenshots small, as PNG, so that nothing is lost on the way."""
    if not isinstance(message["content"], list):
        return message
    content = [_small(part, width) if part["type"] == "image_url" else part for part in message["content"]]
    return {**message, "content": content}


def _small(part: Wire, width: int) -> Wire:
    picture = _picture(part)
    picture = picture.resize((width, max(16, picture.height * width // picture.width)))
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    url = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def play(record: Wire, port: int, oracle: Oracle, width: int) -> Iterator[Share]:
    """One conversation with a server that knows nothing of it."""
    ask(port, "DELETE", "/v1/cache")
    pool = [_scaled(message, width) for message in record["pool"]]
    for request in record["requests"]:
        messages = [pool[number] for number in request["messages"]]
        body = {"messages": messages, "max_tokens": 1, "enable_thinking": False, "cache_mode": "prefix"}
        usage = ask(port, "POST", "/v1/chat/completions", body)["usage"]
        num_tokens, num_reusable = oracle.judge(messages)
        if usage["prompt_tokens"] != num_tokens:
            raise BenchmarkError(f"the prompt has {usage['prompt_tokens']} tokens, the processor says {num_tokens}")
        yield Share(num_tokens, usage["prompt_tokens_details"]["cached_tokens"], num_reusable)


def main() -> int:
    """Play the sessions and print one line for each."""
    parser = argparse.ArgumentParser(description="Replay recorded browsing sessions with screenshots.")
    parser.add_argument("--shared", type=Path, default=shared_folder())
    parser.add_argument("--skip", type=int, default=0, metavar="N")
    parser.add_argument("--conversations", type=int, default=None, metavar="N")
    parser.add_argument("--width", type=int, default=192, metavar="PIXELS")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.shared is None:
        print("There are no recorded conversations here.", file=sys.stderr)
        return 0
    lines = (options.shared / "corpus" / f"{IMAGES}.jsonl").read_text("utf-8").splitlines()[options.skip :]
    records = [json.loads(line) for line in lines[: options.conversations]]
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as name:
        folder = build_model(FAMILY, Path(name) / "model", scale=TINY, answer_tokens=None)
        played = play_all(records, folder, Path(name), options.width)
    if options.save:
        save(played)
    shares = [share for each in played for share in each.shares]
    num_retreats = sum(each.num_retreats for each in played)
    print(f"all: {len(shares)} requests, {_figures(shares)}; vlm_retreat {num_retreats}")
    return 0 if is_at_oracle(shares) and not num_retreats else 1


def play_all(records: Sequence[Wire], folder: Path, scratch: Path, width: int) -> list[Played]:
    """All conversations on one server, each on an empty cache."""
    played: list[Played] = []
    with serving(folder, scratch, {}) as (port, _):
        for record in records:
            before = _num_retreats(port)
            shares = tuple(play(record, port, Oracle(folder), width))
            played.append(Played(record["id"], shares, _num_retreats(port) - before))
            print(f"{record['id']}: {len(shares)} requests, {_figures(shares)}", flush=True)
    return played


def is_at_oracle(shares: Sequence[Share]) -> bool:
    """Whether no more than a hundredth of what was possible was missed."""
    reuse, possible = _reuse(shares)
    return reuse >= possible - TOLERANCE


def save(played: Sequence[Played]) -> None:
    """Put these conversations' rows into the table."""
    known = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    rows = {line.split(" | ")[0]: line for line in known if line.startswith("| ") and not line.startswith(HEAD[:6])}
    rows |= {f"| {each.name}": each.row() for each in played}
    RESULTS.write_text(
        "\n".join([*TITLE, "", HEAD, "|---" * HEAD.count(" |") + "|", *sorted(rows.values()), ""]), "utf-8"
    )


def _num_retreats(port: int) -> int:
    return int(ask(port, "GET", "/v1/cache")["counters"]["vlm_retreat"])


def ask(port: int, method: str, path: str, body: Wire | None = None) -> dict[str, Any]:
    """One request. Raises BenchmarkError for another status than 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        said = response.read()
        if response.status != 200:
            raise BenchmarkError(f"{method} {path}: {response.status} {said[:300]!r}")
        return dict(json.loads(said))
    finally:
        connection.close()


def _reuse(shares: Sequence[Share]) -> tuple[float, float]:
    total = max(1, sum(share.num_prompt_tokens for share in shares))
    cached = sum(share.num_cached_tokens for share in shares)
    return cached / total, sum(share.num_reusable_tokens for share in shares) / total


def _figures(shares: Sequence[Share]) -> str:
    reuse, possible = _reuse(shares)
    total = sum(share.num_prompt_tokens for share in shares)
    return f"{total:,} prompt tokens, reuse {reuse:.4f}, oracle {possible:.4f}"


if __name__ == "__main__":
    sys.exit(main())
