"""What opens and ends an assistant's turn, per family, on the real templates."""

from dataclasses import replace

import pytest
import tokenizers

from kvserve.core import Message, TextBlock, ToolSpec, Written
from kvserve.prompt.boundaries import learn_markers
from kvserve.prompt.stitch import Stitcher
from kvserve.prompt.template import ChatTemplate, PromptText
from kvserve.prompt.token_replay import MessageParts, Unit, behind_header, find_units
from kvserve.prompt.tokenizer import Tokenizer
from kvserve.prompt.turn_layout import TurnLayout, learn_layout
from tests.prompt.samples import HOSTILE, byte_level_backend, tokenizer_of
from tests.prompt.turns import ENDS, FAMILIES, HEADERS, family


@pytest.mark.parametrize("name", FAMILIES)
def test_the_header_and_the_ends_of_each_family_are_found(name: str) -> None:
    """The header goes as far as every assistant's message has it: no think tag, no channel, no recipient."""
    of = family(name)
    layout = learn_layout(of.tokenizer, of.template, of.markers)
    assert layout.header == HEADERS[name]
    assert not layout.openers & layout.ends
    assert not ENDS[name] or ENDS[name].strip() in layout.ends
    assert not ENDS[name] or ENDS[name].strip() == layout.end
    assert of.stitcher.turn_end == of.tokenizer.token_id(layout.end) is not None
    assert of.stitcher.replays and of.stitcher.unreplayed is None


@pytest.mark.parametrize("source", [*HOSTILE.values(), None])
def test_a_template_without_such_tokens_has_no_layout(source: str | None) -> None:
    """Roles in plain text open nothing for sure: no emitted ids are used there."""
    tokenizer = tokenizer_of(byte_level_backend(), source)
    template = ChatTemplate(tokenizer)
    markers = learn_markers(tokenizer, template)
    assert learn_layout(tokenizer, template, markers).header == ""
    stitcher = Stitcher.of(tokenizer, template, markers)
    assert not stitcher.replays and stitcher.unreplayed


@pytest.mark.parametrize(
    "source",
    [
        # All roles look alike; an answer ends in words; nothing follows the opener that says who speaks.
        "{% for m in messages %}<|im_end|>says {{ m.content }}{% endfor %}<|im_end|>says ",
        "{% for m in messages %}<|im_end|>{{ m.role }}:{{ m.content }} over{% endfor %}<|im_end|>assistant:",
    ],
)
def test_turns_that_cannot_be_told_apart_are_left_alone(source: str) -> None:
    """Without a header of its own, or an end that is a token, there is no layout."""
    tokenizer = tokenizer_of(byte_level_backend(), source)
    template = ChatTemplate(tokenizer)
    markers = learn_markers(tokenizer, template)
    assert markers.openers
    assert learn_layout(tokenizer, template, markers).header == ""


def small(source: str, *tokens: str, stops: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer with these tokens, of which `stops` end an answer."""
    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())
    backend.add_special_tokens(list(tokens))
    tokenizer = tokenizer_of(backend, source)
    return replace(tokenizer, stop_token_ids=frozenset(backend.token_to_id(token) for token in stops))


def layout_of(tokenizer: Tokenizer) -> TurnLayout:
    """What is found, if turns are replayed by it."""
    template = ChatTemplate(tokenizer)
    markers = learn_markers(tokenizer, template)
    assert Stitcher.of(tokenizer, template, markers).replays
    return learn_layout(tokenizer, template, markers)


TAIL = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize("quiet", ["/quiet", "<|quiet|>", " /quiet\n<|quiet|>"])
def test_what_only_one_mode_writes_behind_a_question_is_no_header(quiet: str) -> None:
    """As GLM-4.6 asks for no thinking: the answer's header begins behind it, in both modes."""
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'user' and enable_thinking is defined "
        f"and not enable_thinking %}}{quiet}{{% endif %}}{{% endfor %}}{TAIL}"
    )
    tokenizer = small(source, "<|user|>", "<|assistant|>", "<|quiet|>", stops=("<|user|>",))
    layout = layout_of(tokenizer)
    assert (layout.header, layout.openers) == ("<|assistant|>", {"<|user|>", "<|assistant|>"})


def test_what_only_one_mode_writes_into_an_answer_hides_no_opener() -> None:
    """Behind the header, in history too: what the modes share at the end is no message's beginning."""
    thought = "{% if enable_thinking %}<think></think>{% else %}</think>{% endif %}"
    source = (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.role == 'assistant' %}" + thought + "{% endif %}"
        "{{ m.content }}<|over|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    layout = layout_of(small(source, "<|turn|>", "<|over|>", "<think>", "</think>", stops=("<|over|>",)))
    assert (layout.openers, layout.header, layout.end) == ({"<|turn|>"}, "<|turn|>assistant\n", "<|over|>")


