"""What the methods of `table_selection.py` leave of a prompt, and what leaves in steps, in float64 numpy."""

from __future__ import annotations

import numpy as np

from kvjax.fitted import Fitted
from tests.methods.expected import ends

PROFILE = Fitted({"importance": np.array([[0.1, 0.7], [0.0, 0.4]], np.float32)}, "CopyProfile", "")
# Of 2 layers and 4 query heads: two for what followed, one for the token itself: three KV heads of four.
LOOKS_BACK = Fitted(
    {
        "induction": np.array([[0.1, 0.2, 0.0, 0.0], [0.3, 0.1, 0.1, 0.0]], np.float32),
        "echo": np.array([[0.0, 0.1, 0.1, 0.1], [0.3, 0.3, 0.9, 0.1]], np.float32),
    },
    "RepeatingHeads",
    "",
)
RAZOR = dict(induction=0.25, echo=0.125, sinks=2, window=3, share=0.4)
LOOKING_BACK = [[True, False], [True, True]]


def razor_kept(prompt):
    near = ends(RAZOR["sinks"], max(RAZOR["window"], int(RAZOR["share"] * prompt.length + 1e-9)))(prompt)
    assert RAZOR["window"] < RAZOR["share"] * prompt.length
    return [np.stack([near | whole for whole in heads]) for heads in LOOKING_BACK]
