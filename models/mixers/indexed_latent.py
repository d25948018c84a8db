"""Latent attention of models that pick tokens by an indexer, computed over all tokens."""

from __future__ import annotations

import dataclasses

from kvjax.base.ranges import Count
from kvjax.models.config import Config
from kvjax.models.layers import Shapes
from kvjax.models.mixers.latent import Latent


@dataclasses.dataclass(frozen=True)
class IndexedLatent(Latent):
    """MLA with the parameters of a lightning indexer (DeepSeek-V3.2, arXiv:2512.02556; GLM-5).

    The indexer scores every earlier token by small heads, and a query attends to the best `index_top` of
    them. Deviation: queries attend to all tokens here, which is the same up to `index_top` tokens, and more
    than the model was trained with beyond. The indexer's parameters are kept, so that saved models have
    them; nothing is computed from them, and its keys are not part of the cache.
    """

    index_heads: Count = 64
    index_dim: Count = 128
    index_top: Count = 2048
    untaught = frozenset({"index_q", "index_k", "index_k_norm", "index_k_norm_bias", "index_weights"})

    axes = Latent.axes | {
        "index_q": (None, None),
        "index_k": ("embed", None),
        "index_weights": ("embed", None),
    }

    def note(self, config: Config) -> str:
        if config.max_positions <= self.index_top:
            return ""
        return (
            f"its indexer would pick {self.index_top} tokens for each query, and kvjax attends to all: "
            f"beyond {self.index_top} tokens results are not those of the model"
        )

    def check(self, config: Config) -> None:
        super().check(config)
        if self.q_rank is None:
            raise ValueError("an indexer reads the latents of queries: give q_rank")

    def shapes(self, config: Config) -> Shapes:
        assert self.q_rank is not None
        d, width = config.d_model, self.index_dim
        return super().shapes(config) | {
            "index_q": (self.q_rank, self.index_heads * width),
            "index_k": (d, width),
            "index_k_norm": (width,),
            "index_k_norm_bias": (width,),
            "index_weights": (d, self.index_heads),
        }
