"""Palu: projections of keys and values as low-rank products, whose inner side is cached."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from jaxtyping import Float

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.model_kinds import Make
from kvjax.make.latents import LatentFactors, Matrices, only_plain, with_latents
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.grouped_latent import GroupedLatent


class Rotation(Protocol):
    """A rotation of rows of any width, such as `kvjax.store.rotate.Rotate`."""

    def matrix(self, width: int) -> Float[np.ndarray, "R R"]: ...


@dataclasses.dataclass(frozen=True)
class GroupedLowRank(Make, FittedWord):
    """W_k ~ A_k B_k and W_v ~ A_v B_v for every group of heads (Palu, arXiv:2407.21118, section 3).

    The rewritten model has `GroupedLatent` layers: its cache holds x A_k and x A_v, keys are computed from
    x A_k before rotation, and B_v is multiplied into the output matrix.

    With G = W' C W = V diag(s^2) V' of a group's columns W [D, E], the product of rank r that is closest to W
    in the mean of |x W - x A B|^2 over inputs x with the second moments C is

        A = W V_r diag(s_r)^-1/2, B = diag(s_r)^1/2 V_r'

    Without `fitted`, C is the identity: A B is then the truncated SVD of W. rank: a share of the channels of
    a group (float in (0, 1]) or a number of them (int >= 1), of keys and of values. heads: KV heads of a
    group; all of them if a model has fewer. rotation: R in A R' and R B, the latents' rotation, which
    changes no product. fitted: "keys" and "values" [L, E', E'] with the columns of all E' = K H channels, the
    second moments of x W_k and x W_v over texts, which are W' C W for every group at once; and "fisher"
    [L, 2], how much the loss depends on W_k and W_v. by_fisher: allocates ranks to layers by "fisher".

    Raises ValueError for invalid ranks or groups, and for `by_fisher` without fitted arrays.
    """

    rank: float | int
    heads: int = 4
    rotation: Rotation | None = None
    by_fisher: bool = False
    fitted: Fitted | None = None
    # rank=1 is one channel and rank=1.0 all of them; the type keeps the two words unequal, though 1 == 1.0.
    kind: type = dataclasses.field(init=False, repr=False)

    by = "palu"
    # Unfitted, it uses the weights alone.
    fit_first = False

    @property
    def breaks(self) -> Reasons:
        found = {
            Fact.GIVEN_WEIGHTS: "rewrites them",
            Fact.STORED_KEYS: "stores latents of keys and values",
        }
        if self.heads > 1:
            found[Fact.KV_HEADS] = f"stores the slots of {self.heads} KV heads together"
        return found

    def __post_init__(self):
        object.__setattr__(self, "kind", type(self.rank))
        share = isinstance(self.rank, float) and 0 < self.rank <= 1
        if not (share or (type(self.rank) is int and self.rank >= 1)):
            raise ValueError(
                "rank must be a share of a group's channels in (0, 1] (float) or a number of them >= 1 "
                f"(int), got {self.rank!r}"
            )
        if self.heads < 1:
            raise ValueError(f"heads must be at least 1, the KV heads of a group, got {self.heads!r}")
        if self.by_fisher and self.fitted is None:
            raise ValueError(
                "ranks that are shared out by Fisher information need arrays: run `kvjax fit palu --model "
                "MODEL --out palu.safetensors` and give fitted=palu.safetensors"
            )

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        width = model.kv_heads * model.head_dim
        for name in ("keys", "values"):
            sizes = (model.layers, width, width)
            check_sizes(self, "moments", "layers, channels, channels", name, sizes)
        check_sizes(self, "Fisher information", "layers, matrices", "fisher", (model.layers, 2))

    def config(self, config: Config) -> Config:
        """Return the config of the rewritten model. Raises ValueError for layers that cannot be rewritten."""
        only_plain(config)
        group = min(self.heads, config.kv_heads)
        mixers = tuple(GroupedLatent(group, k, v) for k, v in self._ranks(config, group))
        return dataclasses.replace(config, mixers=mixers)

    def _ranks(self, config: Config, group: int) -> list[tuple[int, int]]:
        """Return the ranks of keys and values of every layer."""
        width = group * config.head_dim
        if self.kind is int and self.rank > width:
            raise ValueError(
                f"rank={self.rank} is more than the {width} channels of a group of {group} heads: give at "
                f"most {width}, or a share such as 0.5"
            )
        rank = int(self.rank) if self.kind is int else max(1, round(self.rank * width))
        if not self.by_fisher:
            return [(rank, rank)] * config.layers
        assert self.fitted is not None
        weights = np.asarray(self.fitted.arrays["fisher"], np.float64).reshape(-1)
        found = shared_out(2 * config.layers * rank, weights, width).reshape(-1, 2)
        return [(int(k), int(v)) for k, v in found]

    def params(self, params: Params, config: Config) -> Params:
        """Build the parameters of the rewritten model; unchanged ones are the same arrays."""
        return with_latents(params, config, self.config(config), self._factors)

    def _factors(self, layer: int, mixer: GroupedLatent, w: Matrices, width: int) -> LatentFactors:
        """Compute A and B of the keys and of the values of a layer."""
        moments = {} if self.fitted is None else {n: x[layer] for n, x in self.fitted.arrays.items()}
        wide = mixer.group * width
        keys = self._product(w["k"], moments.get("keys"), wide, mixer.key_rank)
        return LatentFactors(*keys, *self._product(w["v"], moments.get("values"), wide, mixer.value_rank))

    def _product(
        self, w: Float[np.ndarray, "D E"], moments: np.ndarray | None, width: int, rank: int
    ) -> tuple[Float[np.ndarray, "D GR"], Float[np.ndarray, "G R e"]]:
        """Return A of all groups side by side, and B of every group."""
        turn = np.eye(rank) if self.rotation is None else self.rotation.matrix(rank)
        down, up = [], []
        for start in range(0, w.shape[1], width):
            columns = slice(start, start + width)
            gram = w[:, columns].T @ w[:, columns]
            if moments is not None:
                gram = np.asarray(moments, np.float64)[columns, columns]
            basis, scale = principal(gram, rank)
            down.append(w[:, columns] @ (basis / scale) @ turn.T)
            up.append(turn @ (basis * scale).T)
        return np.concatenate(down, 1), np.stack(up)


def principal(gram: Float[np.ndarray, "E E"], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Find a second-moment matrix's first `rank` eigenvectors, as columns, and the roots of their scales.

    The largest entry of every column is positive, so that equal weights give equal latents on any machine.

    >>> basis, scale = principal(np.diag([1.0, 16.0]), 1)
    >>> basis.tolist(), scale.tolist()
    ([[0.0], [1.0]], [2.0])
    """
    squares, vectors = np.linalg.eigh(gram)
    squares, basis = squares[::-1][:rank], vectors[:, ::-1][:, :rank]
    signs = np.sign(basis[np.abs(basis).argmax(0), np.arange(rank)])
    # A direction to which nothing is mapped has no scale; any will do, and division by rounding errors must
    # be avoided.
    least = max(squares[0], 0.0) * 1e-12 or 1.0
    return basis * signs, np.maximum(squares, least) ** 0.25


def shared_out(total: int, weights: Float[np.ndarray, "M"], most: int) -> np.ndarray:
    """Integers from 1 to `most` that sum to `total`, in proportion to weights between those bounds.

    The remainder of rounding is distributed, one each, to those with the largest fractions.

    >>> shared_out(10, np.array([6.0, 3.0, 1.0]), 5).tolist()
    [5, 4, 1]
    """
    weights = np.maximum(weights, weights.max(initial=0.0) * 1e-9 or 1.0)
    low, high = 0.0, most / weights.min()
    for _ in range(200):
        middle = (low + high) / 2
        small = np.clip(middle * weights, 1, most).sum() <= total
        low, high = (middle, high) if small else (low, middle)
    share = np.clip(low * weights, 1, most)
    found = np.floor(share).astype(int)
    order = [i for i in np.argsort(found - share, kind="stable") if found[i] < most]
    found[order[: total - found.sum()]] += 1
    return found