def test_a_line_end_before_the_token_that_begins_a_message_is_no_opener() -> None:
    """As Nemotron Nano v2 writes it: a line end behind every text, and only answers end in a token of their own."""
    source = (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}\n"
        "{% if m.role == 'assistant' %}<|over|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    layout = layout_of(small(source, "<|turn|>", "<|over|>", stops=("<|over|>",)))
    assert replace(layout, tails=frozenset()) == TurnLayout(
        frozenset({"<|turn|>"}), frozenset({"<|over|>"}), "<|turn|>assistant\n", "<|over|>"
    )


def test_a_line_end_before_tokens_that_are_roles_is_no_opener() -> None:
    """Each role has its token, and a line end stands before it."""
    tokenizer = small(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}" + TAIL, "<|user|>", "<|assistant|>"
    )
    layout = layout_of(tokenizer)
    assert (layout.header, layout.openers) == ("<|assistant|>", {"<|user|>", "<|assistant|>"})


def test_a_role_that_ends_an_answer_too_does_not_cut_a_header() -> None:
    """As Phi-3.5 has it, where the tokens of the roles are among those that stop it."""
    source = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}" + TAIL.replace(
        "|>", "|>\n"
    )
    layout = layout_of(
        small(source, "<|user|>", "<|assistant|>", "<|end|>", stops=("<|end|>", "<|user|>", "<|assistant|>"))
    )
    assert replace(layout, tails=frozenset()) == TurnLayout(
        frozenset({"<|end|>"}), frozenset(), "<|end|>\n<|assistant|>\n", "<|end|>"
    )


def test_a_template_that_fails_without_tools_is_used_with_tools() -> None:
    """As Hermes 3 walks through its tools: with one it is the template's own prompt, and its turns are found."""
    tokenizer = small(
        "{% for t in tools %}{{ t.function.description }} {{ t.function | tojson }}\n{% endfor %}"
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|over|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
        *("<|turn|>", "<|over|>"),
        stops=("<|over|>",),
    )
    template = ChatTemplate(tokenizer)
    question = (Message("user", (TextBlock("Where?"),)),)
    prompt = template.write(question, (ToolSpec("look", "Looks.", {"type": "object"}),), thinking=False)
    assert prompt.text.startswith('Looks. {"name": "look", ') and not prompt.notes
    assert prompt.text.endswith("}\n<|turn|>user\nWhere?<|over|><|turn|>assistant\n")
    assert template.write(question, thinking=False).notes[-1] == "no chat template: rendered as labelled plain text"
    assert layout_of(tokenizer).header == "<|turn|>assistant\n"


def test_the_end_is_the_token_that_stops_an_answer_behind_those_that_it_writes_itself() -> None:
    """As Cohere frames what is said; where no token behind an answer stops one, the first is its end."""
    source = (
        "{% for m in messages %}<|turn|><|{{ m.role }}|>{% if m.role == 'assistant' %}<|says|>{{ m.content }}<|/says|>"
        "{% else %}{{ m.content }}{% endif %}<|over|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|><|assistant|>{% endif %}"
    )
    tokens = ("<|turn|>", "<|user|>", "<|assistant|>", "<|says|>", "<|/says|>", "<|over|>")
    layout = layout_of(small(source, *tokens, stops=("<|over|>",)))
    ends = frozenset({"<|over|>"})
    assert replace(layout, tails=frozenset()) == TurnLayout(
        frozenset({"<|turn|>"}), ends, "<|turn|><|assistant|>", "<|over|>"
    )
    assert layout_of(small(source, *tokens)).end == "<|/says|>"


RESULTS_END = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "[RESULT]{{ m.content }}[/RESULT]{% elif m.tool_calls %}{% for c in m.tool_calls %}"
    "[CALL]{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


def test_an_answer_to_a_result_begins_behind_the_token_that_ends_the_result() -> None:
    """As Mistral and DeepSeek write it, without a header; a second result is no answer."""
    layout = layout_of(
        small(RESULTS_END, "[INST]", "[/INST]", "[RESULT]", "[/RESULT]", "[CALL]", "</s>", stops=("</s>",))
    )
    assert layout.headers == ("[/INST]", "[/RESULT]") and layout.others == {"[RESULT]"}
    pieces = [
        ("", "[INST]q"),
        ("[/INST]", "[CALL]a"),
        ("</s>", "[RESULT]x"),
        ("[/RESULT]", "[RESULT]y"),
        ("[/RESULT]", "a"),
    ]
    units = [Unit(1, 0, "[CALL]a", "[/INST]"), Unit(4, 1, "a", "[/RESULT]")]
    assert find_units(pieces, layout) == units
    assert find_units([*pieces[:4], ("[/RESULT]", "")], layout) == [units[0], Unit(4, 1, "", "[/RESULT]")]
    assert behind_header("[/RESULT]a</s>", layout) == "a</s>"


