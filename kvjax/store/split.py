"""Keys or values split by channels, with a codec for each run of channels."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.state.codes import Codec, CodecArrays, bind
from kvjax.store.wrap import joined, part_of


@dataclasses.dataclass(frozen=True)
class Split(Codec):
    """The first channels of a row by one codec, the next ones by another, and so on.

    Args:
        parts: pairs of a codec and its number of channels; of the last one None, which is all that are left.

    Raises ValueError for no parts, numbers below 1, or rows of other widths.

    >>> from kvjax.store.affine import Affine
    >>> codec = Split(((Affine(8), 2), (Affine(2), None)))
    >>> sorted(codec.encode(jnp.ones((1, 8))))[:2]
    ['0 codes', '0 scale_zero']
    """

    parts: tuple[tuple[Codec, int | None], ...]

    def __post_init__(self):
        numbers = [n for _, n in self.parts]
        whole = [isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in numbers]
        if not numbers or not all(whole[:-1]) or not (whole[-1] or numbers[-1] is None):
            raise ValueError(
                f"a split has pairs of a codec and a number of channels >= 1, got {self.parts!r}: write "
                "Split(((Affine(4), 32), (Affine(2), None))), where None is all that are left"
            )

    @property
    def granule(self) -> int:
        return math.lcm(*(codec.granule for codec, _ in self.parts))

    @property
    def steady(self) -> bool:
        return all(codec.steady for codec, _ in self.parts)

    def bind(self, arrays: CodecArrays) -> Codec:
        return Split(tuple((bind(codec, arrays), n) for codec, n in self.parts))

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        cuts = self._cuts(x.shape[-1])
        runs = [x[..., a:b] for a, b in pairwise(cuts)]
        return joined(**{str(i): codec.encode(runs[i]) for i, (codec, _) in enumerate(self.parts)})

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        widths = [b - a for a, b in pairwise(self._cuts(width))]
        runs = [
            codec.decode(part_of(data, str(i)), widths[i], dtype) for i, (codec, _) in enumerate(self.parts)
        ]
        return jnp.concatenate(runs, -1)

    def _cuts(self, width: int) -> list[int]:
        """Find the indices where runs begin and end."""
        numbers = [n for _, n in self.parts]
        known = sum(n for n in numbers if n is not None)
        left = width - known
        if left < 0 or (left > 0) != (numbers[-1] is None):
            more = " and more" if numbers[-1] is None else ""
            raise ValueError(
                f"a split has parts of {known} channels{more}, and rows of {width} were given: give parts "
                f"that are {width} together"
            )
        cuts = [0]
        for n in numbers:
            cuts.append(cuts[-1] + (left if n is None else n))
        return cuts
