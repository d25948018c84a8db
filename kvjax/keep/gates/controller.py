"""ADORE's controller: a recurrent network that predicts which tokens the next query attends to."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import Carried, Inputs, Observation, Observed, Trace, View
from kvjax.keep.algebra import Word
from kvjax.keep.gates.gate import Gate
from kvjax.keep.observations.observe import BOTH
from kvjax.keep.observations.trace import ConstantTrace

# A row's state, and the prediction of its KV heads after the newest token.
Carries = tuple[Float[Array, "B X"], Float[Array, "B K R"]]


def check_controller(word: Controller | TokenProjection, model: ModelSizes) -> None:
    """Raise InputError if a controller's arrays do not fit the model's sizes."""
    assert word.fitted is not None
    layers, width, heads = model.layers, model.width, model.kv_heads
    check_sizes(word, "controller", "layers, width", "in", (layers, width))
    check_sizes(word, "controller", "layers", "state", (layers,))
    check_sizes(word, "controller", "layers, width, KV heads", "told", (layers, width, heads))
    hidden, channels = word.fitted.arrays["state"].shape[1], word.fitted.arrays["told"].shape[-1]
    check_sizes(
        word, "controller", "layers, states, KV heads, channels", "ask", (layers, hidden, heads, channels)
    )


@dataclasses.dataclass(frozen=True)
class Controller(Carried, FittedWord):
    """A GRU over a layer's inputs, with an output per KV head: A z + a, z being the newest token's state.

    z_t = GRU(x_t, z_(t-1)) (arXiv:2407.02328, as in arXiv:1412.3555 with a bias on the state's side, too): r,
    u = sigmoid(x W + b + z V + c), n = tanh(x W + b + r (z V + c)), z' = (1 - u) n + u z. Every row carries
    its z. fitted: "in" [L, D, 3 X] and "in_bias" [L, 3 X], with r, u and n concatenated, "state" [L, X, 3 X]
    and "state_bias" [L, 3 X], "ask" [L, X, K, R] and "ask_bias" [L, K, R]; "told" [L, D, K, R] for
    `TokenProjection`.
    """

    fitted: Fitted | None = None
    by = "adore"
    phases = BOTH

    @property
    def channels(self) -> int:
        """R, the number of channels that describe a token; 0 if nothing is fitted."""
        return 0 if self.fitted is None else self.fitted.arrays["told"].shape[-1]

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_controller(self, model)

    def start(self, inputs: Inputs) -> Carries:
        arrays = self._arrays(inputs)
        states = jnp.zeros((inputs.pos.shape[0], arrays["state"].shape[0]), jnp.float32)
        return states, asked_for(arrays, states)

    def carry(self, carried: Carries, inputs: Inputs) -> Carries:
        arrays = self._arrays(inputs)
        states = after(arrays, inputs.hidden.astype(jnp.float32), inputs.pos >= 0, carried[0])[-1]
        return states, asked_for(arrays, states)

    def read(self, carried: Carries) -> Float[Array, "B K R"]:
        return carried[1]

    def __call__(self, inputs: Inputs) -> Float[Array, "B K R"]:
        return self.read(self.carry(self.start(inputs), inputs))

    def _arrays(self, inputs: Inputs) -> dict[str, Array]:
        assert self.fitted is not None
        return {name: x.astype(jnp.float32) for name, x in inputs.fitted[self.fitted.digest].items()}


def after(
    arrays: dict[str, Array], x: Float[Array, "B T D"], live: Bool[Array, "B T"], start: Float[Array, "B X"]
) -> Float[Array, "T B X"]:
    """Compute the states of a GRU after every token; padding leaves the state unchanged."""
    made = x @ arrays["in"] + arrays["in_bias"][None, None]
    state, bias = arrays["state"], arrays["state_bias"][None]

    def one(z: Array, token: tuple[Array, Array]) -> tuple[Array, Array]:
        (r, u, n), (s, v, m) = (jnp.split(y, 3, axis=-1) for y in (token[0], z @ state + bias))
        r, u = jax.nn.sigmoid(r + s), jax.nn.sigmoid(u + v)
        new = jnp.where(token[1][:, None], (1 - u) * jnp.tanh(n + r * m) + u * z, z)
        return new, new

    return jax.lax.scan(one, start, (jnp.swapaxes(made, 0, 1), live.T))[1]


def asked_for(arrays: dict[str, Array], states: Float[Array, "*b X"]) -> Float[Array, "*b K R"]:
    """Compute the outputs A z + a of the KV heads for the given states."""
    bias = arrays["ask_bias"]
    asked = jnp.einsum("...x,xkr->...kr", states, arrays["ask"])
    return asked + bias.reshape(*(1,) * (asked.ndim - 2), *bias.shape)


@dataclasses.dataclass(frozen=True)
class TokenProjection(Gate):
    """Channel `channel` of x M for every token and KV head, for `PredictedAttention`; x is the input."""

    channel: int = 0
    by = "adore"

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_controller(self, model)

    def of(self, arrays: dict[str, Array], inputs: Inputs) -> Float[Array, "B K T"]:
        made = arrays["told"][..., self.channel]
        return jnp.einsum("btd,dk->bkt", inputs.hidden.astype(jnp.float32), made)


@dataclasses.dataclass(frozen=True)
class PredictedAttention(Word):
    """score[j] = (A z + a) . (x_j M): how much attention the controller predicts for a token.

    z is the state after the newest token. x_j M is recorded when token j is read, in as many numbers as the
    controller has channels (ADORE, arXiv:2407.02328).
    """

    controller: Controller
    looks = False

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({self.controller})

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset(self._known())

    def _known(self) -> list[ConstantTrace]:
        return [
            ConstantTrace(TokenProjection(self.controller.fitted, i)) for i in range(self.controller.channels)
        ]

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        asked = seen.of(self.controller)
        known = jnp.stack([view.of(trace) for trace in self._known()], axis=-1)
        return jnp.einsum("bkr,bksr->bks", asked, known)
