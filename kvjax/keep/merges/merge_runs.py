"""DMC: a run of tokens shares one slot; gates decide which tokens open a new slot, and their weights."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import Inputs, Merge, Observed, Trace, View
from kvjax.keep.algebra import Word
from kvjax.keep.gates.gate import Gate
from kvjax.keep.merges.merge import pick
from kvjax.keep.merges.merge_counted import biases
from kvjax.keep.observations.trace import ConstantTrace
from kvjax.keep.scores.geometry import unrotated
from kvjax.ops.base.rope import angles, rotate


@dataclasses.dataclass(frozen=True)
class OpeningGate(Gate):
    """The log-odds that a token opens a new slot in a head, from the layer's input (arXiv:2403.09636).

    -(x w + b): the token is merged into the previous slot where round(sigmoid(x w + b)) is 1. fitted: "join"
    [L, D, K], "join_bias" [L, K].
    """

    by = "dmc"
    name = "join"

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        sizes = (model.layers, model.width, model.kv_heads)
        check_sizes(self, "gates", "layers, width, KV heads", self.name, sizes)

    def of(self, arrays: dict[str, Array], inputs: Inputs) -> Float[Array, "B K T"]:
        return -linear(arrays, self.name, inputs)


@dataclasses.dataclass(frozen=True)
class RunWeight(OpeningGate):
    """The log of a token's weight in a shared slot, sigmoid(x w + b) (arXiv:2403.09636).

    fitted: "weight" [L, D, K], "weight_bias" [L, K].
    """

    name = "weight"

    def of(self, arrays: dict[str, Array], inputs: Inputs) -> Float[Array, "B K T"]:
        return jax.nn.log_sigmoid(linear(arrays, self.name, inputs))


def linear(arrays: dict[str, Array], name: str, inputs: Inputs) -> Float[Array, "B K T"]:
    """Apply a linear map to the layer's input, one number per KV head."""
    x = jnp.einsum("btd,dk->bkt", inputs.hidden.astype(jnp.float32), arrays[name])
    return x + arrays[f"{name}_bias"][None, :, None]


@dataclasses.dataclass(frozen=True)
class Opening(Word, FittedWord):
    """The log-odds that a token opens a new slot in a head; +inf for the head's first slot."""

    fitted: Fitted | None = None
    by = "dmc"
    looks = False
    ordered = True

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({ConstantTrace(OpeningGate(self.fitted)), ConstantTrace(RunWeight(self.fitted))})

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        OpeningGate(self.fitted).check(model)

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        first = jnp.arange(view.pos.shape[-1]) == 0
        return jnp.where(first, jnp.inf, view.of(ConstantTrace(OpeningGate(self.fitted))))


@dataclasses.dataclass(frozen=True)
class RunMerge(Merge, FittedWord):
    """Merges an evicted slot into the nearest kept slot before it, as a weighted mean.

    Keys k, before rotation, and values v of a run of tokens become sum w_i k_i / sum w_i and sum w_i
    v_i / sum w_i at the position of the run's first token; log(sum w_i / w_first) is added to the slot's
    logits (Dynamic Memory Compression, arXiv:2403.09636, section 3.1).
    """

    fitted: Fitted | None = None
    by = "dmc"
    one_by_one = True

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        RunWeight(self.fitted).check(model)

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({ConstantTrace(RunWeight(self.fitted))})

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Merge the view's slots `leaving` into `kept` ones; index S means no slot."""
        slots, index = view.pos.shape[-1], jnp.minimum(leaving, view.pos.shape[-1] - 1)
        target = before(view.pos, kept, jnp.where(leaving < slots, pick(view.pos, index), -1))
        add = jax.vmap(jax.vmap(lambda x, t, y: x.at[t].add(y, mode="drop")))
        # The weight of a slot is exp(bias) times the weight of its first token.
        first = view.of(ConstantTrace(RunWeight(self.fitted)))
        own = jnp.exp(biases(view))
        log_mine = pick(first + biases(view), index) - pick(first, jnp.minimum(target, slots - 1))
        mine = jnp.where(target < slots, jnp.exp(log_mine), 0.0)
        total = add(own, target, mine)
        grown = add(jnp.zeros(view.pos.shape, jnp.float32), target, jnp.ones(index.shape, jnp.float32)) > 0

        def mean(x: Float[Array, "B K S H"]) -> Float[Array, "B K S H"]:
            return add(own[..., None] * x, target, mine[..., None] * pick(x, index)) / total[..., None]

        rope = seen.attention.rope
        raw, v = mean(unrotated(view, seen)), mean(view.v.astype(jnp.float32))
        cos, sin = angles(rope, jnp.maximum(view.pos, 0), raw.shape[-1], seen.length[:, None, None])
        k = rotate(raw, cos, sin, rope.start)
        return view._replace(
            k=jnp.where(grown[..., None], k.astype(view.k.dtype), view.k),
            v=jnp.where(grown[..., None], v.astype(view.v.dtype), view.v),
            bias=jnp.where(grown, jnp.log(total), biases(view)),
        )


def before(
    pos: Int[Array, "B K S"], kept: Bool[Array, "B K S"], goal: Int[Array, "B K E"]
) -> Int[Array, "B K E"]:
    """Find the kept slot with the largest position below each goal; S if there is none."""
    slots, far = pos.shape[-1], jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(kept, pos, far), axis=-1)
    held = pick(jnp.where(kept, pos, far), order)
    found = jax.vmap(jax.vmap(jnp.searchsorted))(held, goal).astype(jnp.int32) - 1
    return jnp.where(found >= 0, pick(order, jnp.maximum(found, 0)), slots).astype(jnp.int32)
