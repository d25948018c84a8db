"""Conversions of a trained model into another architecture, by name: the start of uptraining."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_type_hints

import jax
import numpy as np

from kvjax.api.block_transformer import BlockTransformer
from kvjax.base.errors import InputError
from kvjax.base.ranges import REFUSED, Count, Portion, Range, Whole, expected, read
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Mixer
from kvjax.models.mixers.attention import ATTENTION, Attention, mixer_of
from kvjax.models.mixers.cross_attention import CrossAttention
from kvjax.models.mixers.picked_blocks import PickedBlocks
from kvjax.models.model import Model, check_single
from kvjax.models.params import plan, regroup
from kvjax.train.conversion.convert import (
    Grouping,
    drop_attention,
    group_heads,
    insert_cross_attention,
    pool_heads,
    share_layers,
)
from kvjax.train.conversion.crossed import cross_after_each
from kvjax.train.conversion.fusion import fused_groups, weighted_groups
from kvjax.train.conversion.grouping.asymgqa import asymgqa
from kvjax.train.conversion.grouping.dha import dha
from kvjax.train.conversion.grouping.key_driven import kdgqa
from kvjax.train.conversion.grouping.products import activation_products, key_norms, weight_products
from kvjax.train.conversion.grouping.qcqa import group_layer, group_layers, within
from kvjax.train.conversion.latents import Moments, input_moments, pool_by_values, to_latents
from kvjax.train.conversion.linear import attention_changes, to_linear
from kvjax.train.conversion.low_rank import columns, fitted_word, to_nested, to_progressive
from kvjax.train.conversion.native_sparse import to_native_sparse
from kvjax.train.conversion.recur import to_recurrent_heads
from kvjax.train.conversion.two_decoders import to_blocks

# The share of all channels that is kept.
Share = Annotated[float, Range(0, 1, above=True)]
Made = tuple[Params, Config | BlockConfig]
TokenRows = Sequence[Sequence[int]]


def _gqa(params: Params, config: Config, *, kv_heads: Count) -> Made:
    """Grouped-query attention (arXiv:2305.13245): every new KV head is the mean of neighbours."""
    return pool_heads(params, config, kv_heads)


def _mqa(params: Params, config: Config) -> Made:
    """Multi-query attention (arXiv:1911.02150): one KV head, the mean of all."""
    return pool_heads(params, config, 1)


def _cla(params: Params, config: Config, *, every: Count = 2) -> Made:
    """Cross-layer attention (arXiv:2405.12981): runs of `every` layers share their first layer's slots."""
    return share_layers(params, config, [i - i % every for i in range(config.layers)])


