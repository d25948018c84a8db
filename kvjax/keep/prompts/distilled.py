"""KV-Distill's words: a scorer chooses tokens of a prompt, which are read with weights of their own."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.facts import Fact, Told
from kvjax.grammar.fitted import Fitted, ModelSizes, check_sizes
from kvjax.grammar.protocols import Inputs, Observation, Seen, View
from kvjax.keep.algebra import Word
from kvjax.keep.gates.gate import gated
from kvjax.keep.prompts.lora import check_lora
from kvjax.keep.prompts.reread import Reread


@dataclasses.dataclass(frozen=True)
class TokenScorer:
    """How much a token matters to all heads of all layers: a network on one layer's input (arXiv:2503.10337).

    fitted: "in" [1, D, X], "in_bias" [1, X], "out" [1, X, 1] and "out_bias" [1, 1], with GELUs between.
    """

    fitted: Fitted | None = None
    by = "kv-distill"

    def check(self, model: ModelSizes) -> None:
        """InputError where the arrays are those of another kind of model."""
        check_sizes(self, "scorer", "one, width", "in", (1, model.width))

    def __call__(self, inputs: Inputs) -> Float[Array, "B T"]:
        assert self.fitted is not None
        return judged(inputs.fitted[self.fitted.digest], inputs.hidden)


def judged(arrays: dict[str, Array], hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """A scorer's numbers of tokens with these inputs of its layer."""
    mine = {name: arrays[name].astype(jnp.float32) for name in ("in", "in_bias", "out", "out_bias")}
    return gated(mine, hidden.astype(jnp.float32))[..., 0]


@dataclasses.dataclass(frozen=True)
class Scored(Word):
    """What a scorer says of new tokens, alike in all heads."""

    scorer: TokenScorer

    @property
    def looks(self) -> bool:  # type: ignore[override]
        return False

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({self.scorer})

    def __call__(self, view: View, seen: Seen) -> Float[Array, "B K S"]:
        return jnp.broadcast_to(seen.of(self.scorer)[:, None], view.pos.shape)


@dataclasses.dataclass(frozen=True)
class Distilled(Reread):
    """A prompt runs up to `layer` to choose its tokens; then all of it is read, and these alone stay.

    In this reading they are projected by more weights (`kvjax.steps.prefilling.lora`), so that they may take
    up what is said by the others (arXiv:2503.10337). They stay at their positions, in all heads of all
    layers. layer, score, budget: as in `Reread`. fitted: "q_down" [L, D, R] and "q_up" [L, R, N H], and
    likewise of k, v and o.
    """

    fitted: Fitted | None = None
    by = "kv-distill"
    reads = "Some layers choose tokens of the prompt; all are read, and the chosen ones alone stay."

    @property
    def requires(self) -> Told:
        return {Fact.GIVEN_WEIGHTS: "reads with weights that lie beside the model's"}

    @property
    def breaks(self) -> Told:
        own = "says itself which slots stay of a prompt"
        alone = dict.fromkeys((Fact.OPEN_CHOICE, Fact.ALL_TOKENS, Fact.WHOLE_PROMPTS), own)
        return {**alone, Fact.PLAIN_READING: "reads tokens with marks"}

    def check(self, model: ModelSizes) -> None:
        """InputError where the arrays are those of another kind of model."""
        check_lora(self, model)
