"""More rows of the table of architectures.py: growing states, and further states of constant size."""

from __future__ import annotations

import dataclasses

from kvjax.models.feed_forward import GatedMLP, MoE, NoMLP
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.deltaformer import DeltaFormer
from kvjax.models.mixers.dmc import DynamicMerging
from kvjax.models.mixers.features import Based, LinearAttention, Performer
from kvjax.models.mixers.forgetting import Forgetting, Path
from kvjax.models.mixers.gau import GatedUnit
from kvjax.models.mixers.hgrn import Hgrn
from kvjax.models.mixers.lattice import Lattice
from kvjax.models.mixers.local_linear import LocalLinear
from kvjax.models.mixers.mamba import Conba, Mamba
from kvjax.models.mixers.mcsd import SlopeDecay
from kvjax.models.mixers.mesa import Mesa
from kvjax.models.mixers.proximal import SharedKeys
from kvjax.models.mixers.transformer_vq import VectorQuantised
from scripts.studies.architecture_sizes import ATTENTION, BASE, KV, LAYERS, Row, of


def kept_rows() -> list[Row]:
    """Rows of states that grow with the tokens but are not keys and values.

    Numbers are bfloat16, or float32 for PaTH's keys and for decays.
    """
    own, count = (32, 128, 128), LAYERS * 4
    lowest = SharedKeys(*own, groups=8)
    pod = [lowest, *[SharedKeys(*own, groups=8, source=0)] * 3]
    blocks = tuple(
        dataclasses.replace(m, source=i // 4 * 4) if i % 4 else m for i, m in enumerate(pod * (LAYERS // 4))
    )
    return [
        Row(
            "PoD, blocks of 4", "2412.02252", "`SharedKeys(32, 128, 128, groups=8, source=)`",
            dataclasses.replace(BASE, mixers=blocks), "(L/4 + L) K H, + near keys",
            (8 + 32) * 8 * 128 * 2, 24 * 4096 * 8 * 128 * 2 + count,
        ),
        Row(
            "Forgetting Transformer", "2503.02130", "`Forgetting(32, 128, 128)`", of([Forgetting(*own)]),
            "2 L N H, + L N fp32", 32 * (2 * 4096 * 2 + 32 * 4), count,
        ),
        Row(
            "PaTH", "2505.16381", "`Path(32, 128, 128)`", of([Path(*own)]),
            "L N H, fp32, + L N H, + L N fp32", 32 * (4096 * 4 + 4096 * 2 + 32 * 4),
            count + 32 * 3 * 4096 * 2,
        ),
        Row(
            "DeltaFormer", "2505.19488", "`DeltaFormer(32, 128, 128)`", of([DeltaFormer(*own)]),
            "2 L N H", 32 * 2 * 4096 * 2, count,
        ),
        Row(
            "DMC, with room for all", "2403.09636", "`DynamicMerging(32, 128, 128, groups=8)`",
            of([DynamicMerging(*own, groups=8)]), ATTENTION, 32 * KV, 32 * 2 * 8 * 4,
        ),
        Row(
            "Local Linear Attention", "2510.01450", "`LocalLinear(32, 128, 128, groups=8)`",
            of([LocalLinear(*own, groups=8)]), ATTENTION, 32 * KV, count,
        ),
    ]  # fmt: skip


def state_rows() -> list[Row]:
    """Rows of further states of constant size."""
    features = 1 + 16 + 16 * 17 // 2
    conba = [Conba(8192), Conba(8192), Attention(), Conba(8192)]
    mlps = (GatedMLP(), MoE(experts=8, top=2, width=11008)) * (LAYERS // 2)
    mamba = 8192 * 16 * 4 + 4 * 8192 * 2
    return [
        Row(
            "Linear Transformer", "2006.16236", "`LinearAttention(32, 128, 128)`",
            of([LinearAttention(32, 128, 128)]), "L h K (V + 1), fp32", 0, 32 * 32 * 128 * 129 * 4,
        ),
        Row(
            "Performer, 256 features", "2009.14794", "`Performer(32, 128, 128, features=256)`",
            of([Performer(32, 128, 128, features=256)]), "L h M (V + 2), fp32", 0, 32 * 32 * 256 * 130 * 4,
        ),
        Row(
            "Based", "2402.18668", "`Based(32, 16, 128)`", of([Based(32, 16, 128)]),
            "L h (1 + K + K (K + 1) / 2) (V + 1), fp32", 0, 32 * 32 * features * 129 * 4,
        ),
        Row(
            "MesaNet", "2506.05233", "`Mesa(32, 128, 128)`", of([Mesa(32, 128, 128)]),
            "L h K (K + V), fp32, + conv tail", 0, 32 * (32 * 128 * 256 * 4 + 4 * 2 * 4096 * 2),
        ),
        Row(
            "Lattice", "2504.05646", "`Lattice(32, 64, 128)`", of([Lattice(32, 64, 128)]), "L h m V, fp32",
            0, 32 * 32 * 64 * 128 * 4,
        ),
        Row(
            "FLASH, 64 units", "2202.10447", "`GatedUnit(8192)`",
            dataclasses.replace(BASE, layers=64, mixers=(GatedUnit(8192),) * 64, mlps=(NoMLP(),) * 64),
            "2 L (s E, fp32, + c (2 s + E) + D)", 0,
            64 * (128 * 8192 * 4 + 256 * (2 * 128 + 8192) * 2 + 4 + 4096 * 2),
        ),
        Row(
            "Transformer-VQ", "2309.16354", "`VectorQuantised(32, 128, 128)`",
            of([VectorQuantised(32, 128, 128)]), "L (h C (V + 1), 4 B, + 2 b h (V + 4 B) + D)", 0,
            32 * (32 * 512 * 129 * 4 + 1024 * 32 * (128 * 2 + 4) + 4 + 4096 * 2),
        ),
        Row(
            "HGRN", "2311.04823", "`Hgrn(4096)`", of([Hgrn(4096)]), "L E, fp32", 0, 32 * 4096 * 4,
        ),
        Row(
            "Mamba, 64 blocks", "2312.00752", "`Mamba(8192)`",
            dataclasses.replace(BASE, layers=64, mixers=(Mamba(8192),) * 64, mlps=(NoMLP(),) * 64),
            "2 L E N, fp32, + conv tail", 0, 64 * mamba,
        ),
        Row(
            "MixCon", "", "3 `Conba(8192)` : 1 `Attention()`, `MoE` in every other layer",
            of(conba, mlps=mlps), "2 L/4 K H + states", 8 * KV, 24 * mamba,
        ),
        Row(
            "MCSD", "2406.12230", "`SlopeDecay(4096)`", of([SlopeDecay(4096)]), "2 L E, fp32",
            0, 32 * 8192 * 4,
        ),
    ]  # fmt: skip
