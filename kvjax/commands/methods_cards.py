"""A method's card: what its function, its grammar and its combinations with other methods tell about it.

`methods_text.py` prints cards.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from typing import Any, NamedTuple

from kvjax.commands.code_reading import read_by
from kvjax.compat.model_fit import check_fit
from kvjax.eval.report.leaderboard import Line, lines_of
from kvjax.grammar import Method, chain
from kvjax.grammar.fitted import SHIPPED
from kvjax.grammar.to_text import written
from kvjax.methods import METHODS, MethodInfo, Press, method, methods, takes_budget
from kvjax.methods.parameters import types_of, values_of
from kvjax.models.config import Config

# The budget of the methods that cards show.
SHOWN_BUDGET = 0.25
# The decisions that a method may make, and how a card describes them.
VERBS = {
    "keep": "keeps",
    "store": "stores",
    "read": "reads",
    "read_prompt": "blocks of prompts",
    "make": "makes",
    "stack": "layers merged",
    "reread": "prompts read in part",
    "host": "host memory",
}
# A model of plain attention, on which chains with a method that makes another model are tried. It refuses
# methods that need a fit.
PLAIN = Config(vocab=64, d_model=128, layers=4, heads=4, kv_heads=4, head_dim=32, d_ff=128)
_ONE_OF_A_KIND = re.compile(r"at most one \w+")


class Hyper(NamedTuple):
    """A hyper-parameter: its default as Python source ("" if it is required), and its allowed values."""

    name: str
    default: str
    values: str


class Card(NamedTuple):
    """What a card tells about one method.

    about and deviations: the two parts of the method's docstring. fit: the command that fits it; fits: the
    models for which fitted arrays ship with kvjax. press: its class of kvpress. chains: ids of the methods
    that it chains with, by what they decide. refused: ids of those that it does not chain with, by the
    reason, except that a method has only one keep. lines: its lines of the leaderboard. codes: how its codes
    are read.
    """

    info: MethodInfo
    aliases: tuple[str, ...]
    title: str
    about: str
    deviations: str
    call: str
    sentence: str
    hyper: tuple[Hyper, ...]
    fit: str
    fits: tuple[str, ...]
    press: Press | None
    chains: dict[str, list[str]]
    refused: dict[str, list[str]]
    lines: tuple[Line, ...]
    codes: str = ""


def card(id: str) -> Card:
    """Build the card of a method by its id.

    >>> card("snapkv").call
    "kvjax.method('snapkv', budget=0.25)"
    """
    function, built = METHODS[id], shown(id)
    title, about, deviations = docstring_of(id)
    budget = f", budget={SHOWN_BUDGET}" if takes_budget(id) else ""
    chains, refused = _company(id)
    info = infos()[id]
    return Card(
        info=info,
        aliases=function.paper.aliases,
        title=title,
        about=about,
        deviations=deviations,
        call=f"kvjax.method({id!r}{budget})",
        sentence=written(built),
        hyper=hyper_of(function),
        fit=f"kvjax fit {id} --out {id}.safetensors" if info.training else "",
        fits=tuple(sorted(file.parent.name for file in SHIPPED.glob(f"*/{id}.safetensors"))),
        press=function.paper.kvpress,
        chains=chains,
        refused=refused,
        lines=lines_of(id),
        codes=read_by(built),
    )


@cache
def infos() -> dict[str, MethodInfo]:
    """Return the entries of `kvjax.methods()`, by id."""
    return {info.id: info for info in methods()}


def shown(id: str) -> Method:
    """Return the method with its defaults and the budget that cards show."""
    return method(id, **({"budget": SHOWN_BUDGET} if takes_budget(id) else {}))


def plain(card: Card) -> dict[str, Any]:
    """Return a card as plain values, for JSON."""
    info = card.info._asdict() | {"verbs": list(card.info.verbs)}
    hyper, lines = ([one._asdict() for one in many] for many in (card.hyper, card.lines))
    press = card.press and card.press._asdict()
    return card._asdict() | {"info": info, "hyper": hyper, "press": press, "lines": lines}


def families() -> dict[str, list[str]]:
    """Return the ids of methods by their families."""
    found: dict[str, list[str]] = {}
    for id, function in METHODS.items():
        found.setdefault(function.paper.family, []).append(id)
    return found


def about_family(family: str) -> str:
    """Return what the methods of a family have in common: the first paragraphs of its modules' docstrings.

    >>> about_family("merge-layer")
    'Merging layers: neighbours in the stack are stored as one.'
    """
    return " ".join(abouts(family))


def abouts(family: str) -> list[str]:
    """Return the first paragraph of the docstring of every module of a family."""
    modules = dict.fromkeys(METHODS[id].__module__ for id in families()[family])
    texts = [(sys.modules[name].__doc__ or "").strip().split("\n\n")[0] for name in modules]
    return [text.replace("\n", " ") for text in texts]


def docstring_of(id: str) -> tuple[str, str, str]:
    """Split a docstring into parts: its first line, the rest, and the deviations.

    The deviations are from the word "Deviation" to the paragraph's end.

    >>> docstring_of("h2o")[0]
    'H2O (Zhang et al., 2023, arXiv:2306.14048), Algorithm 1: heavy hitters and recent tokens.'
    """
    return docstring_parts(inspect.cleandoc(METHODS[id].__doc__ or ""))


def docstring_parts(text: str) -> tuple[str, str, str]:
    """Split a docstring without indents into the parts of `docstring_of`."""
    first, _, rest = text.partition("\n")
    about, deviations = [], []
    for paragraph in re.split(r"\n\s*\n", rest.strip()):
        before, word, after = re.search(r"^(.*?)(\bDeviations?:|$)(.*)$", paragraph, re.DOTALL).groups()  # type: ignore[union-attr]
        about += [before.strip()] if before.strip() else []
        deviations += [" ".join(after.split())] if word else []
    return first.strip(), "\n\n".join(about), " ".join(deviations)


def hyper_of(function: Any) -> tuple[Hyper, ...]:
    """Return the hyper-parameters of a method's function."""
    types = types_of(function)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        default = "" if parameter.default is parameter.empty else repr(parameter.default)
        found.append(Hyper(name, default, values_of(types.get(name))))
    return tuple(found)


@cache
def _fits(method: Method) -> bool:
    """Whether a plain model accepts a method as it is; a method that needs a fit is not accepted."""
    try:
        check_fit(method, PLAIN)
    except ValueError:
        return False
    return True


def _company(id: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the methods that this one chains with, by what they decide, and the others, by the reason."""
    own, chains, refused = shown(id), {}, {}
    for other in METHODS:
        theirs = shown(other)
        parts = [name for name in VERBS if getattr(theirs, name) is not None]
        if other == id or not parts or own == Method():
            continue
        try:
            both = chain(own, theirs)
            # On the model that one of the two rewrites, the other may have no keys to attend to.
            if both.make is not None and _fits(own) and _fits(theirs):
                check_fit(both, PLAIN)
        except ValueError as error:
            reason = re.split(" cannot work: | does not fit this model: ", str(error), maxsplit=1)[-1]
            if not _ONE_OF_A_KIND.search(reason):
                refused.setdefault(reason, []).append(other)
        else:
            for name in parts:
                chains.setdefault(VERBS[name], []).append(other)
    return chains, refused
