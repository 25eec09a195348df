"""Laws of templates that nobody has seen: what is found out by probing them holds, or the start says why not.

The judge is transformers, of a small real tokenizer and the drawn template (decision 0054).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from benchmarks.template_calls import exact, read, tools_of
from benchmarks.template_cases import answer, call, result, system, user
from benchmarks.template_reference import Conversation, NotRendered, Wire, texts_of, without_tools
from benchmarks.template_render import differs
from benchmarks.template_replay import THOUGHT, Talk, is_dropped, misread, moved, num_common, what_follows
from benchmarks.template_turns import odd_ids, spoken
from kvserve.core import JsonObject, OutputDelta
from kvserve.output.splitter import Splitter
from kvserve.prompt import conform
from kvserve.prompt.cuts import Cutter
from kvserve.prompt.probe import in_order
from kvserve.prompt.steps import PromptStep, WireForm, message_dict
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.token_replay import MessageParts, ReplayPlaces, ReplaySpan
from tests.laws import num_examples
from tests.prompt.drawn_folders import Served, serve
from tests.prompt.drawn_strategy import drawn_templates
from tests.prompt.drawn_templates import (
    CALL_ARGUMENTS,
    CALL_NAME,
    Calls,
    Drawn,
    Frame,
    Thinking,
    Tools,
    said,
)

SERVED = drawn_templates().map(serve)
TEXTS = ("How is it?", "Two  spaces", "- one\n- two\n\n```py\nx = 1\n```", "größe 東京 🫠", '{"x": "y"}', "I'm  ")
VALUES = ("", " ", "x", "    return 1\n", "\n\n  x ", "say \"hi\" \\n \\ 'ok'", "null", "5", "{}", "größe 東京")

type Company = tuple[list[tuple[str, JsonObject]], str]


# --- rendering --------------------------------------------------------------------------------------------------------


@st.composite
def conversations(draw: st.DrawFn, served: Served) -> Conversation:
    """As clients send them: a system text or none, questions, tool loops, thinking; the model does not end them."""
    drawn, words = served.drawn, 0
    tags = [tag for tag, _ in drawn.tokens]

    def text(*, is_answer: bool = False) -> str:
        nonlocal words
        words += 1
        spelt = "" if is_answer else draw(st.sampled_from(["", "", "", *tags]))
        return f"W{words} {draw(st.sampled_from(TEXTS))}{spelt}"

    messages: list[Wire] = [system(text())] if draw(st.booleans()) else []
    num_turns, num_calls = draw(st.integers(1, 3)), 0
    for turn in range(num_turns):
        messages.append(user(text()))
        for _ in range(draw(st.integers(0, 2)) if drawn.calls else 0):
            made = [call(f"id{num_calls + n}aaaaaa", *draw(_CALL)) for n in range(draw(st.integers(1, 2)))]
            num_calls += len(made)
            said = text(is_answer=True) if draw(st.sampled_from([False, False, True])) else None
            messages.append(answer(said, *made, reasoning=_thought(draw)))
            messages += [result(each["id"], text()) for each in made]
        if turn < num_turns - 1:
            messages.append(answer(text(is_answer=True), reasoning=_thought(draw)))
    tools = tools_of(()) if num_calls or draw(st.booleans()) else ()
    return Conversation(tuple(messages), tools, thinking=draw(st.booleans()))


_CALL = st.sampled_from([("read_file", {"path": "kwmain", "lines": 4}), ("save_all", {"text": "kwx", "flag": True})])


def _thought(draw: st.DrawFn) -> str | None:
    return draw(st.sampled_from([None, None, "Hm, well.", "One\n\nTwo"]))


def check_rendering(served: Served, said: Conversation) -> None:
    """Everything that was said stands in the prompt in its order; text and ids are those of transformers."""
    prompt = served.model.prompt(said)
    ids = served.model.stitcher.tokens(prompt).ids
    assert in_order(prompt.shown, _words(said)), (prompt.shown, prompt.notes)
    for word in ("kwmain", "kwx"):
        assert prompt.shown.count(word) == str(said.messages).count(word), (prompt.shown, prompt.notes)
    assert served.model.tokenizer.decode(ids) == prompt.shown
    wanted = served.reference.rendered(said)
    if isinstance(wanted, NotRendered) and "drops the tool" in wanted.reason:
        said = without_tools(said)
        prompt, wanted = served.model.prompt(said), served.reference.rendered(said)
        ids = served.model.stitcher.tokens(prompt).ids
    # the judge seeks arguments behind their name: where they stand before it, an id that holds the name misleads it
    if isinstance(wanted, NotRendered) or wanted.spelling.ids != "given":
        return
    is_spelt = any(tag in str(said.messages) for tag, _ in served.drawn.tokens)
    wanted_ids = ids if is_spelt else served.reference.ids(wanted.text)
    assert differs(wanted.text, wanted_ids, prompt.shown, ids) is None, (wanted, prompt)


def _words(said: Conversation) -> list[str]:
    words: list[str] = []
    for message in said.messages:
        words += [text.strip() for text in texts_of(message) if text.strip()]
        for each in message.get("tool_calls") or ():
            words.append(each["function"]["name"])
    return words


@settings(max_examples=num_examples(4), deadline=None)
@given(SERVED, st.data())
def test_a_conversation_is_rendered_as_transformers_renders_it(served: Served, data: st.DataObject) -> None:
    """Where transformers writes all of it; where not, all of it stands in the prompt all the same."""
    note(served.drawn.source)
    check_rendering(served, data.draw(conversations(served)))


# --- calls ------------------------------------------------------------------------------------------------------------


@st.composite
def companies(draw: st.DrawFn, served: Served) -> Company:
    """Calls of one answer, with all that values may hold, and the text before them."""
    tags = [tag for tag, _ in served.drawn.tokens if tag not in served.drawn.stops]
    text = st.sampled_from([*VALUES, *(f"see {tag} x" for tag in tags)])
    saved = {
        "text": text,
        "count": st.integers(-3, 1200),
        "ratio": st.sampled_from([2.5, -0.25]),
        "flag": st.booleans(),
        "options": st.sampled_from([{}, {"a": {"b": [1, {"c": "d e"}, None]}, "f": [], "g": True}]),
    }
    arguments = {
        "save_all": st.fixed_dictionaries({}, optional=saved),
        "read_file": st.fixed_dictionaries({"path": text}, optional={"lines": st.integers(0, 9)}),
    }
    names = draw(st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=3))
    calls = [(name, draw(arguments[name])) for name in names]
    is_bare = served.drawn.calls is not None and served.drawn.calls.is_bare
    # a call that no tag opens counts at the beginning of an answer only (0045)
    return calls, "" if is_bare else draw(st.sampled_from(["", "", "I look.", "One line,\nand two."]))


def check_calls(served: Served, company: Company, cuts: list[int]) -> None:
    """What the template writes of calls is read back to the byte, in these cuts; or the start says that it is not, and
    it is all content then."""
    calls, before = company
    made = [call(f"call{place}aaaa", name, arguments) for place, (name, arguments) in enumerate(calls)]
    tools = tools_of(tuple(calls))
    text = native_text(served, spoken(before or None, *made), tools)
    if text is None:
        return
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    found, content = read(served.model, pieces, tools, starts_in_reasoning=False)
    if served.model.unheld is not None and not found:
        assert text.strip() == content.strip()
        return
    assert found == [(name, exact(arguments)) for name, arguments in calls], (text, served.model.unheld)
    assert content.strip() == before, (text, served.model.unheld)


def native_text(served: Served, turn: Wire, tools: tuple[Wire, ...]) -> str | None:
    """A turn without thinking as transformers writes it in history, words that it leaves out right before their calls;
    None where it does not."""
    drawn, asked, said = served.drawn, "Do it.", "kwresult"
    made = turn.get("tool_calls") or ()
    if made and turn["content"] and drawn.calls is not None and drawn.calls.drops_words:
        text = native_text(served, turn | {"content": None}, tools)
        return turn["content"] + text if text is not None else None
    behind = [result(each["id"], said) for each in made] or [user(said)]
    told = served.reference.rendered(Conversation((user(asked), turn, *behind), tools), tail=False)
    if isinstance(told, NotRendered):
        return None
    head = asked + drawn.user.behind + drawn.assistant.before
    text = told.text.partition(head)[2].partition(said)[0]
    text = text.rpartition(drawn.tool.before if made else drawn.user.before)[0]
    assert text.endswith(drawn.assistant.behind)
    text = text.removesuffix(drawn.assistant.behind)
    return text.removeprefix(drawn.thinking.head + drawn.thinking.tail) if drawn.thinking is not None else text


@settings(max_examples=num_examples(4), deadline=None)
@given(SERVED, st.data())
def test_what_a_template_writes_of_calls_is_read_back(served: Served, data: st.DataObject) -> None:
    """Names, values and the text before, wherever the stream is cut."""
    note(served.drawn.source)
    cuts = data.draw(st.lists(st.integers(0, 400), max_size=8))
    check_calls(served, data.draw(companies(served)), cuts)


# --- replay -----------------------------------------------------------------------------------------------------------


@st.composite
def turns(draw: st.DrawFn, served: Served) -> list[Wire]:
    """What the model says: answers and calls, with thinking or not."""
    said: list[Wire] = []
    for number in range(draw(st.integers(1, 3))):
        thinks = served.drawn.thinking is not None and draw(st.booleans())
        text = draw(st.sampled_from(["It is fine, so far.", "# Title\n\n- one  two\n  - three"]))
        made = [
            call(f"call{number}{n}aaa", "read_file", {"path": f"src/a  b{number}.py", "lines": 10 + n})
            for n in range(draw(st.integers(0, 2)) if served.drawn.calls else 0)
        ]
        is_bare = served.drawn.calls is not None and served.drawn.calls.is_bare
        keeps_text = not made or (draw(st.booleans()) and not is_bare)
        said.append(spoken(text if keeps_text else None, *made, reasoning=THOUGHT if thinks else None))
    return said


def check_replay(served: Served, said: list[Wire], *, thinking: bool) -> None:
    """Each turn keeps its tokens in the next prompt, or the start says why not; no prompt says anything else than the
    template does."""
    model, reference = served.model, served.reference
    tools = tools_of(())[:1] if any(turn.get("tool_calls") for turn in said) else ()
    talk = Talk(model, tools, thinking, [user("Do it.")])
    if served.drawn.thinking is not None and served.drawn.thinking.has_switch and not thinking:
        said = [turn | {"reasoning_content": None} for turn in said]
    for number, turn in enumerate(said):
        prompt = talk.prompt()
        text = as_the_model_writes(served, turn, tools, prompt.text)
        if text is None:
            return
        before, num_said = talk.stitched(prompt), len(talk.messages)
        kept = talk.answer(odd_ids(model, text, number))
        if turn.get("tool_calls") and model.unheld is not None:
            return
        assert misread(talk.messages[-1], turn) is None, (misread(talk.messages[-1], turn), text)
        talk.messages += what_follows(talk.messages[-1], number)
        later = talk.prompt()
        after = talk.stitched(later)
        prompts = [_squeezed(served, prompt) for prompt in (model.tokenizer.decode(after.ids), later.shown)]
        assert prompts[0] == prompts[1], (prompts, text)
        num_kept = num_common(kept, after.ids)
        if num_kept < len(kept) and model.stitcher.unreplayed is None:
            is_cut = num_kept >= len(before.ids) - len(before.tail_ids) and is_dropped(model, reference, talk)
            all_said = Conversation(tuple(talk.messages), talk.tools, talk.thinking)
            same = moved(model, reference, all_said, num_said)
            is_moved = same is not None and model.tokenizer.decode(after.ids[:num_kept]).startswith(same)
            lost, instead = model.tokenizer.decode(kept[num_kept:]), model.tokenizer.decode(after.ids[num_kept:])
            is_parted = bool(turn.get("tool_calls")) and bool(turn["content"]) and model.template.parts_words
            assert is_cut or is_moved or is_parted, (lost, instead, model.stitcher._layout)
            return


def _squeezed(served: Served, text: str) -> str:
    """A prompt without white space, and without thinking that says nothing."""
    tags = served.drawn.thinking
    squeezed = "".join(text.split())
    return squeezed.replace(tags.opening + tags.closing, "") if tags is not None else squeezed


def as_the_model_writes(served: Served, turn: Wire, tools: tuple[Wire, ...], prompt: str) -> str | None:
    """The turn in the template's own form, behind a prompt that ends inside thinking or not."""
    plain = {name: value for name, value in turn.items() if name != "reasoning_content"}
    text = native_text(served, plain, tools if turn.get("tool_calls") else ())
    thinking, reasoning = served.drawn.thinking, turn.get("reasoning_content")
    if text is None or thinking is None:
        return text
    if thinking.opens and prompt.endswith(thinking.head):
        return (reasoning or "") + thinking.tail + text
    return thinking.head + reasoning + thinking.tail + text if reasoning else text


