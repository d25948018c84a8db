"""Quantisation after a fitted change of basis, in which channels are more alike."""

from __future__ import annotations

from kvjax.grammar import Method, Store
from kvjax.grammar.fitted import as_fitted
from kvjax.methods.papers import paper
from kvjax.methods.shared import Bits, Fit, Group, Ratio
from kvjax.store.affine import Affine
from kvjax.store.basis import InBasis


@paper(
    "QServe: W4A8KV4 Quantization and System Co-design for Efficient LLM Serving",
    arxiv="2405.04532",
    family="outlier-transform",
    exact="deviates",
)
def qserve(*, bits: Bits = 4, group: Group | None = None, fitted: Fit | None = None) -> Method:
    """The KV cache of QServe (Lin et al., 2024, arXiv:2405.04532), section 4.2: SmoothAttention, then 4 bits.

    Keys are divided by lambda_c = max |k_c|^0.5, of both channels that RoPE turns together, and queries
    multiplied; keys and values are then quantised token by token, each head of a token by itself, in groups
    of `group` channels. fitted: lambda of every KV head, as `kvjax fit qserve` writes it. Deviation: queries
    are multiplied online, where the paper folds lambda into the weights of keys and queries, which gives the
    same codes; weights and other activations stay as they are.
    """
    codec = Affine(bits, group=group)
    return Method(store=Store(InBasis("key", "qserve", as_fitted(fitted)) >> codec, codec))


@paper(
    "FlatQuant: Flatness Matters for LLM Quantization",
    arxiv="2410.09426",
    family="outlier-transform",
    exact="deviates",
)
def flatquant(*, bits: Bits = 4, clip: Ratio = 1.0, fitted: Fit | None = None) -> Method:
    """The KV cache of FlatQuant (Sun et al., 2024, arXiv:2410.09426), section 3: a learnt basis.

    The keys of a layer, after RoPE, and its values are multiplied by one matrix for all heads, an orthogonal
    one and scales, so that their numbers are flat; then each head of a token is quantised by itself, between
    `clip` times its minimum and `clip` times its maximum. Queries meet keys by the inverse transpose. fitted:
    the matrices, as `kvjax fit flatquant` learns them, by gradients that pass the round of the codes.
    Deviation: what is learnt makes keys and values come back closest, where the paper takes the outputs of a
    layer; `clip` is given and not learnt; the matrix of values is not folded into weights; weights and other
    activations stay as they are.
    """
    found, codec = as_fitted(fitted), Affine(bits, clip=clip)
    keys, values = (InBasis(of, "flatquant", found) >> codec for of in ("key", "value"))
    return Method(store=Store(keys, values))
