"""The column of the template matrix for loading: what is found out about a folder's template before it is used."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.template_calls import VALUES, written
from benchmarks.template_cases import READ, answer, user
from benchmarks.template_cell import Cell, Judged, judged
from benchmarks.template_model import Model
from benchmarks.template_reference import Conversation, NotRendered, Reference

_QUESTION = Conversation((user("How is it?"),))


def load_cells(model: Model, reference: Reference) -> Iterator[Cell]:
    """One cell for each fact."""
    facts: dict[str, Callable[[Model, Reference], Judged]] = {
        "template": _is_read,
        "tools": _takes_tools,
        "switch": _has_switch,
        "ends": _ends,
        "turns": _tells_turns,
        "calls": _holds_calls,
    }
    for name, fact in facts.items():
        yield judged("load", name, lambda fact=fact: fact(model, reference))  # type: ignore[misc]


def _is_read(model: Model, reference: Reference) -> Judged:
    """The template itself writes a conversation; with a tool where transformers needs one."""
    said = _QUESTION
    if isinstance(reference.rendered(said), NotRendered):
        said = replace(said, tools=(READ,))
    notes = model.prompt(said).notes
    return f"a question is written otherwise: {notes[-1]}" if notes else None


def _takes_tools(model: Model, reference: Reference) -> Judged:
    told = reference.rendered(replace(_QUESTION, tools=(READ,)))
    if isinstance(told, NotRendered):
        return told
    return None if model.template.accepts_tools else "tools are described in words, though the template describes them"


def _has_switch(model: Model, reference: Reference) -> Judged:
    """Thinking is switched where transformers can switch it."""
    texts = [reference.rendered(replace(_QUESTION, thinking=thinking)) for thinking in (True, False)]
    if any(isinstance(text, NotRendered) for text in texts) or texts[0] == texts[1]:
        return NotRendered("the template has no switch")
    on, off = (model.prompt(replace(_QUESTION, thinking=thinking)).text for thinking in (True, False))
    return "thinking on and off are the same prompt" if on == off else None


def _ends(model: Model, reference: Reference) -> Judged:
    """An answer is over where the template ends it."""
    said = Conversation((user("How is it?"), answer("It is kwfine"), user("And then?")))
    told = reference.rendered(said)
    if isinstance(told, NotRendered):
        return told
    behind = model.tokenizer.encode(told.text.partition("kwfine")[2].lstrip())
    last = reference.rendered(replace(said, messages=said.messages[:2]), tail=False)
    others = () if isinstance(last, NotRendered) else model.tokenizer.encode(last.text.partition("kwfine")[2].lstrip())
    following = [ids for ids in (behind, others) if ids]
    special = [token for ids in following for token in ids[:2] if token in model.tokenizer.stop_token_ids]
    if not special:
        return f"{model.tokenizer.decode(behind[:1])!r}, which stands behind an answer, does not end one"
    return None


def _tells_turns(model: Model, reference: Reference) -> Judged:
    if not model.markers.openers:
        return "no token is known that begins a message"
    return None if model.stitcher.replays else "how the template begins or ends a turn was not found: none is replayed"


def _holds_calls(model: Model, reference: Reference) -> Judged:
    turn = written(model, reference, VALUES["parallel"][:1])
    if isinstance(turn, NotRendered):
        return turn
    return None if model.unheld is None else model.unheld
