"""An image on its way into a prompt: what stands for it, and how the vision tower's input is made when it is needed. It
knows no array."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The half-open run `[start, end)` of placeholder ids that stands for the image with this content digest."""

    start: int
    end: int
    digest: str


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What a prompt says for one image: `ids` stand in its place.

    `digest` is that of its pixels and the processor's settings. `grid` counts (frames, rows, columns) of its tokens
    in families whose positions follow them, else None.
    """

    digest: str
    ids: tuple[int, ...]
    grid: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class ImageWords:
    """What a model's prompt says around an image: text before and behind its run of ids.

    `guarded` are the tokens that only an image may bring in, not a client who writes them out.
    """

    head: str
    tail: str
    guarded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasuredImage:
    """What a model's processor makes of a picture: its facts, and the vision tower's input by name."""

    facts: ImageFacts
    tower_input: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image of a request. `load` makes the vision tower's input by name; it is asked only where that is needed."""

    facts: ImageFacts
    load: Callable[[], Mapping[str, object]]
