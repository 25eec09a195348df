"""A served model without the model: the real path of a request around an engine that plays back what was written.

Parsing, identity, rendering, stitching, the prefix cache with its checkpoints, the reading of the answer and what is
remembered are the server's own; KV has no bytes and tokens cost nothing. It knows no client and judges nothing.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from benchmarks.given_ids import GivenIds
from benchmarks.recordings import MESSAGES, RESPONSES, Reply, Request
from benchmarks.template_model import load_model
from kvserve.app.wiring import engine_settings, identity_settings, request_defaults
from kvserve.config import Settings
from kvserve.core import NOBODY, GenerationRequest, JsonObject, RequestDefaults, RequestId, ToolCallBlock
from kvserve.engine.memory import fixed_memory
from kvserve.engine.model import KvSize, LoadedModel, load
from kvserve.engine.model_digest import ModelDigest
from kvserve.engine.prefix_cache import CacheLease, PrefixCache
from kvserve.engine.rows import RequestHandle, Row
from kvserve.identity.conversations import Conversations
from kvserve.prompt.images import Images
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.protocols.anthropic_messages import MessagesRequest, parse_messages
from kvserve.protocols.openai_chat import ChatRequest, parse_chat
from kvserve.protocols.responses_request import ResponsesRequest, parse_responses
from kvserve.protocols.responses_store import ResponseStore
from kvserve.requests.running_answer import RunningTurn
from kvserve.requests.serve import serve_turn
from kvserve.requests.served_model import ServedModel
from kvserve.requests.turn_facts import FinishedTurn, Observer

CONTEXT_TOKENS = 2**20
UNLIMITED_BYTES = 2**40
TAIL_TOKENS = 8
"""A generation tail's last tokens, in which a thinking tag can stand open."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the server says of a request: its prompt's tokens, how many it knew, and why not more; without a model also
    how many of the model's own turns stand in it as they were written, and how many tokens the cause cost."""

    num_prompt_tokens: int
    num_cached_tokens: int
    cause: str | None
    num_replayed_turns: int = field(default=0, compare=False)
    num_lost_tokens: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Script:
    """The token ids of an answer, and the stop token that ends it; None where a limit cuts it."""

    ids: tuple[int, ...]
    stop_token: int | None

    def cut(self, max_tokens: int | None) -> "Script":
        """The same under a limit, which the stop token counts against."""
        whole = len(self.ids) + (self.stop_token is not None)
        return self if max_tokens is None or whole <= max_tokens else Script(self.ids[:max_tokens], None)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that the model draws."""
        return self.ids if self.stop_token is None else (*self.ids, self.stop_token)


class _Layers:
    """Caches of one layer that cannot be cut and holds one number, or of none at all."""

    def __init__(self, *, is_cuttable: bool) -> None:
        self._is_cuttable = is_cuttable

    def make_cache(self) -> list[Any]:
        """Caches of one row."""
        if self._is_cuttable:
            return []
        cache: Any = ArraysCache(size=1)
        cache[0] = mx.zeros(1)
        return [cache]


class PlaybackEngine:
    """Does with a row's cache what the engine does: `submit` looks a prompt up, `answer` writes the rest of the row.

    `script` gives the answer to a request, None for a client that leaves before it comes.
    """

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        self._model = model
        self._settings = engine_settings(settings).cache
        self._entered: tuple[CacheLease, list[Any]] | None = None
        self.script: Callable[[GenerationRequest], Script | None] = lambda request: None
        self.cache = self._emptied()
        self.digest = ModelDigest(Path(), None, print, print)  # not needed: nothing outlives the process

    def _emptied(self) -> PrefixCache:
        return PrefixCache(self._model, self._settings, fixed_memory(UNLIMITED_BYTES), "model-free")

    def forget(self) -> None:
        """Begin with an empty cache."""
        self.cache = self._emptied()

    def submit(self, request: GenerationRequest) -> RequestHandle:
        """Let a row enter; it waits for `answer`."""
        row = Row(RequestHandle(request), lambda: None)
        cache_lease, caches, row.num_cached_tokens = self.cache.enter(row)
        self._entered = cache_lease, caches
        return row.handle

    def answer(self) -> None:
        """The row that entered last: its prefill, what was written, and the idle work after it."""
        if self._entered is None:
            return
        (cache_lease, caches), self._entered = self._entered, None
        row = cache_lease.row
        for stop in cache_lease.stops:
            self.cache.keep(cache_lease, caches, stop.offset)
        row.report_progress(len(row.request.prompt))
        written = self.script(row.request)
        if written is None:
            row.finish("length")  # what was answered is not recorded
        else:
            for token in written.ids:
                row.deliver(token)
            self.cache.finish(cache_lease, caches, [*row.request.prompt.ids, *written.tokens])
            if written.stop_token is None:
                row.finish("length")
            else:
                row.finish("stop", num_hidden_tokens=1)
        self.cache.leave(cache_lease)
        while self.cache.coalesce():
            pass


def _loaded(folder: Path, module: Any, vocab_size: int) -> LoadedModel:
    """The model in a folder with these layers in place of its own. One without weights sees no pictures."""
    sizes = KvSize(fixed=0, per_token=0)
    if next(folder.glob("*.safetensors"), None) is not None:
        return replace(load(folder, max_kv_size=CONTEXT_TOKENS), module=module, sizes=sizes, leaf_forms=None)
    return LoadedModel(module, {}, vocab_size, CONTEXT_TOKENS, weight_bytes=0, active_weight_bytes=0, sizes=sizes)


def _images(model: LoadedModel, template: ChatTemplate) -> Images | None:
    """What reads the pictures of a vision checkpoint."""
    if model.vision is None:
        return None
    reader = model.vision.reader
    return Images(reader, reader.words(template.image_words or reader.placeholder))


class ModelFree:
    """One model's template and tokenizer behind the server's own code, with default settings and memory without end.
    Its folder needs no weights. `write` makes what its model writes of an answer."""

    def __init__(self, folder: Path, *, is_cuttable: bool) -> None:
        settings = Settings()
        self.model = load_model(folder)
        self.write: Callable[[ServedModel, Sequence[int], Reply], Script] = script_of
        tokenizer = self.model.tokenizer
        model = _loaded(folder, _Layers(is_cuttable=is_cuttable), tokenizer.vocab_size)
        self.engine = PlaybackEngine(model, settings)
        self._settings = settings
        self._told: FinishedTurn | None = None
        self.context: tuple[int, ...] = ()
        """The ids of the newest turn, prompt and answer."""
        self._ids = GivenIds()
        self._recorded_ids: tuple[str, ...] = ()
        engine: Any = self.engine
        bounds = self.model.output_format.thinking_bounds
        self.served = ServedModel(
            name="model-free",
            tokenizer=tokenizer,
            template=self.model.template,
            markers=self.model.markers,
            stitcher=self.model.stitcher,
            conversations=Conversations(identity_settings(settings)),
            output_format=self.model.output_format,
            added_tokens={token.content: id for id, token in tokenizer.backend.get_added_tokens_decoder().items()},
            closing_ids=tokenizer.encode(bounds.closing)
            if (bounds := self.model.output_format.thinking_bounds)
            else (),
            engine=engine,
            defaults=request_defaults(settings),
            vocab_size=model.vocab_size,
            context_limit=CONTEXT_TOKENS,
            observe=Observer(lambda *_: None, self._finished),
            images=_images(model, self.model.template),
            call_ids=self.model.call_ids,
            unheld_calls=self.model.unheld,
        )

    def forget(self) -> None:
        """Begin anew: no KV, no conversations, nothing tokenised."""
        self.engine.forget()
        self._ids = GivenIds()
        served = self.served
        stitcher = Stitcher.of(served.tokenizer, served.template, served.markers)
        conversations = Conversations(identity_settings(self._settings))
        self.served = replace(served, stitcher=stitcher, conversations=conversations)

    def serve(self, request: Request, number: int, max_tokens: int | None = None) -> Told:
        """A request from its body to the end of its answer, of which `max_tokens` are written."""
        return self.end(self.start(json.dumps(request.body).encode(), request, number, max_tokens))

    def start(self, body: bytes, request: Request, number: int, max_tokens: int | None = None) -> RunningTurn:
        """The part of it that comes before the answer, from the bytes of the body on. Calls of this server's answers
        come back with the ids that it gave them."""
        served, reply = self.served, request.reply
        if self._ids:
            body = json.dumps(self.sent(json.loads(body))).encode()
        self._recorded_ids = reply.call_ids if reply is not None else ()
        write = self.write
        self.engine.script = lambda asked: write(served, asked.prompt.ids, reply).cut(max_tokens) if reply else None
        parse = _PARSERS.get(request.path, parse_chat)
        asked = parse(json.loads(body), request.headers, self.served.defaults, RequestId(f"free{number}"))
        return serve_turn(asked.turn, self.served)

    def sent(self, body: JsonObject) -> JsonObject:
        """A recorded body as its client would have sent it here: with the ids of calls that this server gave."""
        renamed: JsonObject = self._ids.in_body(body)
        return renamed

    def end(self, running: RunningTurn) -> Told:
        """The rest of it: the answer as it was written, and what is remembered."""
        self.engine.answer()
        for _ in running.events(poll_seconds=0.0):
            pass
        given = [block.call_id for block in running.said.blocks if isinstance(block, ToolCallBlock)]
        self._ids.give(self._recorded_ids, given)
        self.context = running.context.ids
        told = self._told
        assert told is not None
        explanation = told.explanation
        return Told(
            told.facts.num_prompt_tokens,
            told.facts.num_cached_tokens,
            explanation.cause if explanation is not None else None,
            told.prompt.num_replayed_turns,
            explanation.num_lost_tokens if explanation is not None else 0,
        )

    def _finished(self, turn: FinishedTurn) -> None:
        self._told = turn


def _parse_responses(
    body: JsonObject, headers: Mapping[str, str], defaults: RequestDefaults, request_id: RequestId
) -> ResponsesRequest:
    """A request that names no response before it."""
    return parse_responses(body, headers, defaults, request_id, ResponseStore(None, print).of(NOBODY))


_PARSERS: Mapping[str, Callable[..., ChatRequest | MessagesRequest | ResponsesRequest]] = {
    MESSAGES: parse_messages,
    RESPONSES: _parse_responses,
}
"""How a body is read, by its endpoint; all others are chats."""


# --- what the model wrote --------------------------------------------------------------------------------------------


def script_of(served: ServedModel, prompt: Sequence[int], reply: Reply) -> Script:
    """An answer as a model of this family writes it behind this prompt."""
    tokenizer = served.tokenizer
    return Script(tokenizer.encode(text_of(served, prompt, reply)), stop_token(tokenizer, bool(reply.calls)))


def text_of(served: ServedModel, prompt: Sequence[int], reply: Reply) -> str:
    """Its text: of a family that is in none of these forms with the calls that the server tells it of."""
    tail = served.tokenizer.decode(prompt[-TAIL_TOKENS:]).rstrip()
    calls = "".join(_calls(reply, served.output_format.name))
    gap = "\n" if calls and reply.content else ""
    return f"{_thinking(reply, tail, served)}{reply.content}{gap}{calls}"


def _thinking(reply: Reply, tail: str, served: ServedModel) -> str:
    """The reasoning in the tags of the think format, of which the prompt may have written some."""
    is_glm = served.output_format.name == "glm"
    opening, closing = ("<think>", "</think>") if is_glm else ("<think>\n", "\n</think>\n\n")
    if tail.endswith("</think>"):
        return ""
    if tail.endswith("<think>"):
        return f"{reply.reasoning}{closing}"
    return f"{opening}{reply.reasoning}{closing}" if reply.reasoning and _thinks(served) else ""


def _thinks(served: ServedModel) -> bool:
    return served.template.accepts_thinking


def _calls(reply: Reply, form: str) -> Iterator[str]:
    """Each call in the form that the model was trained to write."""
    for position, (name, arguments) in enumerate(reply.calls):
        gap = "\n" if position else ""
        given = json.loads(arguments or "{}")
        match form:
            case "glm":
                pairs = "".join(
                    f"<arg_key>{key}</arg_key><arg_value>{_bare(value)}</arg_value>" for key, value in given.items()
                )
                yield f"<tool_call>{name}{pairs}</tool_call>"
            case "qwen_coder":
                pairs = "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in given.items())
                yield f"{gap}<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"
            case _:
                text = json.dumps({"name": name, "arguments": given}, ensure_ascii=False)
                yield f"{gap}<tool_call>\n{text}\n</tool_call>"


def _bare(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


ENDS = (
    *((end, end) for end in ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<\uff5cend\u2581of\u2581sentence\uff5c>")),
    ("<|return|>", "<|call|>"),
    ("<|user|>", "<|observation|>"),
)
"""The token that ends an answer, and one with calls, by family: the pair that a vocabulary has counts."""


def stop_token(tokenizer: Tokenizer, has_calls: bool) -> int:
    """What an answer of this vocabulary's model ends with."""
    for ends in ENDS:
        token = tokenizer.token_id(ends[has_calls])
        if token is not None and token in tokenizer.stop_token_ids:
            return token
    raise ValueError("No known stop token is in this vocabulary.")