def test_a_second_result_that_looks_like_an_answer_is_none() -> None:
    """Where no token begins a result, the end of another one says nothing."""
    source = RESULTS_END.replace("[RESULT]", "")
    layout = layout_of(small(source, "[INST]", "[/INST]", "[/RESULT]", "[CALL]", "</s>", stops=("</s>",)))
    assert layout.headers == ("[/INST]",)


class Reads:
    """All of a turn is its content."""

    key = "all"

    def __call__(self, text: str) -> MessageParts:
        return "", text.removesuffix("</s>"), ()

    def ids(self, text: str, said: MessageParts) -> tuple[str, ...]:
        return ()


def test_a_header_does_not_end_inside_a_tag_of_thinking() -> None:
    """As it did for DeepSeek V3.1's template with V3's vocabulary, where such a tag is several tokens: both modes begin
    with the first of these."""
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think/>{% endif %}{{ m.content }}"
        "{% if m.role == 'assistant' %}<|over|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ '<think>' if enable_thinking else '<think/>' }}{% endif %}"
    )
    layout = layout_of(small(source, "<|user|>", "<|assistant|>", "<|over|>", stops=("<|over|>",)))
    assert layout.header == "<|assistant|>" and layout.tails <= {"<think>", "<think/>"}


def test_a_header_that_ends_like_the_beginning_of_a_tag_is_whole() -> None:
    """`[` begins `[THINK]` too."""
    source = "{% for m in messages %}]{{ m.role }}[{{ m.content }}]over[{% endfor %}"
    source += "{% if add_generation_prompt %}]assistant[{% endif %}"
    assert layout_of(small(source, "]user[", "]assistant[", "]over[", stops=("]over[",))).header.endswith("]assistant[")


@pytest.mark.parametrize(("header", "num_replayed"), [("[/RESULT]", 1), ("[/INST]", 0)])
def test_an_answer_is_replayed_only_behind_the_header_that_the_model_read(header: str, num_replayed: int) -> None:
    """The same words behind a question are another place: a replay there would take the result's end away."""
    tokenizer = small(RESULTS_END, "[INST]", "[/INST]", "[RESULT]", "[/RESULT]", "[CALL]", "</s>", stops=("</s>",))
    template = ChatTemplate(tokenizer)
    stitcher = Stitcher.of(tokenizer, template, learn_markers(tokenizer, template))
    odd = tokenizer.encode("hel") + tokenizer.encode("lo world")
    written = Written(Message("assistant", (TextBlock("hello world"),)), tokenizer.encode(header), odd, False)
    text = "[INST]q[/INST][CALL]look{}</s>[RESULT]x[/RESULT]hello world</s>[INST]z[/INST]"
    stitched = stitcher.tokens(PromptText(text, False), (None, written), Reads())
    assert stitched.num_replayed_turns == num_replayed
    assert tokenizer.decode(stitched.ids) == text
    assert (stitched.ids == tokenizer.encode(text)) is not bool(num_replayed)


class ReadsThinking(Reads):
    """What stands between tags is thinking."""

    def __call__(self, text: str) -> MessageParts:
        thought, closed, said = text.partition("</think>")
        return (thought.removeprefix("<think>"), said.removesuffix("<|over|>"), ()) if closed else ("", text, ())


@pytest.mark.parametrize(
    ("kept", "tail", "num_replayed"),
    [
        ("", "<think>No time.</think>", 1),
        ("", "<think>My own.</think>", 0),
        ("<think>No time.</think>", "<think>No time.</think>", 1),
    ],
)
def test_what_the_template_thinks_in_a_prompts_tail_is_not_the_answers(kept: str, tail: str, num_replayed: int) -> None:
    """As Seed-OSS has its budget said: history has the answer alone, with the ids of the tail that the model read, or
    `kept` before it. What a client put there instead is its own, and stays where it is."""
    source = (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.role == 'assistant' and not enable_thinking %}KEPT"
        "{% endif %}{{ m.content }}<|over|>{% endfor %}{% if add_generation_prompt %}"
        "<|turn|>assistant\n{% if not enable_thinking %}<think>No time.</think>{% endif %}{% endif %}"
    ).replace("KEPT", kept)
    tokenizer = small(source, "<|turn|>", "<|over|>", stops=("<|over|>",))
    template = ChatTemplate(tokenizer)
    stitcher = Stitcher.of(tokenizer, template, learn_markers(tokenizer, template))
    prefix = tokenizer.encode(f"<|turn|>assistant\n{tail}")
    odd = tokenizer.encode("hel") + tokenizer.encode("lo world")
    written = Written(Message("assistant", (TextBlock("hello world"),)), prefix, odd, False)
    history = "<|turn|>user\nq<|over|><|turn|>assistant\n{}hello world<|over|><|turn|>user\nz<|over|>"
    stitched = stitcher.tokens(PromptText(history.format(kept), False), (written,), ReadsThinking())
    assert stitched.num_replayed_turns == num_replayed
    assert tokenizer.decode(stitched.ids) == history.format(tail if num_replayed else kept)
