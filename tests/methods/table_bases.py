"""Rows of methods that store codes behind a change of basis, or by fitted ranges or atoms; see `table.py`."""

from __future__ import annotations

import numpy as np

from kvjax.grammar.fitted import Fitted
from kvjax.store.rotate import hadamard
from tests.float64 import low_rank
from tests.float64.codes import affine, behind, clipped, coded, of_lists, of_range, pursued
from tests.methods.expected import received
from tests.methods.rows import chained, count, dense, everything, half, plain, row, split
from tests.methods.table_stores import FLIPS, TURNS, based, codes

DRAWN = np.random.default_rng(14)
SHIFTS = {f"{of} shift": DRAWN.normal(size=(2, 2, 16)).astype(np.float32) for of in ("key", "value")}
MOVED = Fitted({**TURNS.arrays, **SHIFTS}, "InBasis", "")
VALUES_MOVED = Fitted({**TURNS.arrays, "value shift": SHIFTS["value shift"]}, "InBasis", "")


def moved(of, code):
    """Codes of shifted rows in the basis of their head."""

    def each(layer, head):
        by, inside = SHIFTS[f"{of} shift"][layer, head].astype(float), based(of, code)(layer, head)
        return lambda x: inside(x - by) + by

    return each


def oscar_bytes(s):
    """Count a word of 16 codes and a range; of a list 2 first tokens, the newest 4 and one more as is."""
    body = split(everything, 1, 4, lambda s: 0, lambda s: 2 * (s.h * 2 // 8 + 4) + 4)
    return body(s) + s.layers * s.b * s.k * 2 * plain(s)


STEPS = {of: DRAWN.uniform(0.1, 0.3, (2, 2)).astype(np.float32) for of in ("key", "value")}
RANGED = Fitted(
    {f"{of} step": x for of, x in STEPS.items()} | {f"{of} low": -9 * x for of, x in STEPS.items()},
    "StaticAffine",
    "",
)


def ranged(of, bits):
    """Codes of a range of their head."""
    low, step = (RANGED.arrays[f"{of} {name}"].astype(float) for name in ("low", "step"))
    return lambda layer, head: of_range(low[layer, head], step[layer, head], bits)


def mixed(of, block):
    """Encode the same in 4 bits behind a rotation of every `block` channels."""
    matrix = np.kron(np.eye(16 // block), hadamard(block, 0))
    return lambda layer, head: behind(matrix, ranged(of, 4)(layer, head))


def prefix_bytes(s):
    """Count a row's first two tokens as they are; the others in 4 bits without scales."""
    slots = 2 * plain(s) + (everything(s) - 2) * (2 * s.h // 2 + 4)
    return s.layers * s.b * s.k * slots + 4 * s.b


DIRECTIONS = {f"{of} atoms": DRAWN.normal(size=(2, 40, 16)) for of in ("key", "value")}
ATOMS = Fitted(
    {n: (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32) for n, x in DIRECTIONS.items()},
    "Atoms",
    "",
)


def sums(of):
    """Make sums of 3 atoms of a layer."""
    return lambda layer, head: pursued(ATOMS.arrays[f"{of} atoms"][layer].astype(float), 3)


ROOTS = DRAWN.normal(size=(2, 2, 32, 32))
MOMENTS = Fitted(
    {n: (x @ x.swapaxes(1, 2)).astype(np.float32) for n, x in zip(("keys", "values"), ROOTS, strict=True)},
    "GroupedLowRank",
    "",
)


def zdc_bytes(s):
    """Half of the tokens, and new ones, in all channels; the others in a quarter; all with their masses."""
    left = s.tokens - count(s.tokens)
    slots = half(s) * (plain(s) + 4) + left * (2 * s.h // 4 * 4 + 4 + 4)
    return s.layers * s.b * s.k * slots + 4 * s.b


TUNED = Fitted({"key bits": np.array([8, 2]), "value bits": np.array([4, 4])}, "LayerBits", "")


def tuned(of):
    """Codes of a layer's own bits."""
    return lambda layer, head: affine(int(TUNED.arrays[f"{of} bits"][layer]), 16)


def tuned_bytes(s):
    """Keys of 8 and of 2 bits, values of 4, with a range each."""
    each = [codes(a, 1) + codes(4, 1) + 4 for a in (8, 2)]
    return s.b * s.k * everything(s) * sum(each) + 4 * s.b


TURNED = behind(hadamard(16, 0), affine(4, 16))
# Of 16 numbers, in rising order, the 12th and the 8th from 0 on are the most.
CUT = dict(keys=0.75, values=0.5)

BASES = [
    row(
        "duquant", dense(everything, slot=lambda s: 2 * codes(4, 1) + 4), error=FLIPS,
        attends=coded(TURNED, affine(4, 16)),
    ),
    row(
        "spinquant", dense(everything, slot=lambda s: 2 * codes(4, 1) + 4), hyper=dict(fitted=TURNS),
        error=FLIPS, attends=of_lists(lambda layer, head: TURNED, based("value", affine(4, 16))),
    ),
    row(
        "omniquant", dense(everything, slot=lambda s: 2 * codes(4, 1) + 4), hyper=dict(fitted=VALUES_MOVED),
        error=FLIPS, attends=of_lists(based("key", affine(4, 16)), moved("value", affine(4, 16))),
    ),
    row(
        "affinequant", dense(everything, slot=lambda s: 2 * codes(4, 1) + 4), hyper=dict(fitted=VALUES_MOVED),
        error=FLIPS, attends=of_lists(based("key", affine(4, 16)), moved("value", affine(4, 16))),
    ),
    row(
        "wkvquant", split(everything, 1, 1, lambda s: 0, lambda s: 2 * codes(4, 2) + 4), moves=False,
        hyper=dict(group=8, fitted=MOVED), error=FLIPS,
        attends=of_lists(*(moved(of, affine(4, 8)) for of in ("key", "value")), residual=1),
    ),
    row(
        "oscar", oscar_bytes, moves=False, error=FLIPS,
        hyper=CUT | dict(residual=4, sinks=2, fitted=TURNS),
        attends=of_lists(
            based("key", clipped(12, affine(2, 16))), based("value", clipped(8, affine(2, 16))),
            residual=4, sinks=2,
        ),
    ),
    row(
        "smoothquant", dense(everything, slot=lambda s: 2 * s.h + 4), hyper=dict(fitted=RANGED), error=FLIPS,
        attends=of_lists(ranged("key", 8), ranged("value", 8)),
    ),
    row(
        "q-int4", dense(everything, slot=lambda s: 2 * s.h // 2 + 4), hyper=dict(block=8, fitted=RANGED),
        error=FLIPS, attends=of_lists(mixed("key", 8), mixed("value", 8)),
    ),
    row(
        "prefixquant", prefix_bytes, moves=False, hyper=dict(sinks=2, fitted=RANGED), error=FLIPS,
        attends=of_lists(mixed("key", 16), mixed("value", 16), sinks=2),
    ),
    row(
        "kvtuner", tuned_bytes, hyper=dict(group=16, fitted=TUNED), error=FLIPS, stacks=False,
        attends=of_lists(tuned("key"), tuned("value")),
    ),
    row(
        "csr", dense(everything, slot=lambda s: 2 * 3 * (2 + 1) + 4), hyper=dict(atoms=3, fitted=ATOMS),
        error=FLIPS, attends=of_lists(sums("key"), sums("value")),
    ),
    # With all directions and channels; tests/make/test_pruned_latents.py has fewer.
    row("eigen-attention", dense(everything), hyper=dict(threshold=1.0, fitted=MOMENTS)),
    row("kvpruner", dense(everything), hyper=dict(keep=1.0)),
    chained(
        "zdc", zdc_bytes, ("zdc", dict(budget=0.5, lower=0.25)), stored=low_rank.stored(count, 0.25, received)
    ),
]  # fmt: skip
