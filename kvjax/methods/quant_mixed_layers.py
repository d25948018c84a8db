"""Quantisation that treats layers differently, or uses the layer below."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Method, Store
from kvjax.grammar.fitted import as_fitted
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Bits, Fit, Group, Layers, Seed, Tokens
from kvjax.store.affine import Affine
from kvjax.store.first_layers import FirstLayers
from kvjax.store.layer_bits import LayerBits
from kvjax.store.predicted import Predicted
from kvjax.store.rotate import Rotate
from kvjax.store.sphere import LloydMax
from kvjax.store.symmetric import Unpacked

# How many bits whole numbers around 0 have: 2^(bits - 1) - 1 is the largest.
Signed = Annotated[int, Range(2, 8)]


@paper(
    "AsymKV: Enabling 1-Bit Quantization of KV Cache with Layer-Wise Asymmetric Quantization Configurations",
    arxiv="2410.13212",
    family="quant-mixed",
    exact="deviates",
)
def asymkv(
    *, key_layers: Layers = 16, value_layers: Layers = 0, high: Bits = 2, low: Bits = 1, group: Group = 32,
    residual: Tokens = 128,
) -> Method:  # fmt: skip
    """AsymKV (Tao et al., 2024, arXiv:2410.13212), section 4: more bits for keys, and in the first layers.

    The first `key_layers` layers store keys, and the first `value_layers` layers values, in `high` bits; all
    others in `low`. Errors of keys are amplified by the softmax, and those of lower layers by the layers
    above. The codes are KIVI's, keys channel by channel and values token by token; the newest `residual`
    tokens stay unencoded. Deviation: keys and values are encoded `group` tokens at a time, as in `kivi`.
    """
    of_keys = [Affine(bits, axis="channel", group=group) for bits in (high, low)]
    of_values = [Affine(bits, group=group, together=group) for bits in (high, low)]
    keys, values = FirstLayers(key_layers, *of_keys), FirstLayers(value_layers, *of_values)
    return Method(store=Store(keys, values, residual))


@paper(
    "Cache Me If You Must: Adaptive Key-Value Quantization for Large Language Models",
    arxiv="2501.19392",
    family="quant-mixed",
    exact="deviates",
)
def aqua_kv(
    *,
    bits: Literal[1, 2, 3, 4] = 2,
    first: Literal[1, 2, 3, 4] = 4,
    tokens: Group = 32,
    residual: Tokens = 128,
    seed: Seed = 0,
    fitted: Fit | None = None,
) -> Method:
    """AQUA-KV (Shutova et al., 2025, arXiv:2501.19392), section 3: only what the layer below cannot predict.

    Keys are predicted by a linear map from the keys of the layer below, and values from the keys of their own
    layer and the values of the layer below, all heads together, as decoded; the prediction error is rotated
    by a Hadamard matrix and stored in `bits` bits, the whole first layer in `first` bits. Keys are stored
    before RoPE. Every `tokens` tokens are encoded together, and the newest `residual` stay unencoded.
    fitted: the maps, as `kvjax fit aqua-kv` writes them. Deviation: each number is quantised separately by
    levels for random directions, where the paper's HIGGS quantises pairs of numbers; first tokens are stored
    like the others; a step decodes all layers, from the lowest up.
    """
    rotate, found = Rotate("hadamard", seed), as_fitted(fitted)
    rest = (Predicted("key", tokens, found), Predicted("value", tokens, found))
    keys, values = (
        FirstLayers(1, rotate >> LloydMax(first), one >> rotate >> LloydMax(bits)) for one in rest
    )
    return Method(store=Store(keys, values, residual, unrotated=True))


@paper(
    "KVTuner: Sensitivity-Aware Layer-Wise Mixed-Precision KV Cache Quantization for Efficient and Nearly "
    "Lossless LLM Inference",
    arxiv="2502.04420",
    family="quant-mixed",
    exact="deviates",
)
def kvtuner(*, group: Group | None = None, fitted: Fit | None = None) -> Method:
    """KVTuner (Li et al., 2025, arXiv:2502.04420), section 5: bits of keys and values found for every layer.

    Each layer stores keys in 8, 4 or 2 bits, and values, too, token by token in groups of `group` channels:
    layers differ in how much codes change attention's outputs, and keys matter more than values. fitted: the
    bits, as `kvjax fit kvtuner --set mean=4` finds them for `mean` bits per number. Deviation: the fit
    minimises the sum over layers of the relative error of attention's outputs, exactly, where the paper uses
    these errors to leave out pairs and to group layers, and then searches by the accuracy of generated
    answers; the paper's other form, with KIVI's codes, is left out.
    """
    codec, found = Affine(8, group=group), as_fitted(fitted)
    return Method(store=Store(LayerBits(codec, "key", found), LayerBits(codec, "value", found)))


@paper(
    "CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving",
    arxiv="2310.07240",
    family="quant-mixed",
    exact="deviates",
)
def cachegen(
    *, key_layers: Layers = 10, value_layers: Layers = 2, high: Signed = 5, low: Signed = 4
) -> Method:
    """CacheGen (Liu et al., 2023, arXiv:2310.07240), section 5: whole numbers that a file codes by channel.

    The first `key_layers` layers store keys, and the first `value_layers` layers values, in codes of `high`
    bits, all others in `low`, each head of a token by its largest number. A code takes a byte in memory;
    `kvjax.save_cache(path, cache, coder="range")` codes them by how often each occurs in its layer, head and
    channel, as the paper does. Defaults are the authors' for models of 32 layers. Deviation: a head has its
    own scale, where the authors' code has one for all heads of a layer; codes are of the numbers, as in the
    authors' code, where the paper codes differences to every tenth token; the frequencies are those of the
    cache. `kvjax.fit_coder(model, texts, "cachegen")` has frequencies of other texts and several qualities,
    for files and for chunks that are sent.
    """
    more, fewer = Unpacked(high), Unpacked(low)
    return Method(store=Store(FirstLayers(key_layers, more, fewer), FirstLayers(value_layers, more, fewer)))
