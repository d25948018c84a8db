"""Attention whose queries attend to the blocks of tokens that they pick."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from kvjax.base.ranges import Count
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Projected
from kvjax.models.mixers.attention import Attention
from kvjax.models.picking_blocks import BlockPicking


@dataclasses.dataclass(frozen=True)
class PickedBlocks(Attention):
    """MoBA, Mixture of Block Attention (Lu et al., 2025, arXiv:2502.13189, eq. 2-6).

        s_i = q mean(k of block i); softmax attention over the `top` blocks of the largest s_i

    Blocks hold `block` tokens. A query head always picks the block of its own token, which counts among the
    `top`, and else only earlier ones. It has the parameters of attention, so any model of plain attention can
    be converted. Among slots that a method left, means are of what is left of a block. Only what is picked
    counts; this form computes all logits.
    """

    block: Count = 512
    top: Count = 3

    picks = True
    # Blocks are those of a row, so several texts cannot share one.
    in_segments = False  # pyright: ignore[reportIncompatibleVariableOverride, reportAssignmentType]

    def check(self, config: Config) -> None:
        super().check(config)
        given = [n for n in ("source", "clip") if getattr(self, n) is not None]
        given += [n for n in ("chunked", "sink", "kv_bias") if getattr(self, n)]
        if given:
            raise ValueError(f"a layer that picks blocks has keys of its own alone: leave {given[0]} out")

    def check_takes(self, config: Config, layer: int) -> None:
        super().check_takes(config, layer)
        if config.window(layer) is not None:
            raise ValueError(f"layer {layer} picks blocks of all tokens: give it no window")

    def offers(self, config: Config) -> frozenset[str]:
        # What another layer would do with the weights of picked blocks is not defined.
        return super().offers(config) - {"logits"}

    def project(
        self, p: Params, x: Float[Array, "B T D"], config: Config, below: Float[Array, "B S D"] | None = None
    ) -> Projected:
        picking = BlockPicking(self.block, self.top)
        return super().project(p, x, config, below)._replace(picking=picking)
