"""The report's section of methods' scores and kept tokens: one picture each, initially collapsed."""

import base64
from collections.abc import Sequence
from html import escape
from typing import NamedTuple


class Picture(NamedTuple):
    """A method on one prompt: its name, the means over layers and heads of `kvjax.scores`, and the PNG."""

    name: str
    overlap: float
    mass: float
    png: bytes


def scores_section(pictures: Sequence[Picture]) -> str:
    """Write the section as HTML, empty without pictures.

    >>> "h2o &lt; 3</b>: 50% of" in scores_section([Picture("h2o < 3", 0.5, 0.75, b"")])
    True
    """
    if not pictures:
        return ""
    shown = "\n".join(map(_details, pictures))
    return f"""<section><h2>What each method scores</h2>
<p class="muted">The first prompt by layer and head, at each method's first budget. The oracle is the
attention that the question and the right answer pay to the prompt when nothing is dropped. Click a method to
see its picture.</p>
{shown}</section>"""


def _details(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode("ascii")
    name = escape(picture.name)
    return f"""<details><summary><b>{name}</b>: {100 * picture.overlap:.0f}% of what it keeps is the oracle's
choice, {100 * picture.mass:.0f}% of the oracle's attention is kept</summary>
<img src="data:image/png;base64,{data}" alt="What {name} keeps, by layer, head and token"></details>"""
