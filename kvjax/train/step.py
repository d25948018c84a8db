"""One optimiser step: gradients in parts, in the dtype of computing, onto weights in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.block_transformer import forward as forward_blocks
from kvjax.models.config import Config
from kvjax.models.encoder import encode
from kvjax.models.feed_forward import MoE
from kvjax.models.layers import Params
from kvjax.models.mixer import LayerValues
from kvjax.models.mixers.transformer_vq import VectorQuantised
from kvjax.models.transformer import run_layers, unembed
from kvjax.ops.attention.union import Keys
from kvjax.train.compressed import ContextCompressor, read_and_said
from kvjax.train.devices import places
from kvjax.train.losses import distilled, next_token, squared
from kvjax.train.settings import Loop
from kvjax.train.trained import FrozenWeights, joined


class TrainState(NamedTuple):
    """Everything that a step changes.

    params: the trained ones, as `kvjax.train.trained.split` returns them, or a `TrainedArrays` of them and of
    parameters trained beside the model.
    """

    params: Any
    optimiser: Any
    step: Int[Array, ""]


class BatchParts(NamedTuple):
    """One batch in A parts; each is as `kvjax.train.data.packing.PackedRows` has it, with S = T + 1."""

    tokens: Int[Array, "A B S"]
    weights: Float[Array, "A B S"]
    segments: Int[Array, "A B S"] | None


class StepResult(NamedTuple):
    """Mean loss in nats per token, the unclipped gradient's norm; finite: both are, and new weights."""

    loss: Float[Array, ""]
    norm: Float[Array, ""]
    finite: Bool[Array, ""]


def computed(params: Params, loop: Loop) -> Params:
    """Weights in the dtype that layers compute in."""
    return jax.tree.map(lambda x: x.astype(loop.compute), params)


@partial(jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["config"])
@dataclasses.dataclass(frozen=True)
class Frozen:
    """A model that is not trained."""

    params: Params
    config: Config


class Companions(NamedTuple):
    """Models that a step runs beside the trained one: a teacher, and a reader of the start of every row.

    The reader is an encoder, or a method that compresses the model's own cache.
    """

    teacher: Frozen | None = None
    encoder: Frozen | None = None
    compressor: ContextCompressor | None = None


class TrainedArrays(NamedTuple):
    """The model's trained parameters, and those of an encoder (arXiv:2402.16617) or of learned tokens."""

    model: Any
    other: Any


def parted(trained: Any, beside: Companions) -> tuple[Any, Companions]:
    """Return the trained parameters of the model, and the companions with their trained parameters."""
    if not isinstance(trained, TrainedArrays):
        return trained, beside
    if beside.compressor is not None:
        return trained.model, beside._replace(compressor=beside.compressor.with_learned(trained.other))
    assert beside.encoder is not None
    return trained.model, beside._replace(encoder=dataclasses.replace(beside.encoder, params=trained.other))


class ModelOutputs(NamedTuple):
    """The model's results for a part: logits, and the layers' values that losses need.

    unequal, apart: unequal use of experts and distances of keys from their codes, summed over layers. again:
    the loss of repeating runs of the context from their memory alone.
    """

    logits: Float[Array, "B T V"]
    unequal: Float[Array, ""]
    apart: Float[Array, ""]
    again: Float[Array, ""]
    layers: list[dict[str, Any]]


ALONE = Companions()


def told(part: BatchParts, loop: Loop) -> BatchParts:
    """Cut the context, which is processed separately, off the rows of a part; whole rows without one."""
    return BatchParts(*(None if x is None else x[..., loop.context :] for x in part))  # pyright: ignore


def total_loss(
    params: Params,
    part: BatchParts,
    config: Config | BlockConfig,
    loop: Loop,
    on: OnMesh | None = None,
    beside: Companions = ALONE,
) -> Float[Array, ""]:
    """Compute the summed loss of the rows [B, T + 1] of one part, in nats."""
    logits = _read(params, part, config, loop, on, beside=beside).logits
    part = told(part, loop)
    return next_token(logits, part.tokens, part.weights)


