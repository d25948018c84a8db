"""A model as the API passes it around: config, parameters, tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.base.checks import whole_text
from kvjax.base.errors import InputError
from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.config import Config
from kvjax.models.fingerprint import described, fingerprint
from kvjax.models.layers import Params
from kvjax.models.params import Group, check_groups, regroup, runs
from kvjax.models.stacking import entries, groups_in, span
from kvjax.models.transformer import forward

_forward = jax.jit(forward, static_argnames="config")


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder with its weights. Calling it gives the logits [B, T, V] of every token, without a cache.

    Args:
        config: sizes and layers of the decoder.
        params: the weights, a pytree of dicts, tuples and arrays.
        tokenizer: a `tokenizers.Tokenizer`, or None.
        chat_template: the checkpoint's Jinja template of conversations, or None.
        stop_ids: token ids that end a text.
        special_tokens: texts of special tokens by their names, such as "bos_token".
        name: what reports call the model.
        on_mesh: the mesh of the weights, with the rules that split them and all caches; None on one device.

    >>> import kvjax
    >>> kvjax.load("recall-tiny")([[1, 2, 3]]).shape
    (1, 3, 220)
    """

    config: Config
    params: Params
    tokenizer: Any = None
    chat_template: str | None = None
    stop_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    name: str = "model"
    on_mesh: OnMesh | None = None
    # The word that rewrote another model into this one, and that model's fingerprint; not copied by
    # dataclasses.replace.
    made_by: Any = dataclasses.field(init=False, default=None, repr=False)
    made_of: str = dataclasses.field(init=False, default="", repr=False)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The identity that caches and scores record; see `kvjax.models.fingerprint`.

        Computed on first use, once per model. On two busy CPU cores that took 3 ms for the 3 MB of
        recall-tiny; for 100 MB, 0.1 s of float32 or 0.5 s of bfloat16, and 0.5 s once to compile it.
        """
        # Decoders with a config of their own have no mixers.
        mixers = getattr(self.config, "mixers", ())
        forms = "".join(sorted({mixer.stored_form(self.config) for mixer in mixers}))
        if self.made_by is not None:
            # Another machine makes the same weights up to rounding, and their caches are interchangeable.
            return hashlib.sha256(f"{self.made_of} {self.made_by!r}{forms}".encode()).hexdigest()[:16]
        return fingerprint(self.config, self.params, forms)

    @functools.cached_property
    def signature(self) -> str:
        """The identity recorded by fitted arrays: the config, and signs of the embedding's first 256 rows.

        Unlike the fingerprint it is the same in every dtype and however layers are stacked; after further
        training it differs if the embedding has changed.
        """
        signs = np.signbit(np.asarray(self.params["embed"][:256].astype("float32")))
        return hashlib.sha256(described(self.config).encode() + np.packbits(signs).tobytes()).hexdigest()[:16]

    @functools.cached_property
    def models_made(self) -> dict[Any, Model]:
        """The models that methods derived from this one, by their `make` or by the groups of their layers.

        They live as long as this one.
        """
        return {}

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        dtypes = ", ".join(sorted({str(x.dtype) for x in leaves}))
        return (
            f"<{type(self).__name__} {self.name}: {sizes_text(self.config)}; {len(leaves)} arrays of "
            f"{sum(math.prod(x.shape) for x in leaves):,} numbers in {dtypes}>"
        )

    def remade(self, make: Any, config: Config, params: Params) -> Model:
        """Return this model with a method's rewritten config and parameters, and all else unchanged."""
        new = dataclasses.replace(self, config=config, params=params)
        object.__setattr__(new, "made_by", make)
        object.__setattr__(new, "made_of", self.fingerprint)
        return new

    def regrouped(self, groups: tuple[Group, ...]) -> Model:
        """Stack the layers of the same model differently."""
        new = dataclasses.replace(self, params=regroup(self.params, check_groups(self.config, groups)))
        object.__setattr__(new, "made_by", self.made_by)
        object.__setattr__(new, "made_of", self.made_of)
        return new

    def in_runs(self) -> Model:
        """Replace the model's patterns by runs of equal layers, so that groups are in layer order."""
        now = groups_in(self.params)
        each = ((e if len(e) == 1 else runs(self.config, span(e))) for e in entries(now))
        groups = tuple(group for entry in each for group in entry)
        return self if groups == now else self.regrouped(groups)

    def __call__(
        self, tokens: Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]]
    ) -> Float[Array, "B T V"]:
        config = self.config
        # A dynamic rotation grows with the text: its stretched length is not a limit.
        positions = math.inf if config.rope.kind == "dynamic" else config.max_positions
        return _forward(self.params, whole_text(tokens, config.vocab, positions), config)


def sizes_text(config: Any) -> str:
    """Write the sizes of a decoder in words; of two decoders, those of both.

    >>> sizes_text(Config(vocab=9, d_model=8, layers=2, heads=4, kv_heads=2, head_dim=2, d_ff=8))
    '2 layers, 4 heads and 2 KV heads of 2 channels, d_model 8, vocab 9'
    """
    if not isinstance(config, Config):
        parts = [getattr(config, f.name) for f in dataclasses.fields(config)]
        return "; ".join(sizes_text(part) for part in parts if isinstance(part, Config))
    return (
        f"{config.layers} layers, {config.heads} heads and {config.kv_heads} KV heads of {config.head_dim} "
        f"channels, d_model {config.d_model}, vocab {config.vocab}"
    )


def check_single(model: Any, what: str) -> None:
    """Raise InputError if `what` needs a model of one decoder, and this is not one."""
    if not hasattr(model, "config"):
        raise InputError(f"model is {model!r:.80}, expected what kvjax.load returns: load it first")
    if not isinstance(model.config, Config):
        raise InputError(
            f"{model.name} is a {type(model).__name__}, a model of two decoders, expected one decoder: {what}"
        )
