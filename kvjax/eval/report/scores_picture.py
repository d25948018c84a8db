"""The picture of what a method keeps, beside the attention of the continuation."""

from __future__ import annotations

import io
import os

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure

from kvjax.api.scores import Scores
from kvjax.base.atomic_files import write_atomic
from kvjax.base.errors import InputError

_INK, _KEPT, _DROPPED = "#1b1f24", "#0072B2", "#e3e7ec"
_DOTS_PER_INCH = 160
# The most cells whose numbers are written, and the most KV heads whose names are.
_MOST_NUMBERS, _MOST_NAMES = 96, 48


def draw_scores(path: str | os.PathLike[str], found: Scores, row: int = 0) -> None:
    """Draw one row of `kvjax.scores` as a PNG.

    Above: the overlap with the oracle's choice, and the share of its mass that is kept, by layer and head.
    Below, one line per layer and head and one column per token of the prompt: the oracle's mass (log scale),
    and the kept tokens.

    Args:
        path: of the PNG.
        found: what `kvjax.scores` gave.
        row: number of the prompt.

    Raises:
        InputError: if no layer has slots, there is no such row, or the file cannot be written.

    >>> import pathlib, tempfile, kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> found = kvjax.scores(model, [list(range(3, 19))], kvjax.method("knorm", budget=0.5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_scores(pathlib.Path(folder) / "scores.png", found)
    ...     (pathlib.Path(folder) / "scores.png").read_bytes()[1:4]
    b'PNG'
    """
    png = scores_png(found, row)
    try:
        write_atomic(path, png)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror or error}), expected a file in a writable folder: "
            "choose another path"
        ) from error


def scores_png(found: Scores, row: int = 0) -> bytes:
    """Draw the picture as a PNG and return its bytes; as `draw_scores`."""
    figure = scores_figure(found, row)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    return buffer.getvalue()


def scores_figure(found: Scores, row: int = 0) -> Figure:
    """Draw the picture as a figure of matplotlib; as `draw_scores`."""
    layers = [i for i, (held, paid) in enumerate(zip(found.kept, found.oracle, strict=True))
              if held is not None and paid is not None]  # fmt: skip
    if not layers:
        raise InputError("no layer of these scores has slots, expected some: states keep no tokens to draw")
    rows = _of(found.kept, layers[0]).shape[0]
    if not isinstance(row, int | np.integer) or not 0 <= row < rows:
        raise InputError(f"row is {row}, expected one of the {rows} prompts: 0 to {rows - 1}")
    kept = np.concatenate([_of(found.kept, i)[row] for i in layers])
    oracle = np.concatenate([_of(found.oracle, i)[row] for i in layers])
    used = np.flatnonzero(kept.any(0) | (oracle > 0).any(0))
    size = int(used[-1]) + 1 if used.size else 1
    names = [f"{i}.{head}" for i in layers for head in range(_of(found.kept, i).shape[1])]
    figure = Figure(figsize=(11, 4.2 + min(9.0, 0.16 * len(names))), layout="constrained", facecolor="white")
    halves = figure.add_gridspec(2, 1, height_ratios=[3, 1.2 + min(9.0, 0.16 * len(names))])
    above, below = figure.add_subfigure(halves[0]), figure.add_subfigure(halves[1])
    shares = {
        "kept tokens that are the oracle's choice (%)": found.overlap,
        "the continuation's attention that is kept (%)": found.mass,
    }
    for axis, (title, values) in zip(above.subplots(1, 2), shares.items(), strict=True):
        _shares(axis, title, [_of(values, i)[row] for i in layers], layers)
    left, right = below.subplots(1, 2, sharex=True, sharey=True)
    _attention(figure, left, oracle[:, :size])
    _choice(right, kept[:, :size])
    left.set_ylabel("layer.head", color=_INK)
    step = -(-len(names) // _MOST_NAMES)
    left.set_yticks(range(0, len(names), step), names[::step], fontsize=7)
    return figure


def _of(layers: list, index: int) -> np.ndarray:
    found = layers[index]
    assert found is not None
    return found


def _shares(axis: Axes, title: str, values: list[Float[np.ndarray, "K"]], layers: list[int]) -> None:
    """One cell per layer and head, in percent; layers may have unequal heads."""
    table = np.full((len(values), max(map(len, values))), np.nan)
    for line, found in zip(table, values, strict=True):
        line[: len(found)] = 100 * found
    axis.imshow(table, vmin=0, vmax=100, cmap="viridis", aspect="auto", interpolation="nearest")
    axis.set_title(title, fontsize=10, color=_INK)
    axis.set_xlabel("head")
    axis.set_ylabel("layer")
    axis.set_xticks(range(table.shape[1]))
    axis.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    if table.size <= _MOST_NUMBERS:
        for (y, x), share in np.ndenumerate(table):
            if np.isfinite(share):
                axis.text(x, y, f"{share:.0f}", ha="center", va="center", color=_ink(share), fontsize=8)


def _ink(share: float) -> str:
    """Dark on the bright end of the colours, white on the dark one."""
    return _INK if share > 60 else "white"


def _attention(figure: Figure, axis: Axes, oracle: Float[np.ndarray, "L T"]) -> None:
    most = float(oracle.max()) or 1.0
    image = axis.imshow(
        np.maximum(oracle, most / 1e4),
        norm=LogNorm(most / 1e4, most),
        cmap="magma",
        aspect="auto",
        interpolation="nearest",
    )
    axis.set_title("attention of the continuation, summed", fontsize=10, color=_INK)
    axis.set_xlabel("token of the prompt")
    figure.colorbar(image, ax=axis, fraction=0.05, pad=0.02)


def _choice(axis: Axes, kept: Bool[np.ndarray, "L T"]) -> None:
    axis.imshow(
        kept,
        vmin=0,
        vmax=1,
        cmap=ListedColormap([_DROPPED, _KEPT]),
        aspect="auto",
        interpolation="nearest",
    )
    axis.set_title("kept (blue)", fontsize=10, color=_INK)
    axis.set_xlabel("token of the prompt")
