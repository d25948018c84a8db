"""Training under a method: it compresses the start of every row; the rest attends to that cache."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.compat.shipped_fits import ready
from kvjax.fitting.loops.whole import check_whole
from kvjax.fitting.prompts.memory_tokens import embeddings
from kvjax.fitting.prompts.questions import adapter
from kvjax.fitting.prompts.run_memory import repeated
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted, fitted_words, lacks_fit, spelled, with_fitted
from kvjax.keep.prompts.memory_tokens import MemoryTokens, RunMemory
from kvjax.methods.parse import parse_method
from kvjax.models.feed_forward import MoE, mlp_of
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.pure import bind
from kvjax.steps import Run

Arrays = dict[str, Array]


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["method"])
@dataclasses.dataclass(frozen=True)
class ContextCompressor:
    """The method that compresses contexts. arrays: the parameters of its words, by their digests."""

    method: Method
    arrays: dict[str, Arrays]

    @property
    def learns(self) -> Arrays | None:
        """The parameters of learned tokens, which train with the model; None if the method has none."""
        word = _learned_tokens(self.method)
        return None if word is None else self.arrays[word.fitted.digest]

    def with_learned(self, arrays: Arrays) -> ContextCompressor:
        """Copy, with new parameters of learned tokens."""
        digest = _learned_tokens(self.method).fitted.digest
        return dataclasses.replace(self, arrays=self.arrays | {digest: arrays})

    def fitted(self, model: Model) -> Fitted:
        """Return learned tokens' trained parameters, as `fitted=` of the method for the trained model."""
        assert self.learns is not None
        found = {name: np.asarray(x) for name, x in self.learns.items()}
        return Fitted(found, type(_learned_tokens(self.method)).__name__, model.signature)


def _learned_tokens(method: Method) -> Any:
    """Find a method's memory tokens or restore tokens, which are trained; None for other methods."""
    return method.reread if isinstance(method.reread, MemoryTokens) else method.restore


def _begun(method: Method, model: Model, seed: int) -> Method:
    """Initialise the method's learned tokens at random, unless they were fitted before."""
    word = _learned_tokens(method)
    if word is None:
        return method
    check_whole(model, "learned tokens")
    if word.fitted is not None:
        return method
    # A LoRA of zeros on both sides changes nothing and gets no gradient.
    none = {name: jnp.zeros_like(x) for name, x in adapter(model, 1, seed).items()}
    start = none | embeddings(model, word, seed)
    arrays = {name: np.asarray(x) for name, x in start.items()}
    word = dataclasses.replace(word, fitted=Fitted(arrays, type(word).__name__, ""))
    keep = method.keep
    if keep is None or keep.restore is None:
        return dataclasses.replace(method, reread=word)
    return dataclasses.replace(method, keep=dataclasses.replace(keep, restore=word))


def compressor(text: str, model: Model, seed: int) -> ContextCompressor:
    """Build a run's method; its learned tokens start at random unless they were fitted before.

    Raises InputError for a method that does not fit the model, or through which no gradient reaches weights.
    """
    label, build = parse_method(text)
    if build.takes_budget:
        raise InputError(f"train.method is {text!r}, which needs a budget: write {label}(budget=0.25)")
    method = ready(model, build())
    for part in ("store", "read", "layers", "make", "stack", "host"):
        if getattr(method, part):
            raise InputError(
                f"train.method is {text!r}, whose {part} is not for training: give a method that drops or "
                "merges tokens of the context, or leaves memory tokens, as snapkv(budget=0.25) and gisting do"
            )
    if any(isinstance(mlp_of(model.config, i), MoE) for i in range(model.config.layers)):
        raise InputError("train.method is given, and the model has experts, whose balance is not learned so")
    method = _begun(method, model, seed)
    for word in fitted_words(method):
        if lacks_fit(word):
            raise InputError(
                f"{method.id} was never fitted to this model: run "
                f"`kvjax fit {spelled(method.spec, word.by)}`, and give the method fitted=FILE"
            )
    method = bind(method, model)
    return ContextCompressor(method, with_fitted({}, method).get("fitted", {}))


def read_and_said(
    compressor: ContextCompressor,
    config: Any,
    params: Params,
    context: Int[Array, "B C"],
    tail: Int[Array, "B T"],
) -> tuple[Float[Array, "B T V"], Float[Array, ""]]:
    """Logits after every token of `tail`, given the compressed contexts, and the loss of repeating runs.

    The second is the mean of -log p of the tokens of every run, predicted from its memory alone (LoMA,
    arXiv:2401.09486); 0 for other methods.
    """
    run, params = Run(config, compressor.method), params | {"fitted": compressor.arrays}
    lengths, tails = (jnp.full(len(x), x.shape[1], jnp.int32) for x in (context, tail))
    prompt = steps.observe(run, params, context, lengths, None, steps.needs_of(run, params))
    sizes: dict[str, Any] = dict(tokens=context.shape[1], room=tail.shape[1])
    cache = steps.settle(run, params, prompt, None, compress=True, **sizes)
    plain = run._replace(method=dataclasses.replace(run.method, reread=None))
    read = steps.read_tokens(plain, params, tail, tails, cache, frozenset(), as_steps=True)
    again = jnp.zeros((), jnp.float32)
    if isinstance(run.method.reread, RunMemory):
        again = repeated(run, params, prompt, context, lengths)
    return read.logits, again
