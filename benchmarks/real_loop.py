"""Recorded sessions through the real server over HTTP: what it says it reused, beside the same path without a model.

    python -m benchmarks.open_loop --real [--shared FOLDER] [--family NAME] [--client NAME] [--requests]
                                          [--save] [--missing] [--seconds N]

Every recorded session, and of each file of the corpus the first two conversations of at most 16k tokens, with a tiny
real model of each family. Of an answer of the corpus its first tokens are written, on both sides: a CPU draws a
few hundred tokens a second. No request may differ: both sides prefill, keep and look up the same tokens, and the real
one only adds arrays to them. Exit code 1 when one does.
"""

import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path

from benchmarks.figure import Bound, Figure
from benchmarks.kept import WHOLE, KeptRows, Part
from benchmarks.led_server import LedServer, led_server
from benchmarks.model_free import ModelFree, Told
from benchmarks.recordings import (
    RECORDED_CLIENTS,
    Conversation,
    Reply,
    Request,
    read_corpus,
    read_recordings,
    shared_folder,
)
from benchmarks.reuse_oracle import CONVENTIONS, RECORDED_FAMILIES
from kvserve.core import RequestId
from kvserve.demo.build import ModelScale, build_model
from kvserve.protocols.openai_chat import parse_chat

MAX_CONVERSATION_TOKENS = 16_384
MAX_BYTES_PER_TOKEN = 8
"""Longer texts have no fewer tokens than that, so most conversations need not be tokenised to be left out."""

UNREAD = Reply(content="Nobody reads this.")
"""What is written for a client that left before its answer came: when it left cannot be the same on both sides."""

NUM_PER_FILE = 2
CORPUS_ANSWER_TOKENS = 12
SMALLEST = ModelScale(num_layers=2, num_heads=1, num_kv_heads=1)
SCALES = {
    "qwen3": SMALLEST,
    "qwen3_5": ModelScale(num_heads=1, num_kv_heads=1),
    "gemma3": SMALLEST,
    "glm4_moe_lite": SMALLEST,
}
"""As little attention as there can be with every kind of layer that the family has: of four layers qwen3_5 has one that
attends; of two, gemma3 has one of each kind and glm4_moe_lite one with experts."""

