"""Named templates: `tool_use` for requests with tools, the default for all others, as in transformers."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.template_cases import READ, answer, call, result, user
from benchmarks.template_folders import TEMPLATES, source_of
from benchmarks.template_model import load_model
from benchmarks.template_reference import Conversation, Reference, Rendered
from benchmarks.template_render import written
from kvserve.demo.build import TEMPLATE_FOLDER
from kvserve.errors import ModelLoadError
from kvserve.prompt.compiled import CompiledTemplate, by_tools
from kvserve.prompt.tokenizer import load_tokenizer
from tests.laws import num_examples
from tests.models import tiny_model

PLAIN = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""No word of tools and none of calls, as the default beside many a `tool_use`."""

PIECES = (
    *(" ", "\n", "\r\n", "\r", "x", "{{ a }}", "{{- a -}}", "{{ a | default('none') }}"),
    *("{# a note #}", "{#- a note -#}", "{% set a = 1 %}", "{%- set a = 2 -%}", "{%+ set b = a +%}", "{{ b }}"),
    *("{% if a is defined %}\n y\n {% endif %}", "{% for i in [1, 2] %}{{ i }} {% endfor %}\n"),
    *(
        "{% macro m(n) %} {{ n }}{{ a }}\n{% endmacro %}",
        "{{ m(1) if m is defined }}",
        "{% raw %} {{ a }} {% endraw %}",
    ),
    *("{% set s = namespace(a=3) %}", "{{ s.a if s is defined }}", "{% if tools %}t{% else %}n{% endif %}"),
)
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
sources = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def rendered(source: str, tools: list[Any] | None) -> object:
    return CompiledTemplate(source, {}).render([], tools, add_generation_prompt=True, arguments={"b": "given"})


@settings(max_examples=num_examples(25))
@given(without=sources, with_tools=sources)
@example(without="x \n ", with_tools=" {% if true %}y{% endif %}\n  ")
def test_one_of_two_templates_is_itself_to_the_letter(without: str, with_tools: str) -> None:
    """White space at its edges, line ends, variables and macros of the same names: nothing of the other one shows."""
    one = by_tools(without, with_tools)
    assert rendered(one, None) == rendered(without, None)
    assert rendered(one, [{}]) == rendered(with_tools, [{}])


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES or ["none"])
def test_so_is_one_of_two_real_ones(name: str) -> None:
    """With the next of them beside it: macros, loops and namespaces of the same names."""
    if not TEMPLATES:
        pytest.skip("the real templates (shared/templates) are not here")
    sources = [source_of(each) for each in (name, TEMPLATES[(TEMPLATES.index(name) + 7) % len(TEMPLATES)])]
    one, *alone = (CompiledTemplate(source, VARIABLES) for source in (by_tools(*sources), *sources))
    begun = [user("How is it?"), answer("It is fine."), user("And then?")]
    for said, tail in product((begun[:1], begun), (False, True)):
        for template, tools in zip(alone, (None, [READ]), strict=True):
            wanted = template.render(said, tools, add_generation_prompt=tail, arguments={})
            assert one.render(said, tools, add_generation_prompt=tail, arguments={}) == wanted


def named_folder(folder: Path, **templates: str) -> Path:
    """A tokenizer with these templates in its configuration."""
    for file in tiny_model("qwen3").iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder / file.name)
    path = folder / "tokenizer_config.json"
    listed = [{"name": name, "template": source} for name, source in templates.items()]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": listed}))
    return folder


def test_tools_choose_the_template_as_in_transformers(tmp_path: Path) -> None:
    """Text and ids, without tools, with tools, and in a conversation that gets its first tools later; calls are read
    and shown in the form of `tool_use`."""
    tool_use = (TEMPLATE_FOLDER / "qwen3.jinja").read_text("utf-8")
    folder = named_folder(tmp_path, default=PLAIN, tool_use=tool_use, rag="{{ 1 }}")
    model, reference = load_model(folder), Reference(folder)
    begun = (user("How is it?"), answer("It is fine."), user("And then?"))
    called = (*begun, answer(None, call("c1", "read_file", {"path": "a"})), result("c1", "Eleven lines."))
    texts = []
    for said in (
        Conversation(begun[:1]),
        Conversation(begun),
        Conversation(begun, (READ,)),
        Conversation(called, (READ,)),
    ):
        wanted = reference.rendered(said)
        assert isinstance(wanted, Rendered)
        assert written(model, said) == (wanted.text, reference.ids(wanted.text))
        texts.append(wanted.text)
    assert [("# Tools" in text, "read_file" in text) for text in texts] == [(False, False)] * 2 + [(True, True)] * 2
    assert model.template.accepts_tools and model.unheld is None and model.stitcher.replays


def test_a_named_template_that_is_broken_is_told_by_its_name(tmp_path: Path) -> None:
    """With the line of its own; without a default there is nothing to write a prompt without tools."""
    with pytest.raises(ModelLoadError, match=r"'tool_use' .* is broken at line 2: "):
        load_tokenizer(named_folder(tmp_path, default=PLAIN, tool_use="\n{% if %}"))
    with pytest.raises(ModelLoadError, match="none of them named default"):
        load_tokenizer(named_folder(tmp_path, tool_use=PLAIN, rag=PLAIN))
