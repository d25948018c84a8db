"""Chat templates: programs from the network, rendered as transformers renders them, within limits."""

import jinja2
import pytest

from kvjax.base.errors import InputError
from kvjax.io.load import load
from kvjax.models import tokenizer
from kvjax.models.model import Model
from kvjax.models.tokenizer import chat, render_chat


def talks(template, **special):
    model = load("recall-tiny")
    return Model(
        model.config, model.params, tokenizer=model.tokenizer, chat_template=template, special_tokens=special
    )


def say(template, *messages, **special):
    return render_chat(talks(template, **special), messages)


def test_the_sandbox_is_the_one_without_the_known_way_out():
    assert tuple(map(int, jinja2.__version__.split("."))) >= (3, 1, 6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", '{"é": [1, "<"], "a": null}'),
        ("ensure_ascii=True", '{"\\u00e9": [1, "<"], "a": null}'),
        ("separators=(',', ':'), sort_keys=true", '{"a":null,"é":[1,"<"]}'),
        ("indent=1", '{\n "é": [\n  1,\n  "<"\n ],\n "a": null\n}'),
    ],
)
def test_tojson_takes_the_options_of_transformers(options, expected):
    message = {"role": "tool", "content": {"é": [1, "<"], "a": None}}
    assert say("{{ messages[0].content | tojson(" + options + ") }}", message) == expected


def test_content_that_is_none_is_lacking():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": None}]}
    assert say("{% if messages[0].content is not defined %}none{% endif %}", call) == "none"
    assert say("{{ messages[0].content }} | {{ messages[0] | tojson }}", call) == (
        ' | {"role": "assistant", "tool_calls": [{"name": null}]}'
    )
    with pytest.raises(InputError, match=r"does not accept these messages: 'dict object' has no attribute"):
        say("{{ 'a' + messages[0].content }}", call)


def test_repeat_prompt_is_no_variable_and_special_tokens_are():
    special = {"repeat_prompt": "again", "image_token": "<i>", "eos_token": "<e>"}
    assert say("{{ repeat_prompt }}{{ image_token }}{{ eos_token }}", **special) == "<i><e>"


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "Expected an expression"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ ('{0.__class__.__init__.__globals__}' | attr('format'))(messages) }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ 'a' * 10**11 }}", "took more than 300 MiB"),
        ("{{ 'a' * 10**6 }}", "wrote more than 1000 characters"),
        ("{% for i in range(2000) %}a{% endfor %}", "wrote more than 1000 characters"),
        pytest.param(
            "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}", "more than 1 s",
            marks=pytest.mark.rotating,
        ),
        ("{{ 9 ** (9 ** 9) }}", "more than 1 seconds"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)  # fmt: skip
def test_every_error_of_a_template_is_one_sentence_within_its_limits(template, says, monkeypatch):
    limits = {"SECONDS": 1, "MEGABYTES": 300, "CHARACTERS": 1000}
    for name, value in limits.items():
        monkeypatch.setattr(tokenizer, name, value)
    with pytest.raises(InputError, match=says):
        say(template)


def test_a_python_that_cannot_start_is_named(monkeypatch):
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(InputError, match="its process could not start"):
        say("hello")


def test_a_template_that_waits_is_ended_by_the_clock(monkeypatch):
    monkeypatch.setattr(tokenizer, "PATIENCE", 0.01)
    with pytest.raises(InputError, match=r"ran for more than 0\.01 seconds"):
        say("hello")


@pytest.mark.parametrize("messages", ["hi", ["hi"], [1]])
def test_messages_are_dicts(messages):
    with pytest.raises(InputError, match="messages are .*, expected a list of dicts"):
        render_chat(talks("a"), messages)
    with pytest.raises(InputError, match="messages hold what JSON cannot say"):
        say("a", {"role": "user", "content": b"x"})


def test_half_a_character_is_named():
    user = {"role": "user", "content": "a \ud800"}
    assert say("{{ messages[0].content }}", user) == "a \ud800"
    with pytest.raises(InputError, match=r"the conversation has half a character \(\\ud800\) at 2"):
        chat(talks("{{ messages[0].content }}"), [user])
