"""The table of architectures in docs/architectures.md: what each keeps per token, by formula and measured.

Measured are the bytes of the cache that a real prefill would leave, from shapes alone (`jax.eval_shape`), at
2048 and at 4096 tokens. The difference gives the bytes per token; the rest is constant.

    python -m scripts.studies.architectures            # prints the table
    python -m scripts.studies.architectures --write    # puts it into docs/architectures.md
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from kvjax import steps
from kvjax.api.block_transformer import prefill
from kvjax.api.contexts import hold
from kvjax.grammar import Method
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.feed_forward import MLP, GatedMLP, MoE, NoMLP
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.mixers.dropped import Dropped
from kvjax.models.mixers.goldfinch import FinchC2, Gold
from kvjax.models.mixers.grouped_latent import GroupedLatent
from kvjax.models.mixers.head_maps import HeadMaps
from kvjax.models.mixers.infini import Infini
from kvjax.models.mixers.log_linear import LogLinearDelta, LogLinearMamba2
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.models.mixers.recurrent import GatedDelta, GatedLinear, GatedSlot, Retention
from kvjax.models.mixers.rwkv import ChannelMix, Rwkv6, Rwkv7
from kvjax.models.mixers.shared_weights import SharedWeights
from kvjax.models.mixers.tensor_product import TensorProduct
from kvjax.ops.attention.union import Keys
from kvjax.plan.cache_sizes import abstract_params
from kvjax.state.cache import Cache, Slots, nbytes
from kvjax.steps import Run
from scripts.studies.architecture_sizes import (
    ATTENTION,
    BASE,
    CEPE,
    KDA,
    KV,
    LAYERS,
    MAMBA,
    MLA,
    STATE,
    TAIL,
    XC,
    Row,
    maps,
    of,
)  # fmt: skip
from scripts.studies.architectures_of_states import kept_rows, state_rows
from scripts.studies.runner import Page, parser


def rows() -> list[Row]:
    return (
        head_rows() + shared_rows() + kept_rows() + recurrent_rows() + state_rows() + rwkv_rows()
        + context_rows()
    )  # fmt: skip


def head_rows() -> list[Row]:
    """Rows of mixers that differ in what the heads of a layer store."""
    kv, heads = KV, "`heads=32, kv_heads={}`"
    mha, mqa = (dataclasses.replace(BASE, kv_heads=n) for n in (32, 1))
    each = tuple(range(32))
    # Eight groups of one to twenty-five heads; then eight key heads with four value heads.
    unequal = HeadMaps(each, *[(0, 1, 2, 3, 4, 5, 6, *[7] * 25)] * 2)
    # Four query heads, each with all eight pairs of key and value heads.
    gqkva = HeadMaps(tuple(i // 8 for i in each), *[tuple(i % 8 for i in each)] * 2)
    dha = HeadMaps(each, tuple(i // 4 for i in each), tuple(i // 8 for i in each))
    return [
        Row("MHA", "1706.03762", heads.format(32), mha, "2 L N H", 32 * 4 * kv),
        Row("GQA-8; WGQA, fused", "2305.13245, 2407.10855", heads.format(8), BASE, ATTENTION, 32 * kv),
        Row("MQA", "1911.02150", heads.format(1), mqa, "2 L H", 32 * kv // 8),
        Row("MLA", "2405.04434", "`Latent(512, 64, 128, 128)`", of([MLA]), "L (R + Rp)", 32 * 576 * 2),
        Row(
            "TPA", "2501.06425", "`TensorProduct(6, 2, 2)`", of([TensorProduct(6, 2, 2)]),
            "L (Rk + Rv) (N + H)", 32 * 4 * 160 * 2,
        ),
        Row(
            "Palu at half rank", "2407.21118", "`GroupedLatent(4, 256, 256)`",
            of([GroupedLatent(4, 256, 256)]), "L K/4 (Rk + Rv)", 16 * kv,
        ),
        Row("AsymGQA, QCQA", "2406.10247", "`HeadMaps(q, k, k)`", of([unequal]), ATTENTION, 32 * kv),
        Row("DHA, 8 + 4 heads", "2406.06567", "`HeadMaps(q, k, v)`", of([dha]), "L (Kk + Kv) H", 24 * kv),
        Row(
            "Gated attention", "2505.06708", "`Attention(gate=True)`", of([Attention(gate=True)]),
            ATTENTION, 32 * kv,
        ),
        Row(
            "Attention with sinks", "2508.10925", "`Attention(sink=True)`", of([Attention(sink=True)]),
            ATTENTION, 32 * kv,
        ),
        Row("GQKVA, 4 x 8", "2311.03426", "`HeadMaps(q, k, v)`", of([gqkva]), ATTENTION, 32 * kv),
        Row(
            "Learned KV bias", "2402.17762", "`Attention(kv_bias=True)`", of([Attention(kv_bias=True)]),
            ATTENTION, 32 * kv,
        ),
        Row(
            "Clipped softmax", "2306.12929", "`Attention(clip=(-0.001, 1.0))`",
            of([Attention(clip=(-0.001, 1.0))]), ATTENTION, 32 * kv,
        ),
    ]  # fmt: skip


def shared_rows() -> list[Row]:
    """Rows in which layers read each other's slots, or keep none."""
    kv, half, after_first = KV, LAYERS // 2, LAYERS - 1
    pairs = [None if i % 2 == 0 else i - 1 for i in range(LAYERS)]
    yoco = [None] * (half + 1) + [half] * (half - 1)
    gated = Retention(32, 128, 128, gated=True)
    window = tuple(1024 if i < half else None for i in range(LAYERS))
    lckv = [None, *[LAYERS - 2] * (LAYERS - 3), None, None]
    mlkv = maps([None if i % half == 0 else i // half * half for i in range(LAYERS)])
    clla = tuple(MLA if s is None else dataclasses.replace(MLA, source=s) for s in pairs)
    mix = maps([0, 1][i % 2] if i > 1 else None for i in range(LAYERS))
    mixed_windows = tuple(1024 if i % 2 else None for i in range(LAYERS))
    sa = of([Attention(), *[SharedWeights(0)] * after_first])
    lisa = (Attention(), *[SharedWeights(i, hidden=64, rank=20) for i in range(after_first)])
    svformer = (Attention(), *[Attention(value_source=0)] * after_first)
    resformer = (Attention(), *[Attention(value_mix=0.5)] * after_first)
    return [
        Row("CLA-2", "2405.12981", "`Attention(source=i - 1)`", maps(pairs), "2 L/2 K H", 16 * kv),
        Row("MLKV-2", "2406.09297", "`Attention(source=0 or 16)`", mlkv, "2 m K H", 2 * kv),
        Row(
            "YOCO (window)", "2405.05254", "`windows`, `Attention(source=16)`", maps(yoco, windows=window),
            "2 K H + L/2 windows", kv, half * 1025 * kv,
        ),
        Row(
            "YOCO (gated retention)", "2405.05254", "`Retention(..., gated=True)`, `Attention(source=16)`",
            dataclasses.replace(
                BASE, mixers=(*[gated] * half, Attention(), *[Attention(source=half)] * (half - 1))
            ),
            "2 K H + states", kv, half * 32 * 128 * 128 * 4,
        ),
        Row(
            "MixAttention", "2409.15012", "`windows`, `Attention(source=0 or 1)`",
            dataclasses.replace(mix, windows=mixed_windows), "2 K H + 1 window", kv, 1025 * kv,
        ),
        Row("Shared Attention", "2407.12866", "`SharedWeights(0)`", sa, "(L + 1) K H", 33 * kv // 2),
        Row(
            "LISA", "2408.01890", "`SharedWeights(i - 1, 64, 20)`", dataclasses.replace(BASE, mixers=lisa),
            "2 K H + (L - 1) K (H + r)", kv + 31 * 8 * (128 + 20) * 2,
        ),
        Row("LCKV (sandwich)", "2405.10637", "`Attention(source=30)`", maps(lckv), "2 w K H", 3 * kv),
        Row(
            "CLLA-2", "2410.15252", "`Latent(..., source=i - 1)`", dataclasses.replace(BASE, mixers=clla),
            "L/2 (R + Rp)", 16 * 576 * 2,
        ),
        Row(
            "SVFormer", "2410.17897", "`Attention(value_source=0)`",
            dataclasses.replace(BASE, mixers=svformer), "L K H + K H", (LAYERS + 1) * kv // 2,
        ),
        Row(
            "ResFormer", "2410.17897", "`Attention(value_mix=0.5)`",
            dataclasses.replace(BASE, mixers=resformer), ATTENTION, 32 * kv,
        ),
        Row(
            "SwiftKV", "2410.03960", "`Attention(kv_input=15)` above",
            dataclasses.replace(BASE, mixers=(*[Attention()] * half, *[Attention(kv_input=half - 1)] * half)),
            ATTENTION, 32 * kv,
        ),
        Row(
            "AttnDrop, 8 of 32", "2406.15786", "`Dropped()`",
            dataclasses.replace(BASE, mixers=(*[Attention()] * 20, *[Dropped()] * 8, *[Attention()] * 4)),
            "2 (L - 8) K H", 24 * kv,
        ),
        Row(
            "Block Transformer", "2406.02657", "`BlockConfig(blocks, tokens, 4)`", block_transformer(),
            "2 L/2 K H / 4 + one block", 16 * kv // 4, 16 * kv * 5,
        ),
    ]  # fmt: skip


def recurrent_rows() -> list[Row]:
    """Rows with states of constant size, and hybrids."""
    kv, linear = KV, "L h K V, fp32"
    tails = f"{linear}, + conv tail"
    mamba = 128 * 64 * 128 * 4 + 4 * (8192 + 256) * 2
    kimi = of([KDA, KDA, KDA, dataclasses.replace(MLA, turns=False)])
    only_mamba = of([MAMBA], mlps=(NoMLP(),) * LAYERS)
    jamba = of(
        [MAMBA] * 3 + [Attention()] + [MAMBA] * 4, mlps=(GatedMLP(), MoE(16, 2, 11008)) * (LAYERS // 2)
    )
    # Two layers of the skeleton make one layer of RecurFormer.
    few, heads = Attention(heads=4, kv_heads=1), Mamba2(heads=28, key_dim=128, value_dim=128, groups=1)
    beside = dataclasses.replace(
        BASE, layers=2 * LAYERS, mixers=(few, heads) * LAYERS, mlps=(NoMLP(), GatedMLP()) * LAYERS,
        inputs=tuple(None if i % 2 == 0 else i - 1 for i in range(2 * LAYERS)),
    )  # fmt: skip
    gla, gsa = GatedLinear(4, 512, 1024), GatedSlot(4, 1024, 1024, count=64)
    levels = "16 L h K V, fp32, + conv tail"
    log_mamba = LogLinearMamba2(128, 128, 64, groups=1, levels=16)
    log_mamba_only = of([log_mamba], mlps=(NoMLP(),) * LAYERS)
    return [
        Row(
            "RetNet", "2307.08621", "`Retention(16, 256, 512)`", of([Retention(16, 256, 512)]),
            linear, 0, 32 * 16 * 256 * 512 * 4,
        ),
        Row("GLA", "2312.06635", "`GatedLinear(4, 512, 1024)`", of([gla]), linear, 0, 32 * 2**21 * 4),
        Row(
            "GSA", "2409.07146", "`GatedSlot(4, 1024, 1024, count=64)`", of([gsa]), "L h m (K + V), fp32",
            0, 32 * 4 * 64 * 2048 * 4,
        ),
        Row(
            "Gated DeltaNet", "2412.06464", "`GatedDelta(32, 128, 128)`", of([GatedDelta(32, 128, 128)]),
            tails, 0, 32 * (STATE + TAIL),
        ),
        Row("KDA", "2510.26692", "`KimiDelta(32, 128, 128)`", of([KDA]), tails, 0, 32 * (STATE + TAIL)),
        Row("Mamba-2", "2405.21060", "`Mamba2(128, 128, 64, 1)`", only_mamba, tails, 0, 32 * mamba),
        Row(
            "Log-linear Gated DeltaNet", "2506.04761", "`LogLinearDelta(32, 128, 128, levels=16)`",
            of([LogLinearDelta(32, 128, 128, levels=16)]), levels, 0, 32 * (16 * STATE + TAIL),
        ),
        Row(
            "Log-linear Mamba-2", "2506.04761", "`LogLinearMamba2(128, 128, 64, 1, levels=16)`",
            log_mamba_only, levels, 0, 32 * (16 * 128 * 64 * 128 * 4 + 4 * (8192 + 256) * 2),
        ),
        Row(
            "Infini-attention", "2404.07143", "`Infini(32, 128, 128, segment=2048)`",
            of([Infini(32, 128, 128, segment=2048)]), "L (2 h K (V + 1), fp32, + 2 h s K + D)",
            0, 32 * (2 * 32 * 128 * 129 * 4 + (2048 * 2 * 32 * 128 + 4096) * 2 + 4),
        ),
        Row(
            "Kimi Linear", "2510.26692", "3 `KimiDelta` : 1 `Latent(turns=False)`", kimi,
            "L/4 (R + Rp) + states", 8 * 576 * 2, 24 * (STATE + TAIL),
        ),
        Row(
            "Mamba-2 hybrid", "2406.07887", "7 `Mamba2` : 1 `Attention()`", of([MAMBA] * 7 + [Attention()]),
            "2 L/8 K H + states", 4 * kv, 28 * mamba,
        ),
        Row(
            "Jamba-like", "2403.19887", "7 `Mamba2` : 1 `Attention()`, `MoE` in every other layer", jamba,
            "2 L/8 K H + states", 4 * kv, 28 * mamba,
        ),
        Row(
            "RecurFormer, 7 of 8 heads", "2410.12850", "`Attention(heads=4, kv_heads=1)` beside `Mamba2`",
            beside,
            "2 L/8 K H + states", 4 * kv, 32 * (28 * 128 * 128 * 4 + 4 * (28 * 128 + 256) * 2),
        ),
    ]  # fmt: skip


def context_rows() -> list[Row]:
    """Rows of decoders with a context: bytes per context token; the constant is an empty slot per layer."""
    reads = dataclasses.replace(XC, source=7)
    xc = tuple(m for i in range(LAYERS) for m in ([XC if i == 7 else reads] * (i % 8 == 7) + [Attention()]))
    cepe = (Attention(), CEPE, *[Attention(), dataclasses.replace(CEPE, source=1)] * (LAYERS - 1))
    mlps = (NoMLP(), GatedMLP()) * LAYERS
    words = "D of the encoder, per context token"
    return [
        Row(
            "XC-Cache", "2404.15420", "`CrossAttention(4096)` every 8",
            dataclasses.replace(BASE, layers=len(xc), mixers=xc), words, 4096 * 2, 32 * KV,
        ),
        Row(
            "CEPE", "2402.16617", "`CrossAttention(1024)` after each `Attention()`",
            dataclasses.replace(BASE, layers=len(cepe), mixers=cepe, mlps=mlps), words, 1024 * 2, 32 * KV,
        ),
    ]  # fmt: skip


def rwkv_rows() -> list[Row]:
    """Rows of RWKV's blocks, each made of two layers, and of GoldFinch on top of two thirds of them."""
    words = "L (h K V, fp32, + 4 D)"
    block = 64 * 64 * 64 * 4 + 4 * 4096 * 2
    inner = (Rwkv7(64, 64, v_rank=32), ChannelMix())
    goose = (Rwkv7(64, 64), ChannelMix(), *inner * (LAYERS - 1))
    below, first = 21, 42
    gold = (Gold(256, kv_input=first), *[Gold(256, source=first)] * (LAYERS - below - 1))
    finches = (FinchC2(64, 64), ChannelMix(gate=True)) * below
    goldfinch = blocks(finches, gold, kv_heads=32, activation="relu2")
    return [
        Row(
            "RWKV-6", "2404.05892", "`Rwkv6(64, 64)`, `ChannelMix(gate=True)`",
            blocks((Rwkv6(64, 64), ChannelMix(gate=True)) * LAYERS), words, 0, 32 * block,
        ),
        Row(
            "RWKV-7", "2503.14456", "`Rwkv7(64, 64, v_rank=32)`, `ChannelMix()`", blocks(goose), words,
            0, 32 * block,
        ),
        Row(
            "GoldFinch, 21 + 11", "2407.12077", "`FinchC2(64, 64)`, `ChannelMix`, `Gold(256, source=42)`",
            goldfinch, "D / 16 + id, + states", (256 + 2) * 2, 21 * block,
        ),
    ]  # fmt: skip


def blocks(mixes: tuple, attention: tuple = (), **options) -> Config:
    """Give BASE layers that have a mixer alone, followed by layers with an ungated feed-forward alone."""
    mlps = (*[NoMLP()] * len(mixes), *[MLP()] * len(attention))
    return dataclasses.replace(BASE, layers=len(mlps), mixers=(*mixes, *attention), mlps=mlps, **options)


def block_transformer() -> BlockConfig:
    """Build the Block Transformer: half of the layers in each decoder, blocks of four tokens."""
    half = dataclasses.replace(BASE, layers=LAYERS // 2)
    return BlockConfig(dataclasses.replace(half, vocab=2 * half.d_model), half, length=4, prefix=2)


def cache_shapes(config: Config | BlockConfig, tokens: int) -> Cache:
    """Compute the cache after `tokens` tokens: of a prompt, or of a context if layers read one."""
    ids, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, tokens), (1,)))
    params = abstract_params(config, "bfloat16")
    if isinstance(config, BlockConfig):
        call = partial(prefill, config=config, method=Method(), room=0)
        return jax.eval_shape(call, params, ids, length)[1]
    run = Run(config, Method())
    slots = [mixer_of(config, i).slots(config) for i in range(config.layers)]
    width = next((s.key for s in slots if s is not None and s.fixed), None)
    if width is None:
        call = partial(steps.prefill, run, tokens_bound=tokens, room=0, compress=True)
        return jax.eval_shape(call, params, ids, length, None)[1]
    states = jax.ShapeDtypeStruct((1, 1, tokens, width), jnp.bfloat16)
    held = Keys(states, states, jax.ShapeDtypeStruct((1, 1, tokens), jnp.int32))
    return jax.eval_shape(lambda p, k: hold(run, p, k, 0), params, held)


def measured(config: Config | BlockConfig) -> tuple[int, int]:
    """(bytes per token, constant bytes) of one row's keys, values and states."""

    def size(tokens: int) -> int:
        groups = cache_shapes(config, tokens).groups
        slots = [(s.k, s.v) for group in groups for s in group.parts if isinstance(s, Slots)]
        return nbytes([slots, [group.state for group in groups]])

    short, long = size(2048), size(4096)
    return (long - short) // 2048, short - (long - short)


def table() -> str:
    lines = [
        "| architecture | arXiv | in a `Config` | numbers kept | bytes per token, formula | measured | "
        "constant MiB, formula | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        token, constant = measured(row.config)
        lines.append(
            f"| {row.name} | {row.paper} | {row.select} | {row.words} | {row.token:,} | {token:,} | "
            f"{row.constant / 2**20:.2f} | {constant / 2**20:.2f} |"
        )
    return "\n".join(lines)


PAGE = Page("architectures.md", {"table": table})

if __name__ == "__main__":
    PAGE.show(parser(__doc__).parse_args())
