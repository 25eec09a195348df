"""Answers in words if a request needs a tool that only the provider's servers run."""

from collections.abc import Iterator, Sequence

from kvserve.core import AnswerEvent, ContentDelta, Finished, Usage


def unserved_words(names: Sequence[str]) -> str:
    """The answer's text."""
    tools = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
    return (
        f"This server cannot run the tool {tools}: it runs a model on this machine and no tools. Nothing was searched, "
        "fetched or executed. Go on without it."
    )


def answer_in_words(words: str) -> Iterator[AnswerEvent]:
    """The events of an answer without a model: it read and wrote no token."""
    yield ContentDelta(words)
    yield Finished("stop", Usage(0, 0, 0))
