"""What the methods of `table_selection.py` leave of a prompt, and what leaves in steps, in float64 numpy."""

from __future__ import annotations

import numpy as np

from kvjax.fitted import Fitted
from tests.methods.expected import ends, kv_lists, received
from tests.methods.rows import WINDOW, count
from tests.reference import best

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


SEPARATORS = tuple(range(1, 64, 5))


def separators_first(prompt, layer):
    """More than any position for a separator, and newer tokens before older ones."""
    at = np.arange(prompt.length) + 1e6 * np.isin(prompt.tokens, SEPARATORS)
    return np.broadcast_to(at, (kv_lists(prompt), prompt.length))


def sepllm_victim(lists, length, queries, sinks=2, window=3):
    """The oldest of the tokens that are no separators; where there is none, the oldest separator."""
    out = []
    for slots in lists:
        able = [i for i, s in enumerate(slots) if sinks <= s["pos"] < length - window]
        worst = min(able, key=lambda i, s=slots: (s[i]["token"] in SEPARATORS, s[i]["pos"]), default=None)
        out.append(worst if len(slots) > count(length) else None)
    return out


LADDER = dict(recover=0.5, frequent=0.3, local=0.2, sinks=1, window=WINDOW)


def fastgen_kept(prompt):
    at, t, found = np.arange(prompt.length), prompt.length, []
    for layer, p in enumerate(prompt.p):
        given = p[:, -WINDOW:].mean(1).reshape(-1, prompt.group, t).mean(1)
        often = best(received(prompt, layer), int(LADDER["frequent"] * t + 1e-9))
        keeps = []
        for mine, heavy in zip(given, often, strict=True):
            slots = at < LADDER["sinks"]
            more = [np.isin(prompt.tokens, SEPARATORS), heavy, at >= t - int(LADDER["local"] * t + 1e-9)]
            for one in (*more, np.ones(t, bool)):
                if mine[slots].sum() >= LADDER["recover"]:
                    break
                slots = slots | one
            keeps.append(slots)
        found.append(np.stack(keeps))
    return found
