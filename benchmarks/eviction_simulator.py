"""Which score should decide what leaves the cache: recorded agent conversations, several users at once, no model.

    python -m benchmarks.eviction_simulator [--corpus FOLDER] [--users N] [--scores value,lru]

The corpus (JSON lines: a pool of messages, and requests that name which of them they send) is looked for in
`shared/corpus` in and beside the repository. Tokens are pieces of words: what matters here is which prefixes are equal.
"""

import argparse
import heapq
import json
import random
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_budget import QWEN_27B, ModelSizes, Sized
from benchmarks.eviction_scores import SCORES
from benchmarks.figure import Bound, Figure
from kvserve.cache.block_hash import BlockHasher
from kvserve.cache.checkpoints import MessageEnd, PromptOutline, plan_stops
from kvserve.cache.eviction import Score
from kvserve.cache.records import Limits
from kvserve.cache.tree import PrefixTree
from kvserve.core import ImageSpan, Role, TokenSequence

REPOSITORY = Path(__file__).resolve().parent.parent
PIECES = re.compile(r"\s?\w{1,7}|\W")
IMAGE_TOKENS = 400
PAUSE_SECONDS = 120.0
LONGEST_GAP_SECONDS = 600.0
DENSE = ModelSizes(QWEN_27B.kv_bytes_per_token, 0)
CAPACITIES = (25_000, 50_000, 100_000, 200_000)
"""Bytes of the cache per concurrent user, in tokens of KV."""


@dataclass(frozen=True, slots=True)
class Request:
    """One recorded request: its prompt, the prompt with its answer, and the seconds since the one before."""

    prompt: TokenSequence
    whole: TokenSequence
    outline: PromptOutline
    gap_seconds: float


type Conversation = list[Request]


def corpus_folder() -> Path | None:
    """The recorded conversations, if they are there."""
    for root in (REPOSITORY, REPOSITORY.parent):
        if (folder := root / "shared" / "corpus").is_dir():
            return folder
    return None


