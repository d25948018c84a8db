"""The architectures that the shared battery runs, each with what its cache must cost.

A row: the config, and the numbers that a cache of one row must hold for every token and apart from tokens, by
the architecture's own formula. Positions (int32, one per slot list) are counted apart.
"""

import dataclasses
from typing import NamedTuple

from kvjax.models.config import Config
from kvjax.models.feed_forward import (
    MLP,
    ClampedMoE,
    ExpertsBesideMLP,
    GatedMLP,
    LatentMoE,
    MoE,
    NoMLP,
)
from kvjax.models.gated_mlps import ScaledMLP, SparseMLP
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.cross_attention import CrossAttention
from kvjax.models.mixers.deltaformer import DeltaFormer
from kvjax.models.mixers.dmc import DynamicMerging
from kvjax.models.mixers.dropped import Dropped
from kvjax.models.mixers.features import Based, LinearAttention, Performer
from kvjax.models.mixers.forgetting import Forgetting, Path
from kvjax.models.mixers.gau import GatedUnit
from kvjax.models.mixers.goldfinch import FinchC2, Gold
from kvjax.models.mixers.grouped_latent import GroupedLatent
from kvjax.models.mixers.head_maps import HeadMaps
from kvjax.models.mixers.hgrn import Hgrn
from kvjax.models.mixers.hidden_cache import CacheAttention, HiddenCache
from kvjax.models.mixers.indexed_latent import IndexedLatent
from kvjax.models.mixers.infini import Infini
from kvjax.models.mixers.key_as_value import KeyAsValue
from kvjax.models.mixers.latent import Latent
from kvjax.models.mixers.lattice import Lattice
from kvjax.models.mixers.layer_inputs import LayerInputs
from kvjax.models.mixers.local_linear import LocalLinear
from kvjax.models.mixers.log_linear import LogLinearDelta, LogLinearMamba2
from kvjax.models.mixers.mamba import Conba, Mamba
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.models.mixers.mcsd import SlopeDecay
from kvjax.models.mixers.mesa import Mesa
from kvjax.models.mixers.native_sparse import NativeSparse
from kvjax.models.mixers.picked_blocks import PickedBlocks
from kvjax.models.mixers.proximal import SharedKeys
from kvjax.models.mixers.recurrent import GatedDelta, GatedLinear, GatedSlot, KimiDelta, Retention
from kvjax.models.mixers.rwkv import ChannelMix, Rwkv6, Rwkv7
from kvjax.models.mixers.shared_weights import SharedWeights
from kvjax.models.mixers.short_conv import ShortConv
from kvjax.models.mixers.tensor_product import TensorProduct
from kvjax.models.mixers.transformer_vq import VectorQuantised
from kvjax.ops.base.rope import Rope

SMALL = Config(
    vocab=40, d_model=16, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=24, rope=Rope(theta=100.0)
)


class Row(NamedTuple):
    """per_token: numbers per token of all layers; lists: slot lists; constant: numbers at any length."""

    config: Config
    per_token: int
    lists: int
    constant: int = 0

    def bytes(self, rows: int, slots: int) -> int:
        """Count what a cache of float32 costs: `rows` rows with room for `slots` tokens each."""
        return 4 * rows * (slots * (self.per_token + self.lists) + self.constant + 1)


def with_layers(*mixers, **options) -> Config:
    """Bare mixers, unless `mlps` says what stands behind them; mlps=() is the feed-forward of `SMALL`."""
    options = {"mlps": (NoMLP(),) * len(mixers), **options}
    return dataclasses.replace(SMALL, mixers=mixers, layers=len(mixers), **options)