def _mlkv(params: Params, config: Config, *, layers: Count) -> Made:
    """Multi-layer key-value heads (arXiv:2406.09297): `layers` layers, evenly spread, keep slots for all."""
    if not 1 <= layers <= config.layers:
        raise ValueError(f"layers is {layers}, expected 1 to {config.layers} that keep slots")
    sources = [i * config.layers // layers for i in range(layers)]
    return share_layers(params, config, [max(s for s in sources if s <= i) for i in range(config.layers)])


def _lckv(params: Params, config: Config, *, own: Whole = 2) -> Made:
    """Layer-condensed KV (arXiv:2405.10637): `own` layers keep slots; the others share one layer's.

    The shared slots are those of the topmost of the other layers. Half of `own` are the lowest layers, the
    rest the highest ("sandwich").
    """
    low, top = own // 2, config.layers - 1 - (own - own // 2)
    if not 0 <= own or low >= top:
        raise ValueError(f"own is {own}, expected 0 to {config.layers - 2}: some layer must read another")
    return share_layers(params, config, [top if low <= i <= top else i for i in range(config.layers)])


def _yoco(params: Params, config: Config, *, window: Count) -> Made:
    """YOCO-like (arXiv:2405.05254): the upper half shares the last lower slots; the others get a window."""
    last = config.layers // 2 - 1
    if last < 0:
        raise ValueError("a model of one layer has no upper half")
    shared, smaller = share_layers(params, config, [min(i, last) for i in range(config.layers)])
    windows = tuple(
        min(window, config.window(i) or window) if i < last else None for i in range(config.layers)
    )
    return _regrouped(shared, dataclasses.replace(smaller, windows=windows))


def _swiftkv(params: Params, config: Config, *, layer: Whole) -> Made:
    """SwiftKV (arXiv:2410.03960): layers from `layer` on project keys and values from that layer's input."""
    if not 0 <= layer < config.layers:
        raise ValueError(f"layer is {layer}, expected 0 to {config.layers - 1}")
    mixers = tuple(Attention(kv_input=layer) if i >= layer else ATTENTION for i in range(config.layers))
    return _plain_regrouped(params, config, mixers)


def _moba(params: Params, config: Config, *, block: Count = 512, top: Count = 3) -> Made:
    """MoBA (arXiv:2502.13189): queries attend to the `top` blocks that they pick; no weight is new."""
    word = PickedBlocks(block=block, top=top)
    return _plain_regrouped(params, config, (word,) * config.layers)


def _nsa(
    params: Params,
    config: Config,
    *,
    compress: Count = 32,
    stride: Count = 16,
    block: Count = 64,
    top: Count = 16,
    window: Count = 512,
    steps: Whole = 100,
    texts: TokenRows | None = None,
) -> Made:
    """Native sparse attention (NSA, arXiv:2502.11089), its selection fitted to the original's attention."""
    word = dict(compress=compress, stride=stride, block=block, top=top, window=window)
    return to_native_sparse(params, config, word, texts or (), steps)


def _plain_regrouped(params: Params, config: Config, mixers: tuple[Mixer, ...]) -> Made:
    """Put the same parameters under other mixers; ValueError unless every layer is plain attention."""
    if any(mixer_of(config, i) != ATTENTION for i in range(config.layers)):
        raise ValueError("it is defined for models whose layers are all plain attention")
    return _regrouped(params, dataclasses.replace(config, mixers=mixers))


def _regrouped(params: Params, config: Config) -> Made:
    return regroup(params, plan(config)), config


def _mla(
    params: Params, config: Config, *, rank: Count, rotary: Whole = 1, moments: Moments | None = None
) -> Made:
    """Latents shared by all heads, and `rotary` rotated key heads (arXiv:2502.14837, arXiv:2502.07864)."""
    return to_latents(params, config, rank, rotary, moments)


def _eckvh(params: Params, config: Config, *, kv_heads: Count, moments: Moments | None = None) -> Made:
    """Fewer KV heads by singular values of keys and values (ECKVH, arXiv:2406.07056)."""
    return pool_by_values(params, config, kv_heads, moments)


def _linear(
    params: Params,
    config: Config,
    *,
    layers: tuple[Whole, ...] | None = None,
    keep: Whole | None = None,
    mixer: str = "GatedDelta",
    steps: Whole = 200,
    texts: TokenRows | None = None,
) -> Made:
    """Linear-attention layers, each distilled from the attention that it replaces."""
    return to_linear(params, config, texts or (), layers=layers, keep=keep, mixer=mixer, steps=steps)


def _asymgqa(params: Params, config: Config, *, kv_heads: Count, texts: TokenRows | None = None) -> Made:
    """Find groups of like heads, of any size, by a search (AsymGQA, arXiv:2406.14963)."""
    found = activation_products(params, config, _rows(texts)) if texts else weight_products(params, config)
    groups = [asymgqa(layer.k + layer.v, kv_heads) for layer in found]
    return group_heads(params, config, [Grouping(k=group, v=group) for group in groups])


def _wgqa(
    params: Params, config: Config, *, kv_heads: Count, steps: Whole = 100, texts: TokenRows | None = None
) -> Made:
    """GQA by weighted sums of neighbouring heads with trained weights (WGQA, arXiv:2407.10855)."""
    return weighted_groups(params, config, kv_heads, texts or (), steps)


def _dha(
    params: Params, config: Config, *, heads: Count, steps: Whole = 100, texts: TokenRows | None = None
) -> Made:
    """Similar key heads and similar value heads are shared, `heads` of both in all (DHA, arXiv:2406.06567).

    With texts, the heads of a group are fused by weights trained for so many steps; otherwise they are
    averaged.
    """
    groups = dha(weight_products(params, config), heads)
    if not texts or not steps:
        return group_heads(params, config, groups)
    return fused_groups(params, config, groups, texts, steps)


def _qcqa(params: Params, config: Config, *, heads: Count) -> Made:
    """Form groups of any size, and leave layers whole: `heads` KV heads in all layers (QCQA, 2406.10247)."""
    options = [group_layer(layer, config.kv_heads) for layer in weight_products(params, config)]
    return group_heads(params, config, within(group_layers(options), heads).groupings)


def _kdgqa(params: Params, config: Config, *, kv_heads: Count, texts: TokenRows | None = None) -> Made:
    """Fewer KV heads, assigned to query heads in proportion to their keys' norms (KDGQA, arXiv:2408.08454).

    A query head may attend to another group than its own, so the function is unchanged only if all heads are
    equal.
    """
    if not texts:
        raise ValueError("norms of keys are those of texts: give some")
    pooled, smaller = pool_heads(params, config, kv_heads)
    norms = key_norms(pooled, smaller, _rows(texts))
    return group_heads(pooled, smaller, [kdgqa(layer, config.heads, least=1) for layer in norms])


def _rows(texts: TokenRows) -> np.ndarray:
    """Texts as one array, truncated to the shortest."""
    length = min(map(len, texts))
    return np.asarray([list(text[:length]) for text in texts], np.int32)


def _drop(
    params: Params,
    config: Config,
    *,
    layers: tuple[Whole, ...] | None = None,
    count: Count | None = None,
    texts: TokenRows | None = None,
) -> Made:
    """Attention dropped from some layers, or from the `count` that change their input least (AttnDrop)."""
    if (layers is None) == (count is None):
        raise ValueError("give either the layers that lose their attention or how many do (count)")
    if count is not None:
        if not texts or not 1 <= count <= config.layers:
            raise ValueError(f"count={count} of 1 to {config.layers} layers are chosen by texts: give some")
        layers = np.argsort(attention_changes(params, config, texts), kind="stable")[:count].tolist()
    assert layers is not None
    return drop_attention(params, config, layers)


def _low_rank(
    params: Params,
    config: Config,
    *,
    rank: Annotated[int | float, Portion(1)],
    heads: Count = 4,
    moments: Moments | None = None,
) -> Made:
    """Latents of grouped heads (Palu, arXiv:2407.21118); rank: a share of channels or a number."""
    word = fitted_word(rank, heads, columns(params, config, moments))
    return word.params(params, config), word.config(config)


def _lorc(
    params: Params, config: Config, *, most: Share = 0.75, least: Share = 0.25, moments: Moments | None = None
) -> Made:
    """Latents of all heads, of fewer channels from layer to layer (LoRC, arXiv:2410.03111)."""
    return to_progressive(params, config, most, least, moments)


def _matryoshkakv(
    params: Params,
    config: Config,
    *,
    rank: Count,
    steps: Whole = 200,
    texts: TokenRows | None = None,
    moments: Moments | None = None,
) -> Made:
    """Latents of every head in orthogonal bases trained for truncation (MatryoshkaKV, arXiv:2410.14731)."""
    return to_nested(params, config, rank, texts or (), steps, moments)


def _xc_cache(params: Params, config: Config, *, before: tuple[Whole, ...]) -> Made:
    """Insert cross-attention before some layers, which read an encoder's output (arXiv:2404.15420)."""
    word = CrossAttention(width=config.d_model, turns=True)
    return insert_cross_attention(params, config, before, word, jax.random.key(0))


def _cepe(params: Params, config: Config, *, width: Count) -> Made:
    """Cross-attention after every attention, over an encoder's `width` channels (CEPE, arXiv:2402.16617)."""
    return cross_after_each(params, config, width, jax.random.key(0))


def _block(
    params: Params, config: Config, *, length: Count = 4, prefix: Count = 2, layers: Count | None = None
) -> Made:
    """Build the Block Transformer (arXiv:2406.02657); lower `layers` process blocks of `length` tokens."""
    return to_blocks(params, config, length, prefix, layers)


def _recurformer(
    params: Params,
    config: Config,
    *,
    kv_heads: Count,
    near: Count = 16,
    steps: Whole = 200,
    texts: TokenRows | None = None,
) -> Made:
    """`kv_heads` KV heads of every layer stay, those that look nearby are Mamba-2 (arXiv:2410.12850)."""
    return to_recurrent_heads(params, config, texts or (), kv_heads, near, steps)


CONVERSIONS: dict[str, Callable[..., Made]] = {
    "gqa": _gqa, "mqa": _mqa, "wgqa": _wgqa, "asymgqa": _asymgqa, "qcqa": _qcqa, "kdgqa": _kdgqa,
    "dha": _dha, "eckvh": _eckvh, "mla": _mla, "low-rank": _low_rank, "lorc": _lorc,
    "matryoshkakv": _matryoshkakv, "cla": _cla, "mlkv": _mlkv, "lckv": _lckv, "yoco": _yoco,
    "swiftkv": _swiftkv, "moba": _moba, "nsa": _nsa, "drop": _drop, "linear": _linear,
    "recurformer": _recurformer, "xc-cache": _xc_cache, "cepe": _cepe, "block": _block,
}  # fmt: skip


def convert(model: Model, spec: str, texts: TokenRows | Callable[[], TokenRows] | None = None) -> Model:
    """Convert a model by a conversion such as "gqa:kv_heads=2".

    texts: as ids, or a function that returns them if they are needed; singular values then take into account
    the layers' inputs instead of the weights alone, and "linear" is fitted to them.

    Raises InputError for unknown conversions and options, with the nearest name, and if the model cannot be
    converted this way.

    >>> import kvjax
    >>> convert(kvjax.load("recall-tiny"), "mqa").config.kv_heads
    1
    """
    check_single(model, "conversions change one decoder")
    name, options = _parsed(spec)
    asks = {"moments", "texts"} & inspect.signature(CONVERSIONS[name]).parameters.keys()
    known = texts() if asks and callable(texts) else texts
    try:
        if "moments" in asks and known:
            options["moments"] = input_moments(model, known)  # pyright: ignore[reportArgumentType]
        if "texts" in asks:
            options["texts"] = known
        params, config = CONVERSIONS[name](model.params, model.config, **options)
    except (ValueError, TypeError) as error:
        raise InputError(f"{model.name} cannot be converted to {spec}: {error}") from error
    of: Any = BlockTransformer if isinstance(config, BlockConfig) else Model
    return of(
        config, params, tokenizer=model.tokenizer, chat_template=model.chat_template, stop_ids=model.stop_ids,
        special_tokens=model.special_tokens, name=f"{model.name}-{name}",
    )  # fmt: skip


def _parsed(spec: str) -> tuple[str, dict[str, Any]]:
    name, _, text = spec.partition(":")
    if name not in CONVERSIONS:
        near = difflib.get_close_matches(name, CONVERSIONS, 1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(CONVERSIONS)}"
        raise InputError(f"unknown conversion {name!r}: {hint}")
    given = inspect.signature(CONVERSIONS[name]).parameters
    takes = {n: p for n, p in given.items() if p.kind == p.KEYWORD_ONLY and n not in ("moments", "texts")}
    unread = f"{spec!r} cannot be read: write it like gqa:kv_heads=2 or drop:layers=[1,3]"
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        # A bare name is a string.
        options = {
            str(word.arg): x.id if isinstance(x := word.value, ast.Name) else ast.literal_eval(x)
            for word in call.keywords
        }
    except (SyntaxError, ValueError) as error:
        raise InputError(unread) from error
    if call.args:
        raise InputError(unread)
    for option in options:
        if option not in takes:
            raise InputError(f"{name} has no option {option!r}, it takes {', '.join(takes) or 'none'}")
    hints = get_type_hints(CONVERSIONS[name], include_extras=True)
    for option, value in options.items():
        options[option] = read(hints[option], value)
        if options[option] is REFUSED:
            raise InputError(f"{name}: {option} is {value!r}, expected {expected(hints[option])}")
    missing = [n for n, p in takes.items() if p.default is p.empty and n not in options]
    if missing:
        raise InputError(f"{name} needs {', '.join(missing)}: write {name}:{missing[0]}=...")
    return name, options
