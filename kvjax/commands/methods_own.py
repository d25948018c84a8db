"""The card of a method in a user's own file: its docstring, its grammar and its hyper-parameters."""

from __future__ import annotations

import inspect

from kvjax.base.errors import InputError
from kvjax.commands.code_reading import read_by
from kvjax.commands.methods_cards import SHOWN_BUDGET, Card, docstring_parts, hyper_of
from kvjax.grammar import Method
from kvjax.grammar.to_text import name_with
from kvjax.methods import MethodInfo, info_of
from kvjax.methods.parse import single
from kvjax.methods.user import from_file, load_function


def own_card(text: str) -> Card:
    """Build the card of `path/to/file.py:function`, with the hyper-parameters given in the text.

    Raises InputError if there is no such function, or it builds no method.
    """
    name, hyper = single(text)
    function = load_function(name)
    parameters = inspect.signature(function).parameters
    needs = {"budget": SHOWN_BUDGET} if "budget" in parameters and "budget" not in dict(hyper) else {}
    built = from_file(name, **dict(hyper), **needs)
    title, about, deviations = docstring_parts(inspect.getdoc(function) or "It has no docstring.")
    paper = getattr(function, "paper", None)
    return Card(
        info=_info(name, paper, built), aliases=(), title=title, about=about, deviations=deviations,
        call=f"kvjax.method({name_with(name, tuple(sorted({**dict(hyper), **needs}.items())))!r})",
        sentence=built.words, hyper=hyper_of(function), fit="", fits=(),
        press=getattr(paper, "kvpress", None), chains={}, refused={}, lines=(),
        codes=read_by(built),
    )  # fmt: skip


def _info(name: str, paper: object, built: Method) -> MethodInfo:
    known = {field: getattr(paper, field, "") for field in ("title", "arxiv", "family", "exact")}
    known["family"] = known["family"] or "your own"
    press = getattr(paper, "kvpress", None)
    return info_of(
        name, built, year=getattr(paper, "year", None), kvpress=press.name if press else "", **known
    )


def check_one(text: str) -> None:
    """Raise InputError for a text with more than an id, for which there is no card."""
    if any(sign in text for sign in "+(:"):
        raise InputError(
            f"{text!r} is more than the name of a method, expected an id such as snapkv, or "
            f'my_file.py:my_method: try kvjax explain "{text}"'
        )
