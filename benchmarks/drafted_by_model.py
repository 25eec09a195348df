"""What a draft model of the same tokenizer brings, on the demo's model that talks and on one that is led: answers plain
and drafted in turn, then a second turn behind a SIGKILL. It knows which pairs there are, and no engine.

No smaller model of the demo's tokenizer can be had here, so two pairs of real weights show the ends: the same weights
in 4 bits are nearly always right and as dear as the target, its first layers alone are cheap and mostly wrong. The
third is led: its target is the demo's model with layers behind its own that add nothing, so that the demo's model
drafts what the target says. A target that is cut off says a few words again and again, which text drafts better.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.client import BenchmarkError, Client
from benchmarks.figure import Bound, Figure
from benchmarks.rig import ask, settle
from benchmarks.same_text import settings_with
from benchmarks.speculation_asked import (
    MIN_TOKENS,
    Pair,
    Prompt,
    Told,
    forget_all,
    pair_of,
    read_prompts,
    tokens_a_step,
    told_by,
)
from benchmarks.talking import TalkingServer, talking_model

NAME = "draft_model"
NUM_PROMPTS = 4
NUM_LAYERS_KEPT = 6
"""Of thirty: with the embedding, which is the head as well, 0.37 of the weights that a pass reads."""

NUM_LAYERS_ADDED = 120
"""Behind thirty: a pass of the demo's model reads 0.24 of the weights that one of this target does."""

NUM_TOKENS = 64
"""Of an answer: the led target writes one or two a second on two cores."""

SAMPLED: dict[str, Any] = {"temperature": 0.4, "seed": 7, "stream": True, "stream_options": {"include_usage": True}}
"""Small models repeat themselves greedily, and their own words would be the drafts. A draft is the likeliest token: at
a temperature of 1 a small model seldom draws it."""

NEVER_SLOWER, WARM = Bound("at least", 0.97), Bound("at least", 0.95)
SOURCE = "draft model"


@dataclass(frozen=True, slots=True)
class DraftPair:
    """A target's folder and that of the model which drafts for it. `is_led`: both say the same by construction."""

    name: str
    target: Path
    draft: Path
    is_led: bool = False


@dataclass(frozen=True, slots=True)
class Counts:
    """What a server says of its draft model: drafted and accepted tokens, tokens of prompts and answers that it found
    in its own cache and those that it computed, and whether it is used."""

    num_drafted: int
    num_accepted: int
    num_cached: int
    num_computed: int
    is_used: bool
    ram_bytes: int = 0

    def since(self, before: "Counts") -> "Counts":
        return Counts(
            self.num_drafted - before.num_drafted,
            self.num_accepted - before.num_accepted,
            self.num_cached - before.num_cached,
            self.num_computed - before.num_computed,
            self.is_used,
            self.ram_bytes,
        )


@dataclass(frozen=True, slots=True)
class Restarted:
    """Tokens of a second turn's prompt that the target found behind a SIGKILL, and those that its draft model did, and
    what that had before: it computes nothing of an answer while it rests."""

    num_found_by_target: int
    num_found: int
    num_had: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The answers of a pair, what drafts were in them, and what the second turn behind a SIGKILL found."""

    pair: DraftPair
    answers: tuple[Pair, ...]
    drafts: Counts
    restarted: Restarted


# --- the pairs --------------------------------------------------------------------------------------------------------


def read_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors of a model's folder by their names."""
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= mx.load(str(file))
    return found


