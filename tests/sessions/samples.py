"""Small conversations, their chains, and what a model wrote in them."""

import hashlib
from collections.abc import Callable, Iterable

from kvserve.core import Block, Message, RequestId, TextBlock, ThinkingBlock, ToolCallBlock, Written
from kvserve.sessions.journal import Kind, Rows
from kvserve.sessions.seen import PathNode, PathStep, TurnRecord, pack_ids


def user(text: str) -> Message:
    return Message("user", (TextBlock(text),))


def call(arguments: str, name: str = "bash", call_id: str = "c1") -> ToolCallBlock:
    return ToolCallBlock(call_id, name, arguments)


def assistant(text: str = "", *calls: ToolCallBlock, thinking: str = "") -> Message:
    blocks: list[Block] = [ThinkingBlock(thinking)] if thinking else []
    blocks += [TextBlock(text)] if text else []
    return Message("assistant", (*blocks, *calls))


def written(message: Message, *ids: int) -> Written:
    return Written(message, (1, 2), ids or (7, 8, 9), opens_reasoning=False)


def chains_of(letters: Iterable[str], root: bytes = b"") -> list[bytes]:
    """One digest per letter, each of the whole history up to it."""
    chains, chain = [], root
    for letter in letters:
        chain = hashlib.sha256(chain + letter.encode()).digest()
        chains.append(chain)
    return chains


def steps_of(letters: str, texts: Iterable[str] | None = None) -> list[PathStep]:
    """A user's message per letter, seen as `texts` say (as the letters, without)."""
    return [
        PathStep(chain, user(text))
        for chain, text in zip(chains_of(letters), letters if texts is None else texts, strict=True)
    ]


def texts_of(seen: PathNode | None) -> list[str]:
    """What a path's messages say."""
    return [] if seen is None else [getattr(node.message.blocks[-1], "text", "") for node in seen.path()]


def record_of(leaf: PathNode, name: str = "r1", session: str | None = None, num_tokens: int = 4) -> TurnRecord:
    return TurnRecord(
        request_id=RequestId(name),
        session=session,
        leaf=leaf,
        messages=tuple(node.message for node in leaf.path()),
        tools=(),
        tools_digest=b"",
        packed_ids=pack_ids(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        starts=(0,),
        template_arguments={"enable_thinking": True},
        fired=frozenset(),
    )


class Notebook:
    """A journal that writes at once, into a dict: what a file would hold."""

    def __init__(self) -> None:
        self.bodies: dict[tuple[Kind, bytes], bytes] = {}

    def put(self, kind: Kind, key: bytes, body: Callable[[], bytes]) -> None:
        self.bodies[kind, key] = body()

    def drop(self, kind: Kind, key: bytes) -> None:
        self.bodies.pop((kind, key), None)

    def rows(self) -> Rows:
        """What was written, in an order that nobody may rely on."""
        rows: dict[Kind, list[tuple[bytes, bytes]]] = {}
        for (kind, key), body in sorted(self.bodies.items(), key=lambda pair: hashlib.sha256(pair[0][1]).digest()):
            rows.setdefault(kind, []).append((key, body))
        return rows
