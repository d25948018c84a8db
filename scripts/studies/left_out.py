"""DecoQuant's two ways to split factors, and codes left out, beside others: errors on a real model.

    kvjax get smollm2-135m
    python -m scripts.studies.left_out

DecoQuant: x = A B by singular values, A = U S^a in 4 bits per token, B whole. RotorQuant: rotations of 3
channels (IsoQuant: 4) before codes for random directions, in place of TurboQuant's rotation of all.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from scipy.stats import special_ortho_group

import kvjax
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.state.codes import Codec
from kvjax.store.affine import Affine
from kvjax.store.rotate import Rotate
from kvjax.store.sphere import LloydMax
from scripts.studies import codes

START, TOKENS, SEEDS = 2000, 448, 3
Numbers = Float[np.ndarray, "L K T H"]


def main() -> None:
    model = kvjax.load("smollm2-135m")
    found = model.tokenizer.encode(codes.TEXT.read_text()[START:])
    ids = list(getattr(found, "ids", found))[:TOKENS]
    read = read_keys_values(model, [[ids]], iter, False)
    sides = [np.asarray(x, np.float64) for x in (read.k, read.v)]
    for name, errors in zip(*_named([compared(x) for x in sides]), strict=True):
        print(f"{name:45} keys {errors[0]:.4f} values {errors[1]:.4f}")


def _named(sides: list[dict[str, float]]) -> tuple[list[str], list[tuple[float, ...]]]:
    names = list(sides[0])
    return names, [tuple(side[name] for side in sides) for name in names]


def compared(x: Numbers) -> dict[str, float]:
    """Squared errors by name, relative to the squared norm."""
    error = lambda y: float(np.square(y - x).sum() / np.square(x).sum())  # noqa: E731
    u, s, v = np.linalg.svd(x, full_matrices=False)
    root, four, three = np.sqrt(s)[..., None, :], Affine(4), LloydMax(3)
    whole = 16 * x.shape[-1] / x.shape[-2]
    found = {
        "4 bits per token": error(back(four, x)),
        "4 bits, Hadamard (quarot)": error(back(Rotate("hadamard", 0) >> four, x)),
        f"DecoQuant, A = U S, {whole:.2f} bits of B": error(back(four, u * s[..., None, :]) @ v),
        f"DecoQuant, A = U S^(1/2), {whole:.2f} bits of B": error(
            back(four, u * root) @ (np.moveaxis(root, -1, -2) * v)
        ),
        "3 bits, not rotated": error(back(three, x)),
        "3 bits, all channels rotated (turboquant)": error(back(Rotate("orthogonal", 0) >> three, x)),
    }
    for size in (3, 4):
        tried = [blocks(x.shape[-1], size, seed) for seed in range(SEEDS)]
        found[f"3 bits, {size} channels rotated"] = float(
            np.mean([error(back(three, x @ m) @ m.T) for m in tried])
        )
    return found


def back(codec: Codec, x: Numbers) -> Numbers:
    """Encode and decode x."""
    given = jnp.asarray(x, jnp.float32)
    return np.asarray(codec.decode(codec.encode(given), x.shape[-1], jnp.float32), np.float64)


def blocks(width: int, size: int, seed: int) -> Float[np.ndarray, "H H"]:
    """Random rotations of `size` neighbouring channels each; channels that are left over stay."""
    matrix, rng = np.eye(width), np.random.RandomState(seed)
    for at in range(0, width - size + 1, size):
        matrix[at : at + size, at : at + size] = special_ortho_group.rvs(size, random_state=rng)
    return matrix


if __name__ == "__main__":
    main()