HEADINGS = (
    *("client", "conversation", "family", "requests", "longest prompt", "prompt tokens"),
    *("over HTTP", "without a model", "requests that differ"),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """One request: prompt and cached tokens as the answer's usage says, and as the path without a model says."""

    real: Told
    free: Told
    is_first: bool

    @property
    def is_same(self) -> bool:
        return (self.real.num_prompt_tokens, self.real.num_cached_tokens) == (
            self.free.num_prompt_tokens,
            self.free.num_cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class Paired:
    """All requests of one conversation on one family, and the sums that GET /v1/cache gives for them."""

    client: str
    name: str
    family: str
    pairs: tuple[Pair, ...]
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def sums_agree(self) -> bool:
        """Whether the server's totals are the sums of its answers."""
        return (self.num_prompt_tokens, self.num_cached_tokens) == (
            sum(pair.real.num_prompt_tokens for pair in self.pairs),
            sum(pair.real.num_cached_tokens for pair in self.pairs),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """What is kept of one conversation on one family: its sums without the first request, `num_differing` with it."""

    client: str
    name: str
    family: str
    num_requests: int
    num_longest_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_free_prompt_tokens: int
    num_free_cached_tokens: int
    num_differing: int


def row_of(played: Paired) -> Row:
    """Its sums."""
    warm = [pair for pair in played.pairs if not pair.is_first]
    return Row(
        played.client,
        played.name,
        played.family,
        len(played.pairs),
        max(pair.real.num_prompt_tokens for pair in played.pairs),
        sum(pair.real.num_prompt_tokens for pair in warm),
        sum(pair.real.num_cached_tokens for pair in warm),
        sum(pair.free.num_prompt_tokens for pair in warm),
        sum(pair.free.num_cached_tokens for pair in warm),
        num_differing([played]),
    )


def answered(request: Request) -> Request:
    """The request with something to write."""
    return request if request.reply is not None else replace(request, reply=UNREAD)


def pair_up(talk: Conversation, family: str, server: LedServer, model: ModelFree) -> Paired:
    """Lead a conversation with both, which know nothing of it."""
    server.forget()
    model.forget()
    before = server.totals()
    limit = None if talk.client in RECORDED_CLIENTS else CORPUS_ANSWER_TOKENS
    pairs = []
    for number, request in enumerate(map(answered, talk.requests)):
        real = server.ask(request, limit)
        pairs.append(Pair(real, model.serve(request, number, limit), is_first=number == 0))
    after = server.totals()
    prompts, cached = (after[name] - before[name] for name in ("num_prompt_tokens", "num_cached_tokens"))
    return Paired(talk.client, talk.name, family, tuple(pairs), prompts, cached)


def sample(shared: Path, clients: Sequence[str] | None, model: ModelFree) -> list[Conversation]:
    """The recordings, and the first conversations of each file of the corpus that are short enough."""
    found = [talk for talk in read_recordings(shared) if clients is None or talk.client in clients]
    talks = (talk for talk in read_corpus(shared) if clients is None or talk.client in clients)
    for _, of_file in groupby(talks, key=lambda talk: talk.client):
        short = (talk for talk in of_file if _num_tokens(talk, model) <= MAX_CONVERSATION_TOKENS)
        found += islice(short, NUM_PER_FILE)
    return found


def _num_tokens(talk: Conversation, model: ModelFree) -> int:
    """Tokens of its longest prompt, or more than are allowed where its text alone has more."""
    longest = max(talk.requests, key=_num_characters)
    if _num_characters(longest) > MAX_BYTES_PER_TOKEN * MAX_CONVERSATION_TOKENS:
        return MAX_CONVERSATION_TOKENS + 1
    served = model.served
    turn = parse_chat(longest.body, {}, served.defaults, RequestId("sample")).turn
    return len(served.tokenizer.encode(served.template.write(turn.messages, turn.tools, thinking=True).text))


def _num_characters(request: Request) -> int:
    return len(str(request.body))


def pair_all(
    shared: Path, families: Sequence[str], clients: Sequence[str] | None = None, part: Part = WHOLE
) -> Iterator[Paired]:
    """The conversations of the sample on every family, as far as they belong to the part."""
    with _model_free(RECORDED_FAMILIES[0]) as (_, model):  # whichever families are asked for, the sample is the same
        talks = sample(shared, clients, model)
    for family in families:
        if part.is_over() or not (wanted := part.of(talks, family)):
            continue
        with _model_free(family) as (folder, model), led_server(folder, folder.parent) as server:
            for talk in wanted:
                if part.is_over():
                    return
                yield pair_up(talk, family, server, model)


@contextlib.contextmanager
def tiny_model(family: str) -> Iterator[Path]:
    """The folder of a tiny model, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        yield build_model(family, Path(scratch) / "model", scale=SCALES[family], answer_tokens=None)


@contextlib.contextmanager
def _model_free(family: str) -> Iterator[tuple[Path, ModelFree]]:
    """A tiny model's folder, and the path without a model for it."""
    with tiny_model(family) as folder:
        yield folder, ModelFree(folder, is_cuttable=CONVENTIONS[family].is_cuttable)


# --- figures and tables ----------------------------------------------------------------------------------------------


def run(_num_rounds: int) -> list[Figure]:
    """Requests whose reuse differs from what it is without a model, per family. Nothing is timed."""
    shared = shared_folder()
    if shared is None:
        print("real_loop: there are no recorded conversations here, nothing was compared", file=sys.stderr)
        return []
    rows = [row_of(played) for played in pair_all(shared, RECORDED_FAMILIES)]
    print("\n".join(table(rows)), flush=True)
    return [_figure(family, [row for row in rows if row.family == family]) for family in RECORDED_FAMILIES]


def _figure(family: str, rows: Sequence[Row]) -> Figure:
    real, free = _shares(rows)
    return Figure(
        "real_loop",
        f"requests whose reuse over HTTP is not that without a model, {family}",
        "",
        (float(sum(row.num_differing for row in rows)),),
        Bound("at most", 0),
        f"of {sum(row.num_requests for row in rows)} in {len(rows)} conversations; reuse {real:.4f} : {free:.4f}",
    )


def _shares(rows: Sequence[Row]) -> tuple[float, float]:
    """Reused prompt tokens : prompt tokens on both sides, pooled, without the requests that begin a conversation."""
    real = sum(row.num_cached_tokens for row in rows) / max(1, sum(row.num_prompt_tokens for row in rows))
    free = sum(row.num_free_cached_tokens for row in rows) / max(1, sum(row.num_free_prompt_tokens for row in rows))
    return real, free


def num_differing(played: Iterable[Paired]) -> int:
    """Requests of which the two sides say something else; a conversation whose sums are wrong counts as one."""
    return sum(sum(not pair.is_same for pair in one.pairs) + (not one.sums_agree) for one in played)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Each conversation on each family, then each family: reuse on both sides and how many requests differ."""
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|---" * len(HEADINGS) + "|"
    for row in rows:
        yield _line((row.client, row.name, row.family), [row])
    for family in dict.fromkeys(row.family for row in rows):
        some = [row for row in rows if row.family == family]
        yield _line(("**all**", f"{len(some)} conversations", family), some)


def _line(name: tuple[str, ...], rows: Sequence[Row]) -> str:
    real, free = _shares(rows)
    cells = (
        *name,
        str(sum(row.num_requests for row in rows)),
        f"{max(row.num_longest_tokens for row in rows):,}",
        f"{sum(row.num_prompt_tokens for row in rows):,}",
        f"{real:.4f}",
        f"{free:.4f}",
        str(sum(row.num_differing for row in rows)),
    )
    return f"| {' | '.join(cells)} |"


def requests(played: Sequence[Paired]) -> Iterator[str]:
    """Every request with what both sides say of it."""
    for one in played:
        for number, pair in enumerate(one.pairs, 1):
            mark = "" if pair.is_same else "  DIFFERS"
            yield (
                f"{one.client} {one.name} {one.family} {number}: {pair.real.num_cached_tokens} of "
                f"{pair.real.num_prompt_tokens} over HTTP, {pair.free.num_cached_tokens} of "
                f"{pair.free.num_prompt_tokens} without a model ({pair.free.cause}){mark}"
            )
        if not one.sums_agree:
            yield f"{one.client} {one.name} {one.family}: GET /v1/cache adds up to something else  DIFFERS"


def report(rows: Sequence[Row]) -> str:
    """The file that keeps the table."""
    measured = Counter(row.family for row in rows)
    found = ", ".join(f"{measured[family]} on {family}" for family in RECORDED_FAMILIES)
    return f"""# Reuse over HTTP beside the same path without a model

`python -m benchmarks.open_loop --real --save`: every recorded session and, of each file of the corpus, the first
{NUM_PER_FILE} conversations whose longest prompt has at most {MAX_CONVERSATION_TOKENS:,} tokens on
{RECORDED_FAMILIES[0]}; a file of which there are fewer has no more that fit. Each meets a server with a tiny real
model, over HTTP, which writes the recorded answers (of the corpus their first {CORPUS_ANSWER_TOKENS} tokens), and the
same path without a model. Shares of prompt tokens are without the request that begins a conversation; requests, and
those that differ in prompt or cached tokens, are with it. A conversation for which `GET /v1/cache` adds up to something
else counts as one that differs. Conversations measured so far: {found}; `--missing` measures the others.

{chr(10).join(table(rows))}
"""


KEPT = KeptRows("real_loop", Row, report)
