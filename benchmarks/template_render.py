"""The column of the template matrix for rendering: text and ids are those of transformers.

Also that a client's spelling of a control token is text: there the text is the same and the ids are not.
"""

from collections.abc import Callable, Iterator

from benchmarks.template_cases import RENDERED, user
from benchmarks.template_cell import Cell, judged
from benchmarks.template_model import Model
from benchmarks.template_reference import Conversation, NotRendered, Reference, without_tools
from kvserve.errors import RequestError

CONTROL = "control text"


def render_cells(model: Model, reference: Reference) -> Iterator[Cell]:
    """One cell for each conversation."""
    for name, said in RENDERED.items():
        yield judged("render", name, _case(model, reference, said))
    yield judged("render", CONTROL, lambda: _control(model, reference))


def _case(model: Model, reference: Reference, said: Conversation) -> Callable[[], str | NotRendered | None]:
    def judge() -> str | NotRendered | None:
        wanted, asked = reference.rendered(said, may_move=True), said
        if isinstance(wanted, NotRendered) and said.tools and len(said.messages) > 2:
            asked = without_tools(said)
            wanted = reference.rendered(asked, may_move=True) if "drops the tool" in wanted.reason else wanted
        if isinstance(wanted, NotRendered):
            return wanted
        return differs(wanted.text, reference.ids(wanted.text), *written(model, asked))

    return judge


def written(model: Model, said: Conversation) -> tuple[str, tuple[int, ...]]:
    """Text and ids of this server's prompt."""
    prompt = model.prompt(said)
    return prompt.shown, model.stitcher.tokens(prompt).ids


def differs(wanted: str, wanted_ids: tuple[int, ...], text: str, ids: tuple[int, ...]) -> str | None:
    """Where text or ids differ, None where they do not."""
    if text == wanted:
        return None if ids == wanted_ids else f"the ids differ: {len(ids)} for {len(wanted_ids)}"
    place = next((n for n, (a, b) in enumerate(zip(wanted, text, strict=False)) if a != b), min(len(wanted), len(text)))
    start = max(0, place - 12)
    return f"{text[start : place + 24]!r} for {wanted[start : place + 24]!r}"


def _control(model: Model, reference: Reference) -> str | NotRendered | None:
    """A user who spells out what ends a turn."""
    stops = sorted(model.tokenizer.decode([token]) for token in model.tokenizer.stop_token_ids)
    if not stops:
        return NotRendered("no token ends an answer")
    said = Conversation((user(f"What is {stops[0]} for?"),))
    wanted = reference.rendered(said)
    if isinstance(wanted, NotRendered):
        return wanted
    try:
        text, ids = written(model, said)
    except RequestError as error:
        return f"refused: {error}"
    if text != wanted.text:
        return differs(wanted.text, (), text, ids)
    plain = written(model, Conversation((user("What is this for?"),)))[1]
    counts = [sum(token in model.tokenizer.stop_token_ids for token in each) for each in (ids, plain)]
    return None if counts[0] == counts[1] else f"{counts[0] - counts[1]} tokens that end a turn from a user's words"