@settings(max_examples=num_examples(4), deadline=None)
@given(SERVED, st.data())
def test_a_turn_keeps_its_tokens_or_the_start_says_why_not(served: Served, data: st.DataObject) -> None:
    """In odd tokens, echoed as OpenAI's clients do."""
    note(served.drawn.source)
    check_replay(served, data.draw(turns(served)), thinking=data.draw(st.booleans()))


# --- that a law can fail ----------------------------------------------------------------------------------------------

_PLAIN = Drawn(
    Frame("<|a|>system\n", "<|b|>\n"),
    Frame("<|a|>user\n", "<|b|>\n"),
    Frame("<|a|>ai\n", "<|b|>\n"),
    Frame("<|a|>tool\n", "<|b|>\n"),
    stops=("<|b|>",),
    tokens=(
        ("<|a|>", "special"),
        ("<|b|>", "special"),
        ("<think>", "added"),
        ("</think>", "added"),
        ("<call>", "added"),
    ),
    thinking=Thinking("<think>", "</think>"),
    tools=Tools("system", "lines", "<t>", "</t>"),
    calls=Calls(
        "",
        said('<call>{"name": "') + CALL_NAME + said('", "arguments": ') + CALL_ARGUMENTS + said("}</call>"),
        "\n",
        "",
    ),
)
_LOOK = call("call1aaaa", "read_file", {"path": "a  b", "lines": 1})