def pieces(text: str) -> list[int]:
    """Stable ids of the pieces of a text."""
    return [zlib.crc32(piece.encode()) & 0x3FFFF for piece in PIECES.findall(text)]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A message as tokens; image positions count from its start."""

    ids: list[int]
    images: list[tuple[int, str]]
    role: Role


def render(message: dict[str, Any]) -> Rendered:
    """A recorded chat message as tokens."""
    ids, images = pieces(f"<{message['role']}>"), []
    content = message.get("content")
    for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
        if "image_url" in part:
            images.append((len(ids), sha256(json.dumps(part["image_url"]).encode()).hexdigest()))
            ids += [0] * IMAGE_TOKENS
        else:
            ids += pieces(str(part.get("text", "")))
    if message.get("tool_calls"):
        ids += pieces(json.dumps(message["tool_calls"]))
    return Rendered([*ids, 1], images, message["role"])


def read_conversations(folder: Path) -> list[Conversation]:
    """Every recorded conversation as requests in model tokens."""
    conversations = []
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            record = json.loads(line)
            pool = [render(message) for message in record["pool"]]
            tools = pieces(json.dumps(record.get("tools") or []))
            conversations.append([_request(tools, pool, request) for request in record["requests"]])
    return conversations


def _request(tools: list[int], pool: list[Rendered], request: dict[str, Any]) -> Request:
    ids, images, ends = list(tools), [], []
    for number in request["messages"]:
        message = pool[number]
        images += [ImageSpan(len(ids) + at, len(ids) + at + IMAGE_TOKENS, digest) for at, digest in message.images]
        ids += message.ids
        ends.append(MessageEnd(len(ids), message.role, is_genuine_user=message.role == "user"))
    system_end = next((end.offset for end in ends if end.role == "system"), len(tools) or None)
    tail = pieces("<assistant>")
    prompt = TokenSequence((*ids, *tail), tuple(images))
    reply = pool[request["reply"]].ids[len(tail) :] if request.get("reply") is not None else []
    outline = PromptOutline(len(prompt), tuple(ends), system_end, prompt.images)
    gap = min(float(request.get("gap_s") or 1.0), LONGEST_GAP_SECONDS)
    return Request(prompt, TokenSequence((*prompt.ids, *reply), prompt.images), outline, gap)


def interleave(
    conversations: Sequence[Conversation], num_users: int, seed: int
) -> Iterator[tuple[float, str, Request]]:
    """All requests in the order of their time; each user has one conversation after the other."""
    order = list(conversations)
    random.Random(seed).shuffle(order)
    queues = [order[user::num_users] for user in range(num_users)]
    todo = [(PAUSE_SECONDS * user / num_users, user, 0, 0) for user in range(num_users) if queues[user]]
    heapq.heapify(todo)
    while todo:
        now, user, number, position = heapq.heappop(todo)
        conversation = queues[user][number]
        yield now, f"{user}/{number}", conversation[position]
        if position + 1 < len(conversation):
            gap = conversation[position + 1].gap_seconds
            heapq.heappush(todo, (now + gap, user, number, position + 1))
        elif number + 1 < len(queues[user]):
            heapq.heappush(todo, (now + PAUSE_SECONDS, user, number + 1, 0))


class Simulation:
    """One cache that serves the requests; counts prompt tokens and those that were reused."""

    def __init__(self, score: Score, max_bytes: int, sizes: ModelSizes) -> None:
        self.now = 0.0
        self.num_prompt_tokens = self.num_reused_tokens = 0
        self._sizes = sizes
        self._needs_checkpoints = sizes.checkpoint_bytes > 0
        self.tree = PrefixTree(
            BlockHasher(16, "simulator"),
            Limits(max_bytes, max(max_bytes // 2, 1), max_entries=10**6, max_entries_per_owner=10**6),
            needs_checkpoints=self._needs_checkpoints,
            cut_payload=lambda _payload, start, end: self._rows(start, end),
            score=score,
            clock=lambda: self.now,
        )

    def _rows(self, start: int, end: int) -> Sized:
        return Sized((end - start) * self._sizes.kv_bytes_per_token)

    def serve(self, now: float, owner: str, request: Request) -> None:
        """Look up, prefill with stops, keep prompt and answer, evict."""
        self.now = now
        match = self.tree.lookup(request.prompt)
        self.num_prompt_tokens += match.num_prompt_tokens
        self.num_reused_tokens += match.num_usable_tokens
        lease = self.tree.acquire(match, owner=owner)
        stops = plan_stops(
            request.outline,
            num_usable_tokens=match.num_usable_tokens,
            num_matched_tokens=match.num_matched_tokens,
            needs_checkpoints=self._needs_checkpoints,
        )
        state = Sized(self._sizes.checkpoint_bytes)
        for stop in stops:
            self.tree.extend(lease, request.prompt, stop.offset, self._rows, lambda: state, stop.kind)
        self.tree.extend(lease, request.whole, len(request.whole), self._rows, lambda: state, "answer")
        self.tree.mark_end(lease)
        self.tree.release(lease)
        self.tree.evict()

    @property
    def reuse(self) -> float:
        return self.num_reused_tokens / max(self.num_prompt_tokens, 1)


def simulate(
    conversations: Sequence[Conversation],
    score: Score,
    sizes: ModelSizes,
    *,
    num_users: int,
    max_bytes: int,
    seed: int = 0,
) -> float:
    """The share of prompt tokens that was reused."""
    simulation = Simulation(score, max_bytes, sizes)
    for now, owner, request in interleave(conversations, num_users, seed):
        simulation.serve(now, owner, request)
    return simulation.reuse


USERS = 6
KINDS = (("dense", DENSE), ("hybrid 27B", QWEN_27B))
RIVALS = ("age_length_frequency", "lru")


def run(_num_rounds: int) -> list[Figure]:
    """Reuse with the default score against the best of the others, where it stands worst. Nothing is timed."""
    folder = corpus_folder()
    if folder is None:
        print("eviction: there is no corpus of recorded conversations here, nothing was compared", file=sys.stderr)
        return []
    conversations = read_conversations(folder)
    return [_against_rivals(conversations, name, sizes) for name, sizes in KINDS]


def _against_rivals(conversations: Sequence[Conversation], name: str, sizes: ModelSizes) -> Figure:
    """In points, hundredths of the prompt tokens, over all capacities."""
    leads, shown = [], []
    for capacity in CAPACITIES:
        max_bytes = capacity * USERS * sizes.kv_bytes_per_token
        value, *rivals = (
            simulate(conversations, SCORES[score], sizes, num_users=USERS, max_bytes=max_bytes)
            for score in ("value", *RIVALS)
        )
        leads.append(100 * (value - max(rivals)))
        shown.append(f"{100 * value:.1f} : {100 * max(rivals):.1f}")
    return Figure(
        "eviction",
        f"reuse with the default score - best other, {name}, worst capacity",
        "points",
        (min(leads),),
        Bound("at least", -0.1),
        f"{', '.join(shown)} % with {CAPACITIES[0] // 1000}k to {CAPACITIES[-1] // 1000}k tokens per user",
    )


def table(conversations: Sequence[Conversation], scores: Sequence[str], num_users: int) -> Iterator[str]:
    """Reuse by model kind, capacity and score, as the lines of a Markdown table."""
    for name, sizes in KINDS:
        yield f"| {name}, tokens of KV per user | " + " | ".join(scores) + " |"
        yield "|---" * (len(scores) + 1) + "|"
        for capacity in CAPACITIES:
            max_bytes = capacity * num_users * sizes.kv_bytes_per_token
            reuse = [
                simulate(conversations, SCORES[score], sizes, num_users=num_users, max_bytes=max_bytes)
                for score in scores
            ]
            yield f"| {capacity:,} | " + " | ".join(f"{share:.4f}" for share in reuse) + " |"
        unlimited = simulate(conversations, SCORES["lru"], sizes, num_users=num_users, max_bytes=2**60)
        yield "| unlimited | " + " | ".join([f"{unlimited:.4f}"] * len(scores)) + " |\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compare eviction scores on recorded conversations.")
    parser.add_argument("--corpus", type=Path, default=corpus_folder(), help="folder of recorded conversations")
    parser.add_argument("--users", type=int, default=USERS, help="conversations at the same time")
    parser.add_argument("--scores", default=",".join(SCORES), help="names of score functions, by comma")
    arguments = parser.parse_args()
    if arguments.corpus is None or not arguments.corpus.is_dir():
        parser.exit(2, "There is no corpus: give --corpus FOLDER.\n")
    conversations = read_conversations(arguments.corpus)
    num_requests = sum(len(conversation) for conversation in conversations)
    print(f"{len(conversations)} conversations, {num_requests} requests, {arguments.users} users at once\n")
    for line in table(conversations, arguments.scores.split(","), arguments.users):
        print(line, flush=True)


if __name__ == "__main__":
    main()
