"""Quantisation into number formats of hardware: blocks of channels that share a scale."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Method, Store
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Group, Seed
from kvjax.state.codes import Codec
from kvjax.store.blocks import Microscaled, NearestPower, SharedExponents
from kvjax.store.nvfloat4 import NvFloat4
from kvjax.store.rotate import Rotate

# A calibrated scale of a whole tensor; None: every token of a head has its own.
Scale = Annotated[float, Range(1e-30, 1e30)]
_MICROSCALING = "Microscaling Data Formats for Deep Learning"


def _both(codec: Codec) -> Method:
    return Method(store=Store(codec, codec))


@paper(_MICROSCALING, arxiv="2310.10537", family="quant", exact="equal")
def mxfp8(*, kind: Literal["e4m3", "e5m2"] = "e4m3", block: Group = 32) -> Method:
    """MXFP8 of OCP (Rouhani et al., 2023, arXiv:2310.10537), algorithm 1: float8 with shared powers of two.

    `block` channels of a token share one, 8.25 bits a number. A head has a whole number of blocks.
    """
    return _both(Microscaled(kind, block))


@paper(_MICROSCALING, arxiv="2310.10537", family="quant", exact="equal")
def mxfp6(*, kind: Literal["e2m3", "e3m2"] = "e2m3", block: Group = 32) -> Method:
    """MXFP6 of OCP (Rouhani et al., 2023, arXiv:2310.10537), algorithm 1: float6 with shared powers of two.

    `block` channels of a token share one, 6.25 bits a number. A head has a whole number of blocks.
    """
    return _both(Microscaled(kind, block))


@paper(_MICROSCALING, arxiv="2310.10537", family="quant", exact="equal")
def mxfp4(*, block: Group = 32) -> Method:
    """MXFP4 of OCP (Rouhani et al., 2023, arXiv:2310.10537), algorithm 1: e2m1 with shared powers of two.

    `block` channels of a token share one, 4.25 bits a number. A head has a whole number of blocks.
    """
    return _both(Microscaled("e2m1", block))


@paper(_MICROSCALING, arxiv="2310.10537", family="quant", exact="equal")
def mxint8(*, block: Group = 32) -> Method:
    """MXINT8 of OCP (Rouhani et al., 2023, arXiv:2310.10537), algorithm 1: int8 with shared powers of two.

    `block` channels of a token share one, 8.25 bits a number. A head has a whole number of blocks.
    """
    return _both(Microscaled("int8", block))


@paper(
    "With Shared Microexponents, A Little Shifting Goes a Long Way",
    arxiv="2302.08007",
    family="quant",
    exact="equal",
)
def mx(*, bits: Literal[9, 6, 4] = 6, block: Literal[8, 16, 32] = 16) -> Method:
    """MX9, MX6 and MX4 (Rouhani et al., 2023, arXiv:2302.08007), section 3: two levels of shared exponents.

    `block` channels of a token share a power of two, stored as an exponent of 8 bits, and every two of them a
    bit that halves it. Each number has a sign and a fraction of 7, 4 or 2 bits. With its shares of exponent
    and bit, that makes `bits` bits per number for blocks of 16.
    """
    return _both(SharedExponents({9: 7, 6: 4, 4: 2}[bits], block))


@paper(
    "Pretraining Large Language Models with NVFP4",
    arxiv="2509.25149",
    family="quant",
    exact="deviates",
)
def nvfp4(*, block: Group = 16, tensor: Scale | None = None) -> Method:
    """NVFP4 (NVIDIA, 2025, arXiv:2509.25149), section 2: e2m1 with a float8 scale for `block` channels.

    A float32 scale of the whole tensor maps the largest block's scale to float8's largest: 4.5 bits a number,
    and that scale. tensor: this float32 for all keys and values, which servers calibrate or set to 1.
    Deviation: without `tensor`, every token of a head has its own, 32 bits more, where the paper has one for
    a tensor, which is unknown before the last token.
    """
    return _both(NvFloat4(block, tensor))


@paper(
    "Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling",
    arxiv="2512.02010",
    family="quant",
    exact="deviates",
)
def four_over_six(*, block: Group = 16, tensor: Scale | None = None) -> Method:
    """Four over six (Cook et al., 2025, arXiv:2512.02010), section 3: NVFP4 with blocks scaled to 4 or to 6.

    e2m1 has no number between 4 and 6. Each block is encoded with its largest number as 6 and as 4, and the
    one with the smaller squared error is stored; the largest scale is 256, so that 1.5 times it is a float8,
    too. Deviation: as in `nvfp4`, every token of a head has a float32 scale of its own, unless `tensor` is
    given.
    """
    return _both(NvFloat4(block, tensor, two=True))


@paper(
    "UltraQuant: 4-bit KV Caching for Context-Heavy Agents",
    arxiv="2606.20474",
    family="quant",
    exact="deviates",
)
def ultraquant(*, block: Group = 32, seed: Seed = 0) -> Method:
    """UltraQuant (Chakrabarti et al., 2026, arXiv:2606.20474): e2m1 with powers of two, and rotated keys.

    Keys are rotated by a Hadamard matrix after RoPE, values are not. `block` channels of a token share the
    power of two nearest to 0.156 times their largest number (`NearestPower`), 4.25 bits a number, as in
    vLLM's `ultraquant_4bit`. Deviation: queries stay as computed, where the authors' kernels round them to
    float8; numbers halfway between two codes get the even one, there the lower one; the Hadamard matrix has
    random signs.
    """
    codec = NearestPower("e2m1", block, part=0.156)
    return Method(store=Store(Rotate("hadamard", seed) >> codec, codec))
