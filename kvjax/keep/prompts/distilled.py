"""KV-Distill: a scorer selects tokens of a prompt, which are then read with weights of their own."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import Inputs, Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.gates.gate import gated
from kvjax.keep.prompts.lora import check_lora
from kvjax.keep.prompts.reread import Reread


@dataclasses.dataclass(frozen=True)
class TokenScorer(Observation, FittedWord):
    """How much a token matters to all heads and layers, from one layer's input (arXiv:2503.10337).

    A GELU network. fitted: "in" [1, D, X], "in_bias" [1, X], "out" [1, X, 1] and "out_bias" [1, 1].
    """

    fitted: Fitted | None = None
    by = "kv-distill"

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_sizes(self, "scorer", "one, width", "in", (1, model.width))

    def __call__(self, inputs: Inputs) -> Float[Array, "B T"]:
        assert self.fitted is not None
        return judged(inputs.fitted[self.fitted.digest], inputs.hidden)


def judged(arrays: dict[str, Array], hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """Compute a scorer's output for tokens, given their hidden states at the scorer's layer."""
    mine = {name: arrays[name].astype(jnp.float32) for name in ("in", "in_bias", "out", "out_bias")}
    return gated(mine, hidden.astype(jnp.float32))[..., 0]


@dataclasses.dataclass(frozen=True)
class TokenScore(Word):
    """A scorer's output for new tokens, the same in all heads."""

    scorer: TokenScorer

    @property
    def looks(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({self.scorer})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return jnp.broadcast_to(seen.of(self.scorer)[:, None], view.pos.shape)


@dataclasses.dataclass(frozen=True)
class Distilled(Reread, FittedWord):
    """Layers up to `layer` select tokens of a prompt; then the model reads all of it and stores only those.

    In this second pass the selected tokens are projected with additional weights
    (`kvjax.steps.prefilling.lora`), so that they can absorb what the other tokens say (arXiv:2503.10337).
    They keep their positions, in all heads of all layers. layer, score, budget: as in `Reread`. fitted:
    "q_down" [L, D, R] and "q_up" [L, R, N H], and likewise of k, v and o.
    """

    fitted: Fitted | None = None
    by = "kv-distill"
    marks = True
    reads = "Some layers choose tokens of the prompt; all are read, and the chosen ones alone stay."

    @property
    def requires(self) -> Reasons:
        beside = "reads with weights beside the model's"
        return dict.fromkeys((Fact.GIVEN_WEIGHTS, Fact.DENSE_PROMPTS), beside)

    @property
    def breaks(self) -> Reasons:
        own = "selects the slots of a prompt itself"
        alone = dict.fromkeys((Fact.OBSERVED, Fact.ALL_TOKENS, Fact.WHOLE_PROMPTS), own)
        return {**alone, Fact.PLAIN_READING: "reads tokens with weights beside the model's"}

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_lora(self, model)
