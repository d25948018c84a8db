"""Bases by gradients through the codes of a method: rotations, scales, shifts and dominant diagonals."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from kvjax.base.errors import InputError
from kvjax.fitting.loops.bases import CodeSettings, Start, through_codes
from kvjax.fitting.statistics.basis_rules import BasisInputs, Numbers, paired, scaled
from kvjax.ops.base.rope import partners
from kvjax.store.affine import Affine
from kvjax.store.rotate import hadamard


def flat(x: Numbers, meant: BasisInputs) -> dict[str, np.ndarray]:
    """FlatQuant: a rotation and scales for all heads of a layer, starting at a Hadamard rotation."""
    return _of_layers(x, meant, ("skew", "scales"))


def rotated(x: Numbers, meant: BasisInputs) -> dict[str, np.ndarray]:
    """SpinQuant: a rotation for all heads of a layer, starting at a Hadamard rotation."""
    return _of_layers(x, meant, ("skew",))


def scaled_keys(x: Numbers, meant: BasisInputs) -> dict[str, np.ndarray]:
    """OmniQuant: scales of each head's channels, of keys one for each rotated pair; and a shift of values.

    Scales start as the roots of channels' largest numbers, and the shift as the middle of a channel's range.
    """
    by = scaled(paired(np.abs(x).max(2), meant.rope) ** 0.5)
    if meant.of == "key":
        return _of_heads(x, meant, by, None, ("scales",))
    middle = (x.max(2) + x.min(2)) / 2
    return _of_heads(x, meant, by, middle, ("scales", "shift"))


def shifted(x: Numbers, meant: BasisInputs) -> dict[str, np.ndarray]:
    """WKVQuant: a shift and a scale per channel of a head, initially the middle and half of its range."""
    high, low = x.max(2), x.min(2)
    return _of_heads(x, meant, scaled((high - low) / 2), (high + low) / 2, ("scales", "shift"))


def affine(x: Numbers, meant: BasisInputs) -> dict[str, np.ndarray]:
    """AffineQuant: a matrix for each head in which diagonals dominate, and a shift of values.

    It starts with OmniQuant's scales, of every channel by itself.
    """
    by = scaled(np.abs(x).max(2) ** 0.5)
    apart = meant._replace(rope=None)
    if meant.of == "key":
        return _of_heads(x, apart, by, None, ("scales", "beside"))
    return _of_heads(x, apart, by, (x.max(2) + x.min(2)) / 2, ("scales", "beside", "shift"))


def _of_layers(x: Numbers, meant: BasisInputs, learnt: tuple[str, ...]) -> dict[str, np.ndarray]:
    """One matrix for all heads of a layer."""
    layers, heads, tokens, width = x.shape
    turn = np.broadcast_to(hadamard(width, 0), (layers, width, width))
    start = Start(turn, np.swapaxes(turn, -1, -2), np.zeros((layers, width)), np.arange(width))
    found = through_codes(x.reshape(layers, heads * tokens, width), start, coded(meant, width), learnt)
    return {name: np.repeat(found[name][:, None], heads, 1) for name in ("matrix", "inverse")}


def _of_heads(
    x: Numbers, meant: BasisInputs, by: dict[str, np.ndarray], shift: Float[np.ndarray, "L K H"] | None,
    learnt: tuple[str, ...],
) -> dict[str, np.ndarray]:  # fmt: skip
    """Build a matrix for every head that starts as a diagonal one, and a shift if an initial one is given."""
    layers, heads, tokens, width = x.shape
    flat = lambda a: a.reshape(layers * heads, *a.shape[2:])  # noqa: E731
    zero = np.zeros((layers * heads, width))
    start = Start(
        flat(by["inverse"]), flat(by["matrix"]), zero if shift is None else flat(shift),
        partners(width, meant.rope),
    )  # fmt: skip
    found = through_codes(flat(x), start, coded(meant, width), learnt)
    names = ("matrix", "inverse") if shift is None else ("matrix", "inverse", "shift")
    return {name: found[name].reshape(layers, heads, *found[name].shape[1:]) for name in names}


def coded(meant: BasisInputs, width: int) -> CodeSettings:
    """Return the codes whose error is minimised; InputError unless they encode tokens one by one."""
    codec = meant.codec
    if not isinstance(codec, Affine) or codec.axis != "token":
        raise InputError(f"a basis is learnt through an Affine of tokens, and {codec!r} was given")
    group = codec.group or width
    if width % group:
        raise InputError(f"group={group} must divide the {width} channels of a head")
    return CodeSettings(codec.bits, group, codec.clip)