MLA = Latent(rank=12, rope_dim=4, nope_dim=6, value_dim=10)
MLA_Q = dataclasses.replace(MLA, q_rank=9)
INDEXED = IndexedLatent(**dataclasses.asdict(MLA_Q), index_heads=2, index_dim=4, index_top=8)
TPA = TensorProduct(q_rank=3, key_rank=2, value_rank=1)
KDA = KimiDelta(heads=2, key_dim=6, value_dim=5, rank=3)
MAMBA = Mamba2(heads=4, key_dim=6, value_dim=5, groups=2)
HEADS = Mamba2(heads=2, key_dim=6, value_dim=8, groups=1)
XC = CrossAttention(width=16, kv_heads=4, turns=True)
CEPE = CrossAttention(width=12)
FINCH = Rwkv6(heads=2, head_dim=6, mix_rank=3, decay_rank=4)
GOOSE = Rwkv7(heads=2, head_dim=6, decay_rank=3, rate_rank=4, gate_rank=5)
GOSLING = dataclasses.replace(GOOSE, v_rank=2)
FINCH_C2 = FinchC2(heads=2, head_dim=6, mix_rank=3, decay_rank=4, second_rank=2)
GOLD = Gold(rank=3, mix_rank=2, adapt_rank=4, kv_input=2)
GQKVA = HeadMaps((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 0, 1))
POD = SharedKeys(4, 6, 5, groups=2, sinks=1, recent=4)
CHOOSY = MoE(experts=4, top=2, width=8)
# All experts answer, so none is another one because codes round what the router sees.
MIXED = MoE(experts=4, top=4, width=8)
LATENT = LatentMoE(experts=4, top=4, width=8, shared=6, latent=5)
CLAMPED = ClampedMoE(experts=4, top=4, width=8, limit=0.8)

