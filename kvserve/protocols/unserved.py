"""The answer in words where a request needs a tool that would run on the provider's servers. Knows names only."""

from collections.abc import Iterator, Sequence

from kvserve.core import AnswerEvent, ContentDelta, Finished, Usage


def unserved_words(names: Sequence[str]) -> str:
    """What the client reads instead of a result."""
    tools = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
    return (
        f"This server cannot run the tool {tools}: it runs a model on this machine and no tools. Nothing was searched, "
        "fetched or executed. Go on without it."
    )


def answer_in_words(words: str) -> Iterator[AnswerEvent]:
    """The events of an answer that no model gave: no token was read or written for it."""
    yield ContentDelta(words)
    yield Finished("stop", Usage(0, 0, 0))
