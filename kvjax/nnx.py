"""Models as modules of flax.nnx and back, and an attention layer with a cache for a user's own module.

Inside, models stay plain pytrees: a module here holds one, every array as an `nnx.Param`, and calls the same
functions. So whatever trains an `nnx.Module` trains it. Needs flax: pip install 'kvjax[train]'.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("kvjax.nnx needs flax: pip install 'kvjax[train]'") from error

from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.grammar.phase import BY_POSITION
from kvjax.models.config import Config
from kvjax.models.feed_forward import NoMLP
from kvjax.models.layers import Params
from kvjax.models.mixer import Mixer
from kvjax.models.mixers.attention import ATTENTION
from kvjax.models.model import Model, check_single
from kvjax.models.params import init
from kvjax.models.transformer import forward, run_layers
from kvjax.ops.base.rope import Rope
from kvjax.pure import Static, static

_ROPE = Rope()


class _WithoutWeights:
    """All of a model but its weights; compared by identity, as static parts of a module must be."""

    def __init__(self, model: Model):
        self.model = dataclasses.replace(model, params={})


class Decoder(nnx.Module):
    """A model as a module: calling it gives the logits [B, T, V] of every token, without a cache.

    Its parameters are those of the model, by the same names: `decoder.params["layers"][0]["q"]`.

    >>> import kvjax
    >>> decoder = Decoder(kvjax.load("recall-tiny"))
    >>> decoder(jnp.asarray([[1, 2, 3]])).shape[:2], decoder.model().config.layers
    ((1, 3), 4)
    """

    def __init__(self, model: Model):
        check_single(model, "take one of its decoders")
        self.beside = _WithoutWeights(model)
        self.params = _held(model.params)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"] | None = None,
        *,
        segments: Int[Array, "B T"] | None = None,
        remat: bool = False,
    ) -> Float[Array, "B T V"]:
        """lengths, segments, remat: as in `kvjax.models.transformer.hidden`."""
        config = self.beside.model.config
        return forward(plain(self.params), tokens, config, lengths, segments=segments, remat=remat)

    def model(self) -> Model:
        """Build the model with the weights that the module has now, for every function of kvjax."""
        return dataclasses.replace(self.beside.model, params=plain(self.params))


class Attention(nnx.Module):
    """One layer's x + mixer(norm(x)), for a user's own module, with a kvjax cache by any method.

    mixer: attention with the heads given here, or another word of `kvjax.models.mixers`. A call reads whole
    texts without a cache, as training does; `prefill` reads a prompt and keeps what the method keeps of it,
    `step` reads one more token; the cache is an `nnx.Cache` of the module. Raises InputError for methods that
    need a whole decoder: its tokens, or weights made anew.

    >>> layer = Attention(16, heads=2, kv_heads=1, head_dim=8, method="int8", rngs=nnx.Rngs(0))
    >>> layer.prefill(jnp.ones((1, 6, 16)), room=4).shape, layer.step(jnp.ones((1, 1, 16))).shape
    ((1, 6, 16), (1, 1, 16))
    """

    def __init__(
        self,
        d_model: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int,
        method: Method | str | None = None,
        mixer: Mixer = ATTENTION,
        window: int | None = None,
        rope: Rope = _ROPE,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = Config(
            vocab=1, d_model=d_model, layers=1, heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim,
            d_ff=1, rope=rope, windows=(window,), mixers=(mixer,), mlps=(NoMLP(),), tied=True,
        )  # fmt: skip
        params = init(self.config, rngs.params(), dtype)
        self.static = _static(Model(self.config, params), method)
        self.layer = _held(params["layers"][0])
        self.cache: nnx.Cache[Any] = nnx.Cache(None)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        lengths: Int[Array, "B"] | None = None,
        *,
        segments: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        return run_layers(self._params(x), x, self.config, lengths, segments=segments).x

    def prefill(
        self, x: Float[Array, "B T D"], lengths: Int[Array, "B"] | None = None, *, room: int
    ) -> Float[Array, "B T D"]:
        """Read a prompt and compress its cache by the method, with free slots for so many more tokens."""
        whole = jnp.full(x.shape[:1], x.shape[1], jnp.int32) if lengths is None else lengths
        _, cache = steps.prefill(
            self.static.reading, self._params(x), x, whole, None, tokens_bound=x.shape[1], room=room,
            compress=True,
        )  # fmt: skip
        self.cache.set_value(cache)
        return self(x, lengths)

    def step(self, x: Float[Array, "B T D"]) -> Float[Array, "B 1 D"]:
        """Read one token of every row over the cache, which then holds it, too.

        A row without a free slot gives NaN, because a traced step cannot raise. Raises InputError
        without a cache, and for more than one token.
        """
        cache = self.cache.get_value()
        if cache is None:
            raise InputError("this attention has no cache yet: give it a prompt by prefill(x, room=...)")
        if x.shape[:2] != (rows := len(cache.next), 1):
            raise InputError(
                f"x is {x.shape}, expected one token of every row, {(rows, 1, self.config.d_model)}: call "
                "step for each token"
            )
        append = jnp.ones(x.shape[:1], bool)
        y, new = steps.step_hidden(self.static.stepping, self._params(x), cache, x[:, 0], append)
        self.cache.set_value(new)
        return y[:, None]

    def reset(self) -> None:
        """Forget the cache."""
        self.cache.set_value(None)

    def _params(self, x: Array) -> Params:
        d, dtype = self.config.d_model, x.dtype
        around = {"embed": jnp.zeros((1, d), dtype), "norm": jnp.ones((d,), dtype)}
        return around | {"layers": (plain(self.layer),)}


def _static(model: Model, method: Method | str | None) -> Static:
    found = static(model, method)
    reading = found.reading
    whole = reading.method.reread is None and reading.phase == BY_POSITION
    keep = reading.method.keep
    if not whole or (keep is not None and keep.probe is not None):
        raise InputError(
            f"{found.method.id} reads a prompt otherwise than its layer does, or asks its tokens again, "
            "which one layer cannot: choose a method that keeps tokens where they stand, such as 'snapkv'"
        )
    return found


def _held(tree: Any) -> Any:
    """Build a pytree of dicts, tuples and arrays, with every array as an `nnx.Param`."""
    if isinstance(tree, dict):
        return nnx.Dict({name: _held(x) for name, x in tree.items()})
    return nnx.List([_held(x) for x in tree]) if isinstance(tree, tuple) else nnx.Param(tree)


def plain(held: Any) -> Any:
    """Return the arrays of a module's parameters, as kvjax's functions take them: `plain(decoder.params)`."""
    if isinstance(held, nnx.Dict):
        return {name: plain(x) for name, x in held.items()}
    return tuple(plain(x) for x in held) if isinstance(held, nnx.List) else held[...]