def layer_of(name: str) -> int | None:
    """Which layer a tensor is of; None for the embedding, the last norm and the head."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else None


def first_layers(weights: Mapping[str, mx.array], num_layers: int) -> dict[str, mx.array]:
    """Those of the first layers, and of what stands before and behind all of them."""
    return {name: array for name, array in weights.items() if (layer_of(name) or 0) < num_layers}


def prolonged(weights: Mapping[str, mx.array], num_layers: int, num_added: int) -> dict[str, mx.array]:
    """The same model of `num_layers` with copies behind them that add nothing and take their time all the same."""
    last = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    found = dict(weights)
    for name, array in weights.items():
        if (layer := layer_of(name)) is not None:
            behind = mx.zeros_like(array) if name.endswith(last) else array
            for added in range(num_layers + layer, num_layers + num_added, num_layers):
                found[name.replace(f".layers.{layer}.", f".layers.{added}.")] = behind
    return found


def write_variant(model: Path, folder: Path, weights: Mapping[str, mx.array], num_layers: int | None = None) -> Path:
    """A folder with everything of `model` but other weights, and that many layers."""
    folder.mkdir()
    for file in model.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.name != "kvserve-demo.json":
            shutil.copy(file, folder)
    config = json.loads((model / "config.json").read_text("utf-8"))
    config |= {} if num_layers is None else {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), {"format": "mlx"})
    return folder


def pairs_in(folder: Path) -> Iterator[DraftPair]:
    """The three pairs, made in `folder`; none without the model."""
    target, quantised = talking_model("float32"), talking_model("4-bit")
    if target is None or quantised is None:
        return
    weights = read_weights(target)
    num_layers = 1 + max(layer for layer in map(layer_of, weights) if layer is not None)
    num_in_all = num_layers + NUM_LAYERS_ADDED
    few = write_variant(target, folder / "few", first_layers(weights, NUM_LAYERS_KEPT), NUM_LAYERS_KEPT)
    led = write_variant(target, folder / "led", prolonged(weights, num_layers, NUM_LAYERS_ADDED), num_in_all)
    del weights
    yield DraftPair(f"led: {num_layers} of the target's {num_in_all} layers say all", led, target, is_led=True)
    yield DraftPair("the same weights in 4 bits", target, quantised)
    yield DraftPair(f"the first {NUM_LAYERS_KEPT} of {num_layers} layers", target, few)


# --- how they are asked -----------------------------------------------------------------------------------------------


def counts_of(port: int) -> Counts:
    """What the server says now."""
    drafted = ask(port, "GET", "/v1/cache")[1]["speculation"]["by_source"].get(SOURCE, {})
    model = ask(port, "GET", "/health")[1]["draft_model"] or {}
    return Counts(
        drafted.get("num_drafted_tokens", 0),
        drafted.get("num_accepted_tokens", 0),
        model.get("num_cached_tokens", 0),
        model.get("num_computed_tokens", 0),
        bool(model.get("is_used")),
        model.get("ram_bytes", 0),
    )


def asked(
    port: int, messages: Sequence[Mapping[str, str]], num_tokens: int, *, is_drafted: bool
) -> tuple[Told, dict[str, Any]]:
    """One sampled answer with its usage, the same words whether drafted or not but for a near tie."""
    field = {} if is_drafted else {"speculation": False}
    with Client(port) as client:
        stream = client.send({"messages": list(messages), "max_tokens": num_tokens, **SAMPLED, **field})
        client.run_until(lambda: stream.ended_at is not None)
    return told_by(stream), stream.usage()


def measured(pair: DraftPair, library: Path | None, num_rounds: int) -> Measured:
    """All answers of one pair on a server of its own, killed before the last one."""
    prompts = [prompt for prompt in read_prompts() if prompt.kind == "prose"][:NUM_PROMPTS]
    given = {**settings_with(library), "DRAFT_MODEL": str(pair.draft)}
    with (
        tempfile.TemporaryDirectory(prefix="kvserve-bench-") as folder,
        TalkingServer(pair.target, Path(folder), given) as server,
    ):

        def ask_one(some: Sequence[Prompt], is_drafted: bool) -> tuple[Told, ...]:
            forget_all(server.port)
            return (asked(server.port, some[0].messages, NUM_TOKENS, is_drafted=is_drafted)[0],)

        for is_drafted in (False, True):
            ask_one(prompts[:1], is_drafted)
        before = counts_of(server.port)
        answers = [
            pair_of([prompt], ask_one, is_drafted_first=(number + place) % 2 == 1)
            for number in range(num_rounds)
            for place, prompt in enumerate(prompts)
        ]
        drafts = counts_of(server.port).since(before)
        return Measured(pair, tuple(answers), drafts, _restarted(server, prompts[0], token_bytes_of(pair.draft)))


def token_bytes_of(model: Path) -> int:
    """Keys and values of one token in float32, in all layers."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    num_numbers = config["num_key_value_heads"] * (config.get("head_dim") or hidden_size // num_heads)
    return 2 * 4 * int(config["num_hidden_layers"] * num_numbers)


def _restarted(server: TalkingServer, prompt: Prompt, token_bytes: int) -> Restarted:
    """What both models find of a first turn in the second one, behind a SIGKILL."""
    forget_all(server.port)
    told, _ = asked(server.port, prompt.messages, NUM_TOKENS, is_drafted=True)
    settle(server.port)
    num_had = counts_of(server.port).ram_bytes // token_bytes
    server.kill_and_start()
    before = counts_of(server.port)
    said = [{"role": "assistant", "content": told.text}, {"role": "user", "content": "Go on with that."}]
    _, usage = asked(server.port, [*prompt.messages, *said], NUM_TOKENS, is_drafted=True)
    settle(server.port)
    found_by_target = usage["prompt_tokens_details"]["cached_tokens"]
    return Restarted(found_by_target, counts_of(server.port).since(before).num_cached, num_had)


# --- what is told -----------------------------------------------------------------------------------------------------


def figures(found: Sequence[Measured]) -> list[Figure]:
    """Speed, tokens a step and what was found after the SIGKILL, a group of rows for each pair. Raises BenchmarkError
    where no answer of a pair is long enough to be timed."""
    return [figure for each in found for figure in _figures(each)]


def _figures(each: Measured) -> Iterator[Figure]:
    name, drafts = each.pair.name, each.drafts
    timed = [pair for pair in each.answers if pair.is_long]
    if not timed:
        raise BenchmarkError(f"no answer of {name} has {MIN_TOKENS} tokens")
    share = f"{drafts.num_accepted / drafts.num_drafted:.0%}" if drafts.num_drafted else "none"
    use = "it is used" if drafts.is_used else "it rests"
    told = f"{drafts.num_drafted:,} tokens drafted by it, {share} accepted; {use}"
    yield _figure(f"{name}: tokens per second, drafted : plain", [pair.ratio for pair in timed], NEVER_SLOWER, told)
    steps = [tokens_a_step([pair]) for pair in timed]
    yield _figure(f"{name}: tokens a step", steps, None, f"{tokens_a_step(timed):.2f} of all together")
    num_same = sum(pair.plain[0].text == pair.drafted[0].text for pair in each.answers)
    yield _figure(f"{name}: answers with the same text", [num_same / len(each.answers)], None, "near ties part them")
    if each.pair.is_led:  # the others' KV has another number of bytes a token
        again = each.restarted
        found = f"{again.num_found:,} of {again.num_had:,} tokens found, {again.num_found_by_target:,} by the target"
        yield _figure(f"{name}: found behind a SIGKILL : had", [again.num_found / max(again.num_had, 1)], WARM, found)


def _figure(name: str, rounds: Sequence[float], bound: Bound | None, absolute: str) -> Figure:
    return Figure(NAME, name, "", tuple(rounds), bound, absolute)


def run(library: Path | None, num_rounds: int) -> list[Figure]:
    """All three pairs, one server behind another; nothing without the model."""
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as folder:
        return figures([measured(pair, library, num_rounds) for pair in pairs_in(Path(folder))])
