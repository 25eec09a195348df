"""The compiled template: its sandbox finds and forbids what Hugging Face's does."""

import jinja2
import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template as compile_template

from kvserve.prompt.compiled import CompiledTemplate, Refusal
from tests.laws import sampled

MESSAGE = {
    "role": "user",
    "content": " hi </think> there ",
    "items": "a key with a method's name",
    "_private": "a key",
    "parts": [{"type": "text", "text": "x"}],
    "nothing": None,
}
EXPRESSIONS = (
    *(f"message.{name}" for name in ("role", "items", "missing", "missing.deeper", "_private", "__class__", "nothing")),
    *("message.items()", "message.get('role')", "message['role']", "message['missing'] is defined"),
    *("message.pop('role')", "message.update({})", "message.clear", "message.missing is defined"),
    *("message.content.split('</think>')[-1].lstrip()", "message.content.strip().startswith('hi')"),
    *("message.content.format", "'{0.__class__}'.format(message)", "message.content.__class__", "message.content.none"),
    *("message.parts[0].text", "message.parts.append(1)", "message.parts | map(attribute='text') | join"),
    *(f"loop.{name}" for name in ("index0", "last", "previtem", "nextitem.role", "missing", "__class__", "_iterable")),
    *("loop.cycle('a', 'b')", "loop.changed(1)", "loop(2)", "[loop] | map(attribute='first') | list"),
    *("dict(a=1).a", "namespace(a=1).a", "messages | selectattr('role', 'equalto', 'user') | list | length"),
    *(f"namespace(a=1, b=none, items='x').{name}" for name in ("b", "items", "c", "c.d", "_a", "__class__")),
    *("namespace(a=message.items).a()", "namespace(a='{0.__class__}'.format).a(message)", "namespace(a=message).a.pop"),
    *("message.content.split(sep=' ', maxsplit=1)", "message.content.split(1)", "message.content.strip(no=1)"),
    *("message.content.join(['a', 'b'])", "message.content.join(message.parts)", "message.content.encode().hex()"),
    *("say('a')", "say(b='<')", "say('a', 'b', 'c')", "say('a', no=1)", "say(message.missing)"),
    *(
        "say(say('a') | upper)",
        "say",
        "say.name",
        "say.arguments",
        "say._func",
        "say('a').strip('[]')",
        "down(3)",
        "outer()",
        "failing()",
    ),
)
BOTH = "{{% set found = {0} %}}{{{{ found is defined }}}} {{{{ found }}}} {{{{ {0} }}}}"
"""Given a name, and where it stands."""
MACROS = (
    "{% macro say(a, b='b') %}[{{ a }}{{ b }}{{ item is defined }}{{ message.role }}]{% endmacro %}"
    "{% macro down(n) %}{{ n }}{% if n %}{{ down(n - 1) }}{% endif %}{% endmacro %}"
    "{% macro around() %}({{ caller('c') }}{{ varargs }}{{ kwargs }}){% endmacro %}"
    "{% macro outer() %}{% call(c) around() %}{{ c }}{% endcall %}{% endmacro %}"
    "{% macro failing() %}{{ raise_exception('no') }}{% endmacro %}"
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize(
    "form",
    sampled(
        ("{{{{ {} }}}}", "{{% set found = {} %}}{{{{ found is defined }}}} {{{{ found }}}}", BOTH),
        {BOTH},
    ),
)
def test_a_field_is_found_or_refused_as_in_the_sandbox(expression: str, form: str) -> None:
    """The short ways to fields and methods lead to the same values; what is unsafe stays so, and nothing is changed."""
    source = MACROS + "{% for item in [message, message] %}" + form.format(expression) + "{% endfor %}"
    message = dict(MESSAGE)
    given = {"messages": [message], "message": message, "tools": None, "add_generation_prompt": False}
    try:
        theirs: str | None = compile_template(source).render(given)
    except (jinja2.TemplateError, TypeError) as error:
        theirs = None
        reason = f"{type(error).__name__}: {error}"
    template = CompiledTemplate(source, {})
    ours = template.render([message], None, add_generation_prompt=False, arguments={"message": message})
    if theirs is None:
        assert ours == Refusal(reason)
    elif " at 0x" in theirs:
        assert isinstance(ours, str) and ours.partition(" at 0x")[0] == theirs.partition(" at 0x")[0]
    else:
        assert ours == theirs
    assert message == MESSAGE


def test_what_hugging_face_gives_to_templates_is_there() -> None:
    """Its JSON filter without escapes, its loop controls, its error and its tag for the assistant's own words."""
    source = (
        "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ message | tojson }}{% endgeneration %}{% endfor %}"
    )
    rendered = CompiledTemplate(source, {}).render(
        [{"content": "<é>"}, {"content": "b"}], None, add_generation_prompt=False, arguments={}
    )
    assert rendered == '{"content": "<é>"}'
    refused = CompiledTemplate("{{ raise_exception('no') }}", {})
    assert refused.render([], None, add_generation_prompt=False, arguments={}) == Refusal("TemplateError: no")