def learned_loss(
    params: Params,
    part: BatchParts,
    config: Config | BlockConfig,
    loop: Loop,
    beside: Companions = ALONE,
    on: OnMesh | None = None,
) -> Float[Array, ""]:
    """Compute the loss that training minimises: `total_loss`, divergence from a teacher, layers' losses.

    Losses of layers are weighed per target: `loop.balance` for unequal use of experts, `loop.codes` for the
    distance from codes, `loop.repeat` for repeated runs of tokens.
    """
    teacher = beside.teacher
    asked = {"hidden": loop.distil_hidden, "attention": loop.distil_attention} if teacher else {}
    asked = {what: share for what, share in asked.items() if share}
    mine = _read(params, part, config, loop, on, tuple(asked), beside)
    whole, part = part, told(part, loop)
    loss = next_token(mine.logits, part.tokens, part.weights)
    if teacher is not None:
        # The teacher reads the context uncompressed.
        all_of_it = dataclasses.replace(loop, context=0, method=None)
        theirs = _read(teacher.params, whole, teacher.config, all_of_it, on, tuple(asked))
        said = theirs.logits[:, loop.context :]
        loss = (1 - loop.distil) * loss + loop.distil * distilled(mine.logits, said, part.weights)
        for what, share in asked.items():
            loss += share * _from_layers(what, mine.layers, theirs.layers, part.weights)
    more = loop.balance * mine.unequal + loop.codes * mine.apart + loop.repeat * mine.again
    return loss + part.weights[:, 1:].sum() * more


def fellow(layer: int, layers: int, theirs: int) -> int:
    """Find the teacher's layer that a layer is distilled from: evenly spread, the last from the last.

    >>> [fellow(i, 2, 6) for i in range(2)], [fellow(i, 3, 3) for i in range(3)]
    ([2, 5], [0, 1, 2])
    """
    return max(0, (layer + 1) * theirs // layers - 1)


def _from_layers(
    what: str, mine: list[dict[str, Any]], theirs: list[dict[str, Any]], weights: Float[Array, "B S"]
) -> Float[Array, ""]:
    """Compute the mean over layers of `squared`; layers without a mixer have no attention to compare."""
    pairs = [(x[what], theirs[fellow(i, len(mine), len(theirs))][what]) for i, x in enumerate(mine)]
    each = [squared(a, b, weights) for a, b in pairs if a is not None and b is not None]
    return sum(each, jnp.zeros((), jnp.float32)) / max(1, len(each))


def _read(
    params: Params,
    part: BatchParts,
    config: Config | BlockConfig,
    loop: Loop,
    on: OnMesh | None,
    asked: tuple[str, ...] = (),
    beside: Companions = ALONE,
) -> ModelOutputs:
    none = jnp.zeros((), jnp.float32)
    if isinstance(config, BlockConfig):
        return ModelOutputs(_said(params, part, config, loop), none, none, none, [])
    if beside.compressor is not None:
        said, again = _compressed(params, part, config, loop, beside.compressor)
        return ModelOutputs(said, none, none, again, [])

    def look(passed: LayerValues) -> dict[str, Any]:
        seen = {"hidden": passed.out, "attention": passed.mixed}
        unequal = apart = none
        if isinstance(passed.mixer, VectorQuantised) and passed.read is not None:
            apart = passed.mixer.apart(passed.p, passed.read)
        if isinstance(passed.mlp, MoE) and passed.fed is not None:
            unequal = passed.mlp.balance(passed.p, passed.fed)
        return {"unequal": unequal, "apart": apart} | {what: seen[what] for what in asked}

    context, params = context_of(part, loop, beside.encoder), computed(params, loop)
    part = told(part, loop)
    segments = None if part.segments is None else part.segments[:, :-1]
    ran = run_layers(
        params, part.tokens[:, :-1], config, None, context, segments=segments, remat=loop.remat, on_mesh=on,
        passes=loop.passes, look=look,
    )  # fmt: skip
    layers = [
        jax.tree.map(lambda x, i=i: x[i], group)
        for group in ran.collected
        for i in range(len(group["unequal"]))
    ]
    unequal, apart = (sum((layer[what] for layer in layers), none) for what in ("unequal", "apart"))
    return ModelOutputs(unembed(params, ran.x, config), unequal, apart, none, layers)


def _said(params: Params, part: BatchParts, config: BlockConfig, loop: Loop) -> Float[Array, "B T V"]:
    return forward_blocks(computed(params, loop), part.tokens[:, :-1], config)


def _compressed(
    params: Params, part: BatchParts, config: Config, loop: Loop, by: ContextCompressor
) -> tuple[Float[Array, "B T V"], Float[Array, ""]]:
    context, rest = part.tokens[:, : loop.context], told(part, loop).tokens[:, :-1]
    return read_and_said(by, config, computed(params, loop), context, rest)


def context_of(part: BatchParts, loop: Loop, encoder: Frozen | None) -> Keys | None:
    """Encode the first `loop.context` tokens of every row."""
    if encoder is None:
        return None
    return encode(
        computed(encoder.params, loop), part.tokens[:, : loop.context], encoder.config,
        chunk=loop.chunk or None,
    )  # fmt: skip


def make_step(
    config: Config | BlockConfig,
    loop: Loop,
    optimiser: optax.GradientTransformation,
    on: OnMesh | None = None,
) -> Callable[..., tuple[TrainState, StepResult]]:
    """Make the jitted step (state, parts, companions of the model, frozen parameters or None).

    It donates its state. A loss, gradient or new weight of NaN or inf changes no weight.
    """

    def step(
        state: TrainState, parts: BatchParts, beside: Companions = ALONE, fixed: FrozenWeights | None = None
    ) -> tuple[TrainState, StepResult]:
        count = jnp.maximum(told(parts, loop).weights[:, :, 1:].sum(), 1.0)

        def loss_of(trained: Any, part: BatchParts) -> Float[Array, ""]:
            own, others = parted(trained, beside)
            return learned_loss(joined(own, fixed), part, config, loop, others, on)

        def add(carry: Any, part: BatchParts) -> tuple[Any, None]:
            found = jax.value_and_grad(loss_of)(state.params, part)
            return jax.tree.map(jnp.add, carry, found), None

        zeros = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, state.params)
        loss, gradient = jax.tree.map(lambda x: x / count, jax.lax.scan(add, zeros, parts)[0])
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of an integer step
            change, kept = optimiser.update(gradient, state.optimiser, state.params)
            params = jax.tree.map(jnp.add, state.params, change)
        finite &= jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(params)]).all()
        new = TrainState(params, kept, state.step + 1)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        if on is not None:
            assert isinstance(config, Config)
            where = places(new, joined(state.params, fixed), config, on)
            new = jax.lax.with_sharding_constraint(new, where)
        return new, StepResult(loss, norm, finite)

    return jax.jit(step, donate_argnums=0)


