"""QCQA: groups of heads, and layers to group, that trade KV size against the error of shared weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from kvjax.train.conversion.convert import Grouping
from kvjax.train.conversion.grouping.nsga2 import Evolution, nsga2
from kvjax.train.conversion.grouping.products import HeadProducts, canonical, check_count, pooling_errors


class LayerGrouping(NamedTuple):
    """One way to group a layer: its KV heads and its weight-sharing error."""

    groups: tuple[int, ...]
    heads: int
    error: float


class Stack(NamedTuple):
    """One way to group all layers, None if a layer stays whole: KV heads and errors, summed."""

    groupings: tuple[Grouping | None, ...]
    heads: int
    error: float


Option = TypeVar("Option", LayerGrouping, Stack)


def group_layer(
    products: HeadProducts, groups: int, evolution: Evolution | None = None
) -> list[LayerGrouping]:
    """Run QCQA's first stage (Joshi et al., 2024, arXiv:2406.10247): one layer's front, fewest heads first.

    NSGA-II over the group of every head, at most `groups` of them, for few KV heads and a small
    weight-sharing error: the mean squared difference of key heads from the mean of their group, plus that of
    value heads (`pooling_error`). This is QCQA-AC, with groups of any size. The front holds one grouping for
    every worthwhile number of heads.

    Differences: the equations were read in code that reproduces the paper; populations start with the equal
    neighbour groups of GQA among random ones, so that the front is never worse than GQA. QCQA-EC, with groups
    of one size, only minimises the error: `asymgqa(..., loss=, swap=1)`.

    Raises ValueError if the heads cannot form that many groups.

    >>> like = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> [layer.groups for layer in group_layer(HeadProducts(like, like), 3, Evolution(10, 5))]
    [(0, 0, 0), (0, 0, 1)]
    """
    n = len(products.k)
    check_count(groups, n)
    both = products.k + products.v
    neighbours = np.array([np.arange(n) * g // n for g in range(1, groups + 1)])
    front = nsga2(
        lambda genes: np.stack([genes.max(1) + 1.0, pooling_errors(both, genes)], 1),
        np.full(n, groups),
        neighbours,
        evolution or Evolution(),
        lambda genes: np.array([canonical(row) for row in genes]),
    )
    rows = zip(front.genes.tolist(), front.objectives.tolist(), strict=True)
    return [LayerGrouping(tuple(groups), int(heads), error) for groups, (heads, error) in rows]


def group_layers(
    layers: Sequence[Sequence[LayerGrouping]], evolution: Evolution | None = None
) -> list[Stack]:
    """Run QCQA's second stage: which layers to group, and how: the stack's front, fewest KV heads first.

    NSGA-II over one gene per layer, which leaves it whole or chooses one of its options; both objectives are
    summed. The paper's genes say only whether a layer is grouped: give each layer one option for that.

    Raises ValueError if a layer has no options.

    >>> pair = [LayerGrouping((0, 0), 1, 0.5)]
    >>> [(stack.heads, stack.error) for stack in group_layers([pair, pair], Evolution(8, 5))]
    [(2, 1.0), (3, 0.5), (4, 0.0)]
    """
    if not layers or not all(layers):
        raise ValueError("every layer needs at least one option: give the front of group_layer for each")
    whole = [
        LayerGrouping(tuple(range(len(options[0].groups))), len(options[0].groups), 0.0) for options in layers
    ]
    genes = [[w, *options] for w, options in zip(whole, layers, strict=True)]
    most = max(map(len, genes))
    # The first population: for every k, all layers at their k-th option, including both ends of the front.
    start = np.array([[min(k, len(g) - 1) for g in genes] for k in range(most)])
    table = np.array([[(o.heads, o.error) for o in g] + [(np.inf, np.inf)] * (most - len(g)) for g in genes])
    at = np.arange(len(genes))
    front = nsga2(
        lambda rows: table[at, rows].sum(1),
        np.array([len(g) for g in genes]),
        start,
        evolution or Evolution(),
    )
    stacks = []
    for row in front.genes:
        chosen = [g[i] for g, i in zip(genes, row, strict=True)]
        # A layer with one group per head is whole, whichever option it came from.
        groupings = tuple(None if o.heads == len(o.groups) else Grouping(o.groups, o.groups) for o in chosen)
        stacks.append(Stack(groupings, sum(o.heads for o in chosen), sum(o.error for o in chosen)))
    return stacks


def within(front: Sequence[Option], heads: int) -> Option:
    """Choose the option of least error with at most `heads` KV heads; ValueError if none is so small.

    >>> within([LayerGrouping((0, 0), 1, 0.5), LayerGrouping((0, 1), 2, 0.0)], 1).groups
    (0, 0)
    """
    small = [option for option in front if option.heads <= heads]
    if not small:
        raise ValueError(
            f"no option has {heads} KV heads or fewer: the least is {min(o.heads for o in front)}"
        )
    return min(small, key=lambda option: option.error)
