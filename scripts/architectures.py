"""The table of architectures in docs/architectures.md: what each keeps per token, by formula and measured.

Measured means the bytes of the cache that a real prefill would leave, by shapes alone (`jax.eval_shape`), at
1024 and at 2048 tokens: the difference is the cost of a token, the rest does not grow.

    python scripts/architectures.py            # prints the table
    python scripts/architectures.py --write    # puts it into docs/architectures.md
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import NamedTuple

from kvjax.commands.sizes import Sizes
from kvjax.grammar import Method
from kvjax.models.config import Config
from kvjax.models.feed_forward import MLP, NoMLP
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.dropped import Dropped
from kvjax.models.mixers.goldfinch import FinchC2, Gold
from kvjax.models.mixers.head_maps import HeadMaps
from kvjax.models.mixers.infini import Infini
from kvjax.models.mixers.latent import Latent
from kvjax.models.mixers.log_linear import LogLinearDelta, LogLinearMamba2
from kvjax.models.mixers.recurrent import GatedDelta, GatedLinear, GatedSlot, KimiDelta, Mamba2, Retention
from kvjax.models.mixers.rwkv import ChannelMix, Rwkv6, Rwkv7
from kvjax.models.mixers.tensor_product import TensorProduct

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
START, END = "<!-- table -->", "<!-- end of table -->"
LAYERS = 32
# Llama-2-7B's sizes: 32 layers of width 4096 with 32 heads of 128 channels.
BASE = Config(vocab=1024, d_model=4096, layers=LAYERS, heads=32, kv_heads=8, head_dim=128, d_ff=11008)
MLA = Latent(rank=512, rope_dim=64, nope_dim=128, value_dim=128, q_rank=1536)
KDA = KimiDelta(heads=32, key_dim=128, value_dim=128)
MAMBA = Mamba2(heads=128, key_dim=128, value_dim=64, groups=1)
STATE = 32 * 128 * 128 * 4
TAIL = 4 * 3 * 4096 * 2
# Bytes of keys and values of one token in one layer of BASE, and what all its layers keep.
KV = 2 * 8 * 128 * 2
ATTENTION = "2 L K H"


class Row(NamedTuple):
    """name; paper; how to select it; the formula in words and in bytes: (per token, constant), bfloat16."""

    name: str
    paper: str
    select: str
    config: Config
    words: str
    token: int
    constant: int = 0


def of(pattern: list, **options) -> Config:
    """BASE with its layers' mixers repeating a pattern."""
    mixers = tuple(pattern[i % len(pattern)] for i in range(LAYERS))
    return dataclasses.replace(BASE, mixers=mixers, **options)


def maps(sources: list[int | None], **options) -> Config:
    return dataclasses.replace(BASE, mixers=tuple(Attention(source=s) for s in sources), **options)


def rows() -> list[Row]:
    return head_rows() + shared_rows() + recurrent_rows() + rwkv_rows()


def head_rows() -> list[Row]:
    """What the heads of a layer store."""
    kv, heads = KV, "`heads=32, kv_heads={}`"
    mha, mqa = (dataclasses.replace(BASE, kv_heads=n) for n in (32, 1))
    each = tuple(range(32))
    # Eight groups of one to twenty-five heads; eight key heads with four value heads.
    unequal = HeadMaps(each, *[(0, 1, 2, 3, 4, 5, 6, *[7] * 25)] * 2)
    dha = HeadMaps(each, tuple(i // 4 for i in each), tuple(i // 8 for i in each))
    return [
        Row("MHA", "1706.03762", heads.format(32), mha, "2 L N H", 32 * 4 * kv),
        Row("GQA-8", "2305.13245", heads.format(8), BASE, ATTENTION, 32 * kv),
        Row("MQA", "1911.02150", heads.format(1), mqa, "2 L H", 32 * kv // 8),
        Row("MLA", "2405.04434", "`Latent(512, 64, 128, 128)`", of([MLA]), "L (R + Rp)", 32 * 576 * 2),
        Row(
            "TPA", "2501.06425", "`TensorProduct(6, 2, 2)`", of([TensorProduct(6, 2, 2)]),
            "L (Rk + Rv) (N + H)", 32 * 4 * 160 * 2,
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
    ]  # fmt: skip


def shared_rows() -> list[Row]:
    """What layers read from each other, or leave out."""
    kv, half, after_first = KV, LAYERS // 2, LAYERS - 1
    pairs = [None if i % 2 == 0 else i - 1 for i in range(LAYERS)]
    yoco = [None] * (half + 1) + [half] * (half - 1)
    window = tuple(1024 if i < half else None for i in range(LAYERS))
    lckv = [None, *[LAYERS - 2] * (LAYERS - 3), None, None]
    mlkv = maps([None if i % half == 0 else i // half * half for i in range(LAYERS)])
    clla = tuple(MLA if s is None else dataclasses.replace(MLA, source=s) for s in pairs)
    svformer = (Attention(), *[Attention(value_source=0)] * after_first)
    resformer = (Attention(), *[Attention(value_mix=0.5)] * after_first)
    return [
        Row("CLA-2", "2405.12981", "`Attention(source=i - 1)`", maps(pairs), "2 L/2 K H", 16 * kv),
        Row("MLKV-2", "2406.09297", "`Attention(source=0 or 16)`", mlkv, "2 m K H", 2 * kv),
        Row(
            "YOCO (window)", "2405.05254", "`windows`, `Attention(source=16)`", maps(yoco, windows=window),
            "2 K H + L/2 windows", kv, half * 1025 * kv,
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
    ]  # fmt: skip


def recurrent_rows() -> list[Row]:
    """States of constant size, and hybrids with them."""
    kv, linear = KV, "L h K V, fp32"
    tails = f"{linear}, + conv tail"
    mamba = 128 * 64 * 128 * 4 + 4 * (8192 + 256) * 2
    kimi = of([KDA, KDA, KDA, dataclasses.replace(MLA, turns=False)])
    only_mamba = of([MAMBA], mlps=(NoMLP(),) * LAYERS)
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
    ]  # fmt: skip


def rwkv_rows() -> list[Row]:
    """RWKV's blocks, each of two layers, and GoldFinch on top of two thirds of them."""
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
    """BASE with layers that only mix, and above them layers with a feed-forward that has no gate."""
    mlps = (*[NoMLP()] * len(mixes), *[MLP()] * len(attention))
    return dataclasses.replace(BASE, layers=len(mlps), mixers=(*mixes, *attention), mlps=mlps, **options)


def lists(config: Config) -> tuple[int, int]:
    """Slot lists that grow and that do not: each slot also holds its position, 4 bytes."""
    growing = fixed = 0
    for i in range(config.layers):
        mixer = config.mixers[i] if config.mixers else Attention()
        slots = mixer.slots(config)
        if slots is None or mixer.source is not None:
            continue
        window = config.window(i)
        growing += slots.heads if window is None else 0
        fixed += 0 if window is None else slots.heads * (window + 1)
    return growing, fixed


def measured(config: Config) -> tuple[int, int]:
    """(bytes per token, bytes that do not grow) of one row's cache, positions left out."""
    short, long = (Sizes(config, "bfloat16", tokens, [Method()]).nbytes(Method()) for tokens in (2048, 4096))
    growing, fixed = lists(config)
    token = (long - short) // 2048
    return token - 4 * growing, short - 2048 * token - 4 * fixed - 4


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/architectures.md")
    if not parser.parse_args().write:
        print(table())
        return
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(f"{before}{START}\n{table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
