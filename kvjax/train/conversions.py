"""Conversions of a trained model into another architecture, by name: the start of uptraining."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.errors import InputError
from kvjax.make.grouped_low_rank import GroupedLowRank
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.model import Model, check_single
from kvjax.models.transformer import forward
from kvjax.train.convert import drop_attention, pool_heads, share_layers

Made = tuple[Params, Config]


def _gqa(params: Params, config: Config, *, kv_heads: int) -> Made:
    """Grouped-query attention (arXiv:2305.13245): every new KV head is the mean of neighbours."""
    return pool_heads(params, config, kv_heads)


def _mqa(params: Params, config: Config) -> Made:
    """Multi-query attention (arXiv:1911.02150): one KV head, the mean of all."""
    return pool_heads(params, config, 1)


def _cla(params: Params, config: Config, *, every: int = 2) -> Made:
    """Cross-layer attention (arXiv:2405.12981): runs of `every` layers read their first one's slots."""
    return share_layers(params, config, [i - i % every for i in range(config.layers)])


def _mlkv(params: Params, config: Config, *, layers: int) -> Made:
    """Multi-layer key-value heads (arXiv:2406.09297): `layers` layers, evenly spread, keep slots for all."""
    if not 1 <= layers <= config.layers:
        raise ValueError(f"layers is {layers}, expected 1 to {config.layers} that keep slots")
    sources = [i * config.layers // layers for i in range(layers)]
    return share_layers(params, config, [max(s for s in sources if s <= i) for i in range(config.layers)])


def _drop(params: Params, config: Config, *, layers: Sequence[int]) -> Made:
    """Attention dropped from some layers (arXiv:2406.15786)."""
    return drop_attention(params, config, layers)


def _low_rank(params: Params, config: Config, *, rank: float | int, heads: int = 4) -> Made:
    """Latents of grouped heads (Palu, arXiv:2407.21118), by the weights alone; rank: a share or a number."""
    word = GroupedLowRank(rank, heads)
    return word.params(params, config), word.config(config)


CONVERSIONS: dict[str, Callable[..., Made]] = {
    "gqa": _gqa, "mqa": _mqa, "cla": _cla, "mlkv": _mlkv, "drop": _drop, "low-rank": _low_rank,
}  # fmt: skip


def convert(model: Model, spec: str) -> Model:
    """What a conversion such as "gqa:kv_heads=2" makes of a model.

    Raises InputError for unknown conversions and options, with the nearest name, and where the model cannot
    be converted so.

    >>> import kvjax
    >>> convert(kvjax.load("recall-tiny"), "mqa").config.kv_heads
    1
    """
    check_single(model, "conversions change one decoder")
    name, options = _parsed(spec)
    try:
        params, config = CONVERSIONS[name](model.params, model.config, **options)
    except (ValueError, TypeError) as error:
        raise InputError(f"{model.name} cannot be converted to {spec}: {error}") from error
    return Model(
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
    takes = {n: p for n, p in given.items() if p.kind == p.KEYWORD_ONLY}
    unread = f"{spec!r} cannot be read: write it like gqa:kv_heads=2 or drop:layers=[1,3]"
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise InputError(unread) from error
    if call.args:
        raise InputError(unread)
    for option in options:
        if option not in takes:
            raise InputError(f"{name} has no option {option!r}, it takes {', '.join(takes) or 'none'}")
    missing = [n for n, p in takes.items() if p.default is p.empty and n not in options]
    if missing:
        raise InputError(f"{name} needs {', '.join(missing)}: write {name}:{missing[0]}=...")
    return name, options


class Difference(NamedTuple):
    """How far a converted model is from its original: mean KL divergence in nats, share of equal choices."""

    divergence: float
    agreement: float


def difference(model: Model, other: Model, texts: Sequence[Sequence[int]]) -> Difference:
    """The mean over all tokens of KL(model || other), and how often both like the same token best.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> difference(model, model, [[1, 2, 3]])
    Difference(divergence=0.0, agreement=1.0)
    """
    total = np.zeros(3)
    for text in texts:
        tokens = jnp.asarray([list(text)], jnp.int32)
        total += np.asarray(_compared(model.params, other.params, tokens, model.config, other.config))
    return Difference(float(total[0] / total[2]), float(total[1] / total[2]))


def _compare(
    params: Params, others: Params, tokens: Int[jax.Array, "B T"], config: Config, other: Config
) -> tuple[jax.Array, jax.Array, int]:
    a = jax.nn.log_softmax(forward(params, tokens, config).astype(jnp.float32))
    b = jax.nn.log_softmax(forward(others, tokens, other).astype(jnp.float32))
    same = (a.argmax(-1) == b.argmax(-1)).sum()
    return jnp.sum(jnp.exp(a) * (a - b)), same, tokens.size


_compared = jax.jit(_compare, static_argnames=("config", "other"))
