"""The page's card of each compared method: families, papers, and a link from every mention."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from html import escape

from kvjax.methods import ALIASES, METHODS
from kvjax.methods.papers import Paper

OWN = "your own"
_EXACT = {"equal": "the paper's equations", "deviates": "deviates from its paper"}


def ids_of(label: str) -> tuple[str, ...]:
    """Return the ids of the library's methods in a label, in order.

    >>> ids_of("snapkv:window=8 + kivi"), ids_of("per_layer(adakv, full)"), ids_of("mine.py:full")
    (('snapkv', 'kivi'), ('adakv', 'full'), ())
    """
    found: list[str] = []
    for piece in label.split(" + "):
        if ".py:" in piece:
            continue
        name, *inside = re.split(r"[:(]", piece, maxsplit=1)
        names = [name] if _id(name) else [x for part in inside for x in re.split(r"[\s,()\[\]]+", part)]
        found += [id for one in names if (id := _id(one))]
    return tuple(dict.fromkeys(found))


def _id(name: str) -> str:
    name = name.strip().lower().replace("_", "-")
    name = ALIASES.get(name, name)
    return name if name in METHODS else ""


def families_of(label: str) -> tuple[str, ...]:
    """Return the families of the methods in a label; those of a user have one of their own.

    >>> families_of("snapkv + kivi"), families_of("mine.py:best")
    (('selection-static', 'quant-mixed'), ('your-own',))
    """
    found = dict.fromkeys(METHODS[id].paper.family for id in ids_of(label))
    return tuple(found) or (OWN.replace(" ", "-"),)


def anchor_of(label: str) -> str:
    """Return the name of a method's place on the page."""
    return "card-" + re.sub(r"[^A-Za-z0-9_-]", lambda found: f".{ord(found[0]):x}", label)


def linked(label: str, known: Iterable[str]) -> str:
    """Link a method's name, as HTML, to its card if it has one."""
    name = escape(label)
    return f'<a href="#{anchor_of(label)}">{name}</a>' if label in known else name


def family_filter(labels: Iterable[str]) -> str:
    """Make a checkbox per family of these methods, all ticked; "" if there is only one family."""
    families = list(dict.fromkeys(family for label in labels for family in families_of(label)))
    if len(families) < 2:
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" name="family" value="{escape(name)}" checked>'
        f"<span>{escape(name.replace('-', ' '))}</span></label>"
        for name in families
    )
    return f'<fieldset aria-label="families">{boxes}</fieldset>'


def filter_bar(labels: Iterable[str], protocols: str = "") -> str:
    """Make the page's filters: buttons of protocols, and a checkbox per family; "" if there are neither."""
    families = family_filter(labels)
    if not protocols and not families:
        return ""
    return f'<nav class="controls" aria-label="what is shown">{protocols}{families}</nav>'


def cards_section(labels: Iterable[str]) -> str:
    """Make a card per method: a one-line summary, its paper with a link, and how it compares with that.

    >>> "https://arxiv.org/abs/2404.14469" in cards_section(["snapkv"])
    True
    """
    cards = "".join(map(_card, dict.fromkeys(labels)))
    return f"""<section id="cards"><h2>The methods</h2>
<p class="muted"><code>kvjax methods ID</code> prints all that is known of one.</p>
<div class="cards">{cards}</div></section>"""


def _card(label: str) -> str:
    ids = ids_of(label)
    about = "".join(_about(id) for id in ids) or '<p class="muted">A method of your own.</p>'
    opening = f'<article id="{anchor_of(label)}" data-families="{escape(" ".join(families_of(label)))}">'
    return f"{opening}<h3>{escape(label)}</h3>{about}</article>"


def _about(id: str) -> str:
    known: Paper = METHODS[id].paper
    line = inspect.cleandoc(METHODS[id].__doc__ or "").partition("\n")[0]
    words = [escape(known.family.replace("-", " ")), *([_EXACT[known.exact]] if known.exact else [])]
    if known.arxiv:
        words.append(
            f'<a href="https://arxiv.org/abs/{known.arxiv}" rel="noreferrer">arXiv:{known.arxiv}</a>'
        )
    title = f"<cite>{escape(known.title)}</cite>" if known.arxiv else ""
    return f'<p>{escape(line)}</p><p class="muted">{title} {" · ".join(words)}</p>'