KV = 2 * 2 * 8  # keys and values of SMALL's two KV heads
TABLE = {
    "gqa": Row(SMALL, 2 * KV, 4),
    "mqa": Row(dataclasses.replace(SMALL, kv_heads=1, layers=1), 2 * 8, 1),
    "gated attention": Row(with_layers(Attention(gate=True)), KV, 2),
    "sinks": Row(
        with_layers(*[Attention(sink=True)] * 2, windows=(None, 6), mlps=(CLAMPED,) * 2), KV, 2, 7 * KV + 14
    ),
    "no rotation": Row(with_layers(Attention(rotates=False), Attention(query_growth=(0.7, 5))), 2 * KV, 4),
    "mla": Row(with_layers(MLA, MLA_Q), 2 * (12 + 4), 2),
    "mla nope": Row(with_layers(dataclasses.replace(MLA, turns=False)), 12 + 4, 1),
    "tpa": Row(with_layers(TPA), (2 + 1) * (4 + 8), 1),
    "retnet": Row(with_layers(*[Retention(2, 6, 5)] * 2), 0, 0, 2 * 2 * 6 * 5),
    "gated retention": Row(with_layers(Retention(2, 6, 5, gated=True)), 0, 0, 2 * 6 * 5),
    "gla": Row(with_layers(GatedLinear(2, 6, 5, rank=3)), 0, 0, 2 * 6 * 5),
    "gated deltanet": Row(
        with_layers(GatedDelta(4, 6, 5, groups=2)), 0, 0, 4 * 6 * 5 + 4 * (2 * 12 + 20)
    ),
    "kda": Row(with_layers(KDA), 0, 0, 2 * 6 * 5 + 4 * (2 * 12 + 10)),
    "mamba-2": Row(
        with_layers(MAMBA, MAMBA), 0, 0, 2 * (4 * 5 * 6 + 4 * (20 + 2 * 12))
    ),
    "gsa": Row(with_layers(GatedSlot(2, 6, 5, count=4)), 0, 0, 2 * (6 * 4 + 4 * 5)),
    "log-linear gated deltanet": Row(
        with_layers(LogLinearDelta(4, 6, 5, groups=2, levels=6)), 0, 0, 6 * 4 * 6 * 5 + 4 * (2 * 12 + 20),
    ),  # fmt: skip
    "log-linear mamba-2": Row(
        with_layers(LogLinearMamba2(4, 6, 5, groups=2, levels=3)),
        0, 0, 3 * 4 * 5 * 6 + 4 * (20 + 2 * 12),
    ),  # fmt: skip
    "infini": Row(
        with_layers(Infini(2, 6, 5, segment=4)), 0, 0, 2 * 2 * 6 * (5 + 1) + 4 * 2 * (6 + 5) + 16 + 1,
    ),  # fmt: skip
    "rwkv-6": Row(
        with_layers(FINCH, ChannelMix(gate=True)), 0, 0, 2 * 6 * 6 + 2 * 16 + 2 * 16,
    ),  # fmt: skip
    "rwkv-7": Row(
        with_layers(GOOSE, ChannelMix(), GOSLING),
        0, 0, 2 * (2 * 6 * 6 + 2 * 16) + 2 * 16,
    ),  # fmt: skip
    "goldfinch": Row(
        with_layers(
            FINCH_C2, ChannelMix(gate=True), GOLD, dataclasses.replace(GOLD, source=2, kv_input=None),
            mlps=(*[NoMLP()] * 2, *[MLP()] * 2),
            kv_heads=4, head_dim=4, activation="relu2", vocab=300,
        ),
        3 + 2, 1, 2 * 6 * 6 + 2 * 16 + 2 * 16,
    ),  # fmt: skip
    "kimi linear": Row(
        with_layers(KDA, dataclasses.replace(MLA, turns=False)), 12 + 4, 1, 2 * 6 * 5 + 4 * (2 * 12 + 10),
    ),  # fmt: skip
    "mamba-2 hybrid": Row(
        with_layers(Attention(), MAMBA), KV, 2, 4 * 5 * 6 + 4 * (20 + 2 * 12),
    ),  # fmt: skip
    "cla-2": Row(with_layers(Attention(), Attention(source=0), Attention(), Attention(source=2)), 2 * KV, 4),
    "mlkv": Row(with_layers(Attention(), *[Attention(source=0)] * 3), KV, 2),
    "yoco": Row(
        with_layers(
            Attention(), Attention(), *[Attention(source=1)] * 2, windows=(5, None, None, None), mlps=()
        ),
        KV, 2, 6 * KV + 12,
    ),  # fmt: skip
    "lckv": Row(with_layers(Attention(), Attention(source=2), Attention()), 2 * KV, 4),
    "clla": Row(with_layers(MLA, dataclasses.replace(MLA, source=0)), 12 + 4, 1),
    "svformer": Row(with_layers(Attention(), Attention(value_source=0)), KV + KV // 2, 4),
    "resformer": Row(with_layers(Attention(), *[Attention(value_mix=0.5)] * 3), 4 * KV, 8),
    "kv bias": Row(with_layers(Attention(kv_bias=True)), KV, 2),
    "swiftkv": Row(with_layers(Attention(), Attention(), *[Attention(kv_input=1)] * 2, mlps=()), 4 * KV, 8),
    "attention dropped": Row(with_layers(Attention(), Dropped(), Attention(), mlps=()), 2 * KV, 4),
    "unequal groups": Row(with_layers(HeadMaps((0, 1, 2, 3), (0, 1, 1, 1), (0, 1, 1, 1))), KV, 1),
    "dha": Row(with_layers(HeadMaps((0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 2, 2))), (2 + 3) * 8, 1),
    "gqkva": Row(
        with_layers(*[GQKVA] * 2, qkv_bias=True, o_bias=True, qk_norm="head"),
        2 * KV,
        2,
    ),
    "grouped latents": Row(
        with_layers(
            GroupedLatent(2, 6, 8), GroupedLatent(2, 10, 4), kv_heads=4, qk_norm="full",
        ),
        2 * (6 + 8) + 2 * (10 + 4), 2 * 2,
    ),  # fmt: skip
    "clipped softmax": Row(with_layers(Attention(clip=(-0.1, 1.05)), mlps=()), KV, 2),
    "shared attention": Row(with_layers(Attention(), *[SharedWeights(0)] * 2, mlps=()), 2 * KV, 2 * 3),
    "lisa": Row(
        with_layers(
            Attention(), SharedWeights(0, hidden=6, rank=2), SharedWeights(1, hidden=6, rank=2), mlps=()
        ),
        KV + 2 * 2 * (8 + 2), 2 * 3,
    ),
    "mixattention": Row(
        with_layers(
            Attention(), Attention(), Attention(source=1), Attention(source=0), windows=(None, 6, 6, None)
        ),
        KV, 2, 7 * KV + 14,
    ),
    "yoco, gated retention": Row(
        with_layers(Retention(2, 6, 5, gated=True), Attention(), Attention(source=1)), KV, 2, 2 * 6 * 5
    ),
    "recurformer": Row(
        with_layers(
            Attention(heads=2, kv_heads=1), HEADS, mlps=(NoMLP(), GatedMLP()), inputs=(None, 0)
        ),
        KV // 2, 1, 2 * 8 * 6 + 4 * (16 + 2 * 6),
    ),
    "indexed latents": Row(
        with_layers(INDEXED, dataclasses.replace(INDEXED, index_source=0)), (12 + 4 + 4) + (12 + 4), 2
    ),
    "picked blocks": Row(with_layers(*[PickedBlocks(block=4, top=2)] * 2), 2 * KV, 4),
    "layer inputs": Row(with_layers(LayerInputs(), LayerInputs(), qkv_bias=True, qk_norm="head"), 2 * 16, 2),
    "key as value": Row(
        with_layers(
            KeyAsValue(), KeyAsValue(kv_heads=1, head_dim=6), qk_norm="head", norms="both",
            mlps=(ExpertsBesideMLP(experts=4, top=4, width=8),) * 2,
        ),
        2 * 8 + 6, 2 + 1,
    ),
    "chunks": Row(
        with_layers(
            Attention(chunked=True, unit=True),
            Attention(rotates=False, query_growth=(0.7, 5), growth_shift=1),
            windows=(6, None), mlps=(NoMLP(), LATENT), activation="relu2",
        ),
        KV, 2, 7 * KV + 14,
    ),
    "layer embeddings": Row(
        with_layers(
            Attention(head_dim=6, value_norm=True), Attention(head_dim=6, source=0), layer_embeddings=4,
            layer_scales=True, norms="both", mlps=(),
        ),
        2 * 2 * 6, 2,
    ),
    "streams": Row(
        with_layers(
            Attention(value_norm=True), Attention(source=0), layer_embeddings=4, layer_vocab=30, streams=3,
            laurel=5, norms="both", qk_norm="head", mlps=(SparseMLP(20, 0.7), GatedMLP()),
        ),
        KV, 2,
    ),
    "falcon-h1": Row(
        with_layers(
            Mamba2(4, 5, 6, 2, norm_groups=2, normed="first", multipliers=(0.7, 1.4, 0.8, 1.3, 0.6)),
            Attention(out_scale=0.8), mlps=(NoMLP(), ScaledMLP(gate_scale=1.5, out_scale=0.8)),
            inputs=(None, 0),
        ),
        KV, 2, 4 * 6 * 5 + 4 * (4 * 6 + 2 * 2 * 5),
    ),
    "side by side": Row(dataclasses.replace(SMALL, layers=1, norms="parallel", centred=True), KV, 2),
    "lfm2": Row(with_layers(ShortConv(3, bias=True), Attention()), KV, 2, 3 * 16),
    "jamba": Row(
        with_layers(MAMBA, Attention(), mlps=(GatedMLP(), CHOOSY)), KV, 2, 4 * 5 * 6 + 4 * (20 + 2 * 12),
    ),
    "linear transformer": Row(with_layers(LinearAttention(4, 6, 5, groups=2)), 0, 0, 4 * 6 * (5 + 1)),
    "based": Row(with_layers(Based(2, 3, 5)), 0, 0, 2 * 10 * (5 + 1)),
    "performer": Row(with_layers(Performer(2, 6, 5, features=7)), 0, 0, 2 * 7 * (5 + 2)),
    "mesa": Row(with_layers(Mesa(2, 6, 5)), 0, 0, 2 * 6 * (6 + 5) + 4 * 24),
    "lattice": Row(with_layers(Lattice(2, 4, 5)), 0, 0, 2 * 4 * 5),
    "gau": Row(
        with_layers(*[GatedUnit(12, key_dim=6, chunk=4)] * 2),
        0, 0, 2 * (6 * 12 + 4 * (6 + 6 + 12) + 1 + 16),
    ),
    "transformer-vq": Row(
        with_layers(VectorQuantised(2, 6, 5, codes=7, block=3)), 0, 0, 2 * 7 * 6 + 6 * 2 * 6 + 1 + 16,
    ),
    "hgrn": Row(with_layers(Hgrn(12), Hgrn(12, lower_bound=0.3)), 0, 0, 2 * 12),
    "mamba": Row(with_layers(Mamba(20, states=3, rank=2)), 0, 0, 20 * 3 + 4 * 20),
    "mixcon": Row(
        with_layers(Conba(20, states=3), Attention(), mlps=(GatedMLP(), MIXED)), KV, 2, 20 * 3 + 4 * 20,
    ),
    "mcsd": Row(with_layers(SlopeDecay(10)), 0, 0, 2 * 10),
    "forgetting": Row(with_layers(Forgetting(4, 8, 6, groups=2, norm=True)), 2 * (8 + 6) + 4, 0, 1),
    "path": Row(with_layers(Path(2, 6, 5, rank=3, forgets=True)), 2 * (6 + 5) + 2, 0, 1 + 3 * 12),
    "deltaformer": Row(with_layers(DeltaFormer(2, 6, 5)), 2 * (6 + 5), 0, 1),
    "dmc": Row(with_layers(DynamicMerging(4, 6, 5, groups=2, offset=0.0)), 2 * (6 + 5), 0, 2 * 2),
    "nsa": Row(
        with_layers(
            NativeSparse(4, 6, 5, groups=2, compress=4, stride=2, block=4, top=3, local=1, window=3)
        ),
        2 * (6 + 5), 0, 1,
    ),
    "lla": Row(with_layers(LocalLinear(4, 6, 5, groups=2)), 2 * (6 + 5), 0, 1),
    "parallax": Row(with_layers(LocalLinear(2, 6, 5, learned=True)), 2 * (6 + 5), 0, 1),
    "pod": Row(
        with_layers(POD, dataclasses.replace(POD, source=0)), 2 * (6 + 5) + 2 * 5, 0, 1 + 1 + 5 * 2 * 6,
    ),
    "neurocache": Row(
        with_layers(
            Attention(), HiddenCache(4, window=5, top=2), *[CacheAttention(cache=1, width=4)] * 2,
            mlps=(GatedMLP(), NoMLP(), GatedMLP(), GatedMLP()), windows=(None, None, 5, 5),
        ),
        KV + 4, 2, 2 * 6 * (KV + 2) + 1,
    ),
    # Without a context, which tests/models/test_context.py gives them.
    "xc-cache": Row(with_layers(XC, Attention(), dataclasses.replace(XC, source=0)), KV, 2),
    "cepe": Row(
        with_layers(
            Attention(), CEPE, Attention(), dataclasses.replace(CEPE, source=1),
            mlps=(NoMLP(), GatedMLP(), NoMLP(), GatedMLP()),
        ),
        2 * KV, 4,
    ),
    "moe": Row(dataclasses.replace(SMALL, mlps=(CHOOSY,), layers=1), KV, 2),
}  # fmt: skip