def fault(
    params: Params, parts: BatchParts, config: Config | BlockConfig, loop: Loop, beside: Companions = ALONE
) -> str:
    """Name the first array with NaN or inf: a layer's output, the logits, a gradient or a weight."""
    beside = beside._replace(teacher=None)
    for a in range(parts.tokens.shape[0]):
        part = jax.tree.map(lambda x, a=a: x[a], parts)
        if found := _fault_ahead(params, part, config, loop, beside):
            return found
        gradient = jax.grad(learned_loss)(params, part, config, loop, beside)
        names = [
            jax.tree_util.keystr(path, simple=True, separator=".")
            for path, x in jax.tree.leaves_with_path(gradient)
            if not bool(jnp.isfinite(x).all())
        ]
        if names:
            return f"the gradient of {', '.join(names[:4])}"
    return "the sum over the batch, or a weight that the optimiser made of it,"


def _fault_ahead(
    params: Params, part: BatchParts, config: Config | BlockConfig, loop: Loop, beside: Companions
) -> str | None:
    """`fault` without the gradients."""
    if isinstance(config, BlockConfig):
        return None if bool(jnp.isfinite(_said(params, part, config, loop)).all()) else "the logits"
    if beside.compressor is not None:
        said = _compressed(params, part, config, loop, beside.compressor)
        finite = all(bool(jnp.isfinite(x).all()) for x in said)
        return (
            None if finite else f"the loss of tokens after contexts that {beside.compressor.method.id} read"
        )
    read, low = told(part, loop), computed(params, loop)
    segments = None if read.segments is None else read.segments[:, :-1]
    context = context_of(part, loop, beside.encoder)
    ran = run_layers(
        low, read.tokens[:, :-1], config, None, context, segments=segments, passes=loop.passes,
        look=lambda x: jnp.isfinite(x.out).all(),
    )  # fmt: skip
    layers = [bool(ok) for group in ran.collected for ok in group]
    if not all(layers):
        return f"the output of layer {layers.index(False)}"
    return None if bool(jnp.isfinite(unembed(low, ran.x, config)).all()) else "the logits"
