"""Joined texts with a share of tokens read again (CacheBlend): KL by that share.

    python -m scripts.studies.joined run        # measures the windows that are missing
    python -m scripts.studies.joined            # prints the table
    python -m scripts.studies.joined --write    # writes it into docs/how-to/prefixes.md

Windows of prose are cut into pieces, each piece is read separately, and the caches are joined in order
(`kvjax.join`). The tokens after the window are read over the joined cache, and over that of the whole window.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvjax
from kvjax.models.model import Model
from kvjax.state.cache import Cache
from scripts.docs_tables import DOCS
from scripts.studies.runner import Data, Page, progress, study

DATA = Data(DOCS / "joined.json", {"about": {}, "windows": {}})
TEXT = DOCS.parent / "kvjax" / "eval" / "tasks" / "ruler" / "data" / "alice29.txt"
PIECES, LENGTH, AFTER = 8, 128, 64
STARTS = (2000, 22000, 42000, 62000, 82000, 102000, 122000, 142000)
SHARES = (0.0, 0.05, 0.15, 0.3, 0.6, 1.0)


def run(model: Model) -> None:
    """Measure the missing windows, and write each to the data when it is done."""
    about = {"model": model.name, "text": TEXT.name, "pieces": PIECES, "tokens": LENGTH, "behind": AFTER}
    for start in progress(s for s in STARTS if str(s) not in DATA.read()["windows"]):
        row = {str(start): measured(model, start)}
        DATA.change(lambda data, row=row: data.update(about=about, windows=data["windows"] | row))


def measured(model: Model, start: int) -> list[float]:
    """For each share, KL from the model's predictions over the whole window, in nats per token."""
    text = TEXT.read_text()[start : start + 16 * PIECES * LENGTH]
    ids = list(model.tokenizer.encode(text).ids)[: PIECES * LENGTH + AFTER]
    window, behind = ids[: PIECES * LENGTH], ids[PIECES * LENGTH :]
    pieces = [window[at : at + LENGTH] for at in range(0, len(window), LENGTH)]
    want = said(model, kvjax.prefill(model, [window], room=AFTER)[1], behind)
    caches = [kvjax.prefill(model, [piece])[1] for piece in pieces]
    found = []
    for share in SHARES:
        past = kvjax.join(model, caches, room=AFTER, texts=[[p] for p in pieces], recompute=share)
        got = said(model, past, behind)
        found.append(round(float((jnp.exp(want) * (want - got)).sum(-1).mean()), 6))
    return found


def said(model: Model, cache: Cache, tokens: Sequence[int]) -> Float[Array, "T V"]:
    """Compute log p of every next token; consume the cache."""
    return jax.nn.log_softmax(kvjax.verify(model, cache, [list(tokens)])[0][0])


def table() -> str:
    """Write a row per share: the mean over windows, and the smallest and the largest."""
    each = np.array([*DATA.read()["windows"].values()]).reshape(-1, len(SHARES))
    rows = ["| read again | KL, nats per token | smallest and largest |", "|--:|--:|--:|"]
    for share, kl in zip(SHARES, each.T, strict=True):
        rows.append(f"| {100 * share:.0f}% | {kl.mean():.4f} | {kl.min():.4f} to {kl.max():.4f} |")
    return "\n".join(rows)


PAGE = Page("how-to/prefixes.md", {"joined": table})

if __name__ == "__main__":
    study(__doc__, run, PAGE)