@cache
def _plain() -> Served:
    return serve(_PLAIN)


def _rendering() -> None:
    asked = (system("W1 Be brief. "), user("W2 Read it."), answer(None, _LOOK), result("call1aaaa", "W3 two"))
    check_rendering(_plain(), Conversation(asked, tools_of(())))


def _calls() -> None:
    check_calls(_plain(), ([("save_all", {"text": " x ", "count": 1}), ("read_file", {"path": ""})], "I look."), [60])


def _replay() -> None:
    check_replay(
        _plain(), [spoken("It is fine."), spoken(None, _LOOK, reasoning=THOUGHT), spoken("Two.")], thinking=True
    )


def _strips(step: PromptStep, form: WireForm) -> dict[str, object]:
    return message_dict(replace(step, text=step.text.strip()), form)


def _hides(step: PromptStep, form: WireForm) -> dict[str, object]:
    return message_dict(replace(step, text="") if step.kind == "result" else step, form)


def _loses_spaces_at_cuts(splitter: Splitter, text: str) -> list[OutputDelta]:
    return FEED(splitter, text.rstrip(" "))


def _finds_any(places: ReplayPlaces, message: int, _said: MessageParts, at_or_after: int) -> ReplaySpan | None:
    spans = sorted(span for found in places.spans.values() for span in found if span.start >= at_or_after)
    return spans[-1] if spans else None


FEED = Splitter.feed
FAULTS: dict[str, tuple[Callable[[], None], object, str, object]] = {
    "texts are stripped": (_rendering, conform, "message_dict", _strips),
    "results are hidden": (_rendering, conform, "message_dict", _hides),
    "tokens of the text are others": (_rendering, Cutter, "cut", lambda _, text: [("", text[:2]), ("", text[2:])]),
    "spaces at cuts are lost": (_calls, Splitter, "feed", _loses_spaces_at_cuts),
    "calls are text": (_calls, Splitter, "_on_call", Splitter._write_all),
    "no turn keeps its tokens": (_replay, Stitcher, "_read", lambda *_: None),
    "another turn is put in": (_replay, ReplayPlaces, "find", _finds_any),
    "thinking is content": (_replay, Splitter, "_on_think_open", Splitter._write_all),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the law holds for the same template and the same words."""
    law, where, attribute, fault = FAULTS[name]
    law()
    _plain().model.stitcher.clear()
    _plain().model.template.clear()
    monkeypatch.setattr(where, attribute, fault)
    with pytest.raises(AssertionError):
        law()
    _plain().model.stitcher.clear()
    _plain().model.template.clear()
