"""What a model's caches allow, found out at load by trying it: decoding rows in one batch, keeping what a row holds.

It knows what must be true of caches of any class; it knows no model's name and keeps nothing. Two rows are computed
alone, with given tokens; everything else must lead to their logits:

    batch   two rows that enter an mlx-lm batch together, a third that joins late; then each from the caches it leaves
    copy    a row's snapshot, restored before and after the row itself and another copy have gone on
    pad     both rows' prompts in one padded pass, one of them with a beginning; then each by itself

That takes 33 or 34 forward passes of at most 12 tokens, four more where rows can be padded, 29 more where KV is
quantised; longer ones are needed for a class that is unknown (`MAX_PROBED_TOKENS`). Where it has shown that a
prefill's cuts matter (`LeafForm.depends_on_cuts`), all prefills are to be cut at the same places.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences, generation_stream

from kvserve.engine.borders import described, finding
from kvserve.engine.kv_buffers import entering, flat_caches
from kvserve.engine.leaf_forms import MAX_PROBED_TOKENS, is_known, lengths_named
from kvserve.engine.logits_error import logits_error
from kvserve.engine.model import CacheSupport, LoadedModel
from kvserve.engine.prefill_pool import can_be_padded, padded_pass
from kvserve.engine.snapshot import CacheLayout
from kvserve.engine.wired import batch_generator
from kvserve.errors import ModelLoadError

LONG_ROW_TOKENS = 12
SHORT_ROW_TOKENS = 5
NUM_GIVEN_TOKENS = 4
NUM_BEGUN_TOKENS = 1
"""So that more than eight are left: MLX has another kernel for so few queries."""

MAX_ERROR = 0.05
"""Root mean square difference of two vectors of logits, as a share of their spread. Rounding in bfloat16 stays far
below it; a row that sees padding, or lacks one token, is above 0.15 in every family that was tried."""

CUT_TOKENS = 256
"""Where cuts matter a prefill is cut at the multiples of this: a first chunk, short enough for a large model beside
streams, and long enough that the cuts are few."""

NOISE_FACTOR = 4.0
"""A mixture of experts in 16 bits can be noisier: a tie of its router falls to the other side. Caches of known classes
may be off by so many times what the same row differs from itself, computed token by token."""


class CachesDiffer(Exception):
    """Merged or copied caches led to other logits than the row by itself."""


@dataclass(frozen=True, slots=True)
class _Alone:
    """A row as plain steps compute it: `logprobs[0]` follow the prompt, `logprobs[n]` the nth given token."""

    prompt: list[int]
    given: list[int]
    logprobs: list[mx.array]


@dataclass(slots=True, eq=False)
class Script:
    """A sampler that writes the given tokens, whatever the model says, and remembers what it was shown."""

    given: list[int]
    seen: list[mx.array] = field(default_factory=list)

    def __call__(self, logprobs: mx.array) -> mx.array:
        self.seen.append(logprobs[0])
        return mx.array([self.given[min(len(self.seen), len(self.given)) - 1]], dtype=mx.uint32)


def check_caches(model: LoadedModel) -> CacheSupport:
    """Try a model's caches. What does not come out right is not used, and a note says so and what it costs.

    Raises what the model raises when a row is computed alone: then nothing can be done with it. Raises ModelLoadError
    where quantised KV needs a copy that cannot be made.
    """
    tried = flat_caches(model.new_caches())
    unknown = [leaf for leaf in tried if not is_known(leaf)]
    named = {length for leaf in unknown for length in lengths_named(leaf)}
    num_extra_tokens = max((length for length in named if length <= MAX_PROBED_TOKENS), default=0)
    num_ids, num_tokens = min(997, model.vocab_size), LONG_ROW_TOKENS + num_extra_tokens + 2 * NUM_GIVEN_TOKENS
    tokens = [(1 + 37 * place) % num_ids for place in range(num_tokens)]  # they differ from their neighbours
    layout = replace(model, quantiser=None).layout
    with mx.stream(generation_stream):
        trial = _Trial(model.module, model.new_caches, tokens, allows_noise=not unknown)
        no_batch = _why_not_batch(unknown, named) or _blocks_of(model.module) or _trouble(trial.batch)
        no_batch = no_batch or _why_not_packed(model, tokens, allows_noise=not unknown)
        no_copy = model.leaf_trouble or _why_not_exact(model) or _trouble(partial(trial.copies, layout))
        is_plain = model.quantiser is None and model.vision is None and can_be_padded(model.new_caches())
        is_plain &= not model.has_states_elsewhere
        no_pad = _trouble(trial.padded) if is_plain and not no_batch else ""
    names = ", ".join(sorted({type(leaf).__name__ for leaf in unknown or tried}))
    grows = any(form.kind == "whole" and form.per_token for form in model.leaf_forms or ())
    if no_batch and no_copy and (start := model.sizes.packed_from):
        raise ModelLoadError(
            f"QUANTIZED_KV_START={start} cannot be used with this model: a row that gets there is copied, and copies "
            f"of {names} lead to other text ({no_copy}). Set QUANTIZED_KV_START=0 or KV_BITS=OFF."
        )
    in_pieces = _of_cuts(model) if not no_copy else ""
    notes = tuple(_notes(names, no_batch, no_copy, no_pad, in_pieces, is_copied=bool(unknown) and grows))
    can_pad = is_plain and not no_batch and not no_pad
    cut_tokens = CUT_TOKENS if in_pieces else 1
    return CacheSupport(not no_batch, can_keep=not no_copy, can_pad=can_pad, cut_tokens=cut_tokens, notes=notes)


def _of_cuts(model: LoadedModel) -> str:
    """The classes whose content depends on where a prefill is cut."""
    leaves = zip(flat_caches(model.new_caches()), model.leaf_forms or (), strict=False)
    return ", ".join(sorted({type(leaf).__name__ for leaf, form in leaves if form.depends_on_cuts}))


def _why_not_exact(model: LoadedModel) -> str:
    """Why nothing kept is what would be computed anew; empty where it may be: checkpoints have fixed places."""
    return "what they hold depends on where a prefill is cut" if model.layout.is_cuttable and _of_cuts(model) else ""


def _notes(names: str, no_batch: str, no_copy: str, no_pad: str, in_pieces: str, *, is_copied: bool) -> Iterator[str]:
    if no_batch:
        yield f"Several streams take turns and share the speed of one: {names} cannot be batched ({no_batch})."
    if no_copy:
        yield f"The prefix cache is off, all is computed anew: copies of {names} lead to other text ({no_copy})."
    if no_pad:
        yield f"Short prompts are prefilled one by one: rows that share a pass lead to other text ({no_pad})."
    if in_pieces:
        yield (
            f"What {in_pieces} holds depends on where a prefill is cut. So every prompt is computed in chunks of "
            f"{CUT_TOKENS} tokens, reuse begins between two of them, and answers are computed again in the next prompt."
        )
    if is_copied and not no_copy:
        yield f"Prompts are reused from whole copies of {names} at checkpoints, each as large as the row's KV."


# --- trying -----------------------------------------------------------------------------------------------------------


def _why_not_packed(model: LoadedModel, tokens: list[int], *, allows_noise: bool) -> str:
    """The same trial for rows whose KV is quantised, if it is to be."""
    if (quantiser := model.quantiser) is None:
        return ""
    trial = _Trial(model.module, lambda: quantiser.convert(model.new_caches()), tokens, allows_noise=allows_noise)
    return _trouble(trial.batch)


def _trouble(attempt: Callable[[], None]) -> str:
    """What went wrong in an attempt; empty if nothing did."""
    error = finding(attempt)
    if error is None:
        return ""
    return str(error) if isinstance(error, CachesDiffer) else described(error)


def _blocks_of(module: Any) -> str:
    """What is known of attention that chooses blocks of tokens, found by the numbers that it names; empty without.

    Where rows are padded blocks are counted from the batch's first place, so beyond what is always read a shorter row
    reads others than alone. That is thousands of tokens in a real model: longer rows than are tried at a start."""
    for part in module.modules() if hasattr(module, "modules") else ():
        held = {name: value for name, value in vars(part).items() if isinstance(value, int)}
        size = next((value for name, value in held.items() if name.endswith("block_size")), 0)
        count = next((value for name, value in held.items() if name.endswith("topk_blocks")), 0)
        if size and count:
            return f"of more than {size * count:,} tokens it reads blocks that are counted from the batch's first place"
    return ""


class _Trial:
    """A long and a short row, each computed alone, and what else must come out like them."""

    def __init__(
        self,
        module: Callable[..., Any],
        new_caches: Callable[[], list[Any]],
        tokens: list[int],
        *,
        allows_noise: bool,
    ) -> None:
        """`tokens`: the long row's prompt, whose beginning is the short one's, and how each of them continues."""
        self._module = module
        self._new_caches = new_caches
        prompt, given = tokens[: -2 * NUM_GIVEN_TOKENS], tokens[-2 * NUM_GIVEN_TOKENS :]
        self._long = self._run_alone(prompt, given[:NUM_GIVEN_TOKENS])
        self._short = self._run_alone(prompt[:SHORT_ROW_TOKENS], given[NUM_GIVEN_TOKENS:])
        self._max_error = max(MAX_ERROR, NOISE_FACTOR * self._noise()) if allows_noise else MAX_ERROR

    def batch(self) -> None:
        """Two rows enter a batch together, a third one later; that one continues alone. Raises CachesDiffer."""
        rows = (self._long, self._short, self._short)
        scripts = [Script(row.given) for row in rows]
        generator: Any = batch_generator(self._module)
        ended: dict[int, list[Any]] = {}
        try:
            self._insert(generator, rows[:2], scripts[:2])
            generator.next()
            self._insert(generator, rows[2:], scripts[2:])
            while len(ended) < len(rows):
                ended |= {each.uid: each.prompt_cache for each in generator.next()[1] if each.finish_reason}
        finally:
            generator.close()
        for (_, caches), row, script in zip(sorted(ended.items()), rows, scripts, strict=True):
            self._compare([*script.seen, self._step(caches, row.given[2:3])], row.logprobs)

    def copies(self, layout: CacheLayout) -> None:
        """Copies and original continue in turns, none must notice the others. Raises CachesDiffer."""
        original = self._prefilled(self._long.prompt)
        num_tokens = len(self._long.prompt) - 1
        kv, state = layout.read_kv(original, 0, num_tokens), layout.read_state(original)
        self._step(layout.restore([(kv, 0, num_tokens)], state, 4), list(reversed(self._short.given)))
        chunk = [self._long.prompt[-1], self._long.given[0]]
        found = [self._step(original, chunk), self._step(layout.restore([(kv, 0, num_tokens)], state, 2), chunk)]
        self._compare(found, [self._long.logprobs[1]] * 2)
        if layout.is_cuttable:
            cut = layout.restore([(kv, 0, len(self._short.prompt) - 1)], None, 2)
            chunk = [self._short.prompt[-1], self._short.given[0]]
            self._compare([self._step(cut, chunk)], [self._short.logprobs[1]])

    def padded(self) -> None:
        """Prompts of two lengths at two depths in one pass, then each row by itself. Raises CachesDiffer."""
        begun = self._new_caches()
        self._step(begun, self._long.prompt[:NUM_BEGUN_TOKENS])
        chunks = [self._long.prompt[NUM_BEGUN_TOKENS:-1], self._short.prompt[:-1]]
        parted = padded_pass(self._module, [begun, self._new_caches()], chunks)
        rows = (self._long, self._short)
        found = [self._step(caches, [row.prompt[-1], row.given[0]]) for caches, row in zip(parted, rows, strict=True)]
        self._compare(found, [row.logprobs[1] for row in rows])

    def _noise(self) -> float:
        """How far the short row is from itself when its prompt goes through the model token by token."""
        caches = self._new_caches()
        stepped = [self._step(caches, [token]) for token in (*self._short.prompt, *self._short.given[:-1])]
        found = stepped[len(self._short.prompt) - 1 :]
        return max(logits_error(*pair) for pair in zip(found, self._short.logprobs, strict=True))

    def _compare(self, found: Sequence[mx.array], expected: Sequence[mx.array]) -> None:
        error = max(logits_error(*pair) for pair in zip(found, expected, strict=True))
        if not error <= self._max_error:  # also for one that is not a number
            raise CachesDiffer(f"its logits are off by {error:.0%}")

    def _run_alone(self, prompt: list[int], given: list[int]) -> _Alone:
        caches = self._prefilled(prompt)
        return _Alone(prompt, given, [self._step(caches, [token]) for token in (prompt[-1], *given[:-1])])

    def _insert(self, generator: Any, rows: Sequence[_Alone], scripts: Sequence[Script]) -> None:
        """Let rows decode two tokens each in a batch."""
        caches = [entering(self._prefilled(row.prompt)) for row in rows]
        insert_scripted(generator, [row.prompt for row in rows], caches, scripts, 2)

    def _prefilled(self, prompt: list[int]) -> list[Any]:
        """Caches of all tokens but the last. Logits, which may take hundreds of megabytes, are not computed."""
        caches = self._new_caches()
        self._module(mx.array([prompt[:-1]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        return caches

    def _step(self, caches: list[Any], tokens: list[int]) -> mx.array:
        """Log-probabilities (vocabulary,) after `tokens`, which go through the model in one pass."""
        logits: mx.array = self._module(mx.array([tokens]), cache=caches)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
        return logits - mx.logsumexp(logits)


def insert_scripted(
    generator: Any,
    prompts: Sequence[list[int]],
    caches: Sequence[list[Any]],
    scripts: Sequence[Script],
    num_tokens: int,
) -> None:
    """Let rows enter a batch, whose caches hold their prompts but for the last token, and write so many tokens each."""
    generator.insert(
        [prompt[-1:] for prompt in prompts],
        max_tokens=[num_tokens for _ in prompts],
        caches=list(caches),
        all_tokens=[prompt[:-1] for prompt in prompts],
        samplers=list(scripts),
        stop_sequences=[StopSequences() for _ in prompts],
    )


# --- classes ----------------------------------------------------------------------------------------------------------


def _why_not_batch(unknown: Sequence[Any], named: Iterable[int]) -> str:
    """What can be said without trying; empty where it must be tried."""
    if not all(hasattr(leaf, "merge") for leaf in unknown):
        return "mlx-lm cannot merge rows of it"
    if (longest := max(named, default=0)) > MAX_PROBED_TOKENS:
        return f"it names {longest:,}, and at start rows of at most {MAX_PROBED_TOKENS:,} tokens are tried"
    return ""
