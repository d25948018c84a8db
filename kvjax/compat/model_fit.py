"""Which methods fit which model: what a method requires of slots, and what the layers' slots are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from kvjax.base.errors import InputError
from kvjax.compat.lent_fits import check_lent
from kvjax.compat.model_facts import LayerFacts, facts_of, refuse
from kvjax.compat.store_fit import check_store
from kvjax.grammar import Keep, Method, check
from kvjax.grammar.calls import compares_once, hiding_of, observations
from kvjax.grammar.facts import Fact
from kvjax.grammar.fitted import ModelSizes, fitted_words, lacks_fit, spelled
from kvjax.grammar.kinds import Answering
from kvjax.grammar.read_kinds import (
    Copying,
    EstimatingRest,
    FittedBlocks,
    Foreseeing,
    Prefetching,
    Recycling,
    Remembering,
    Reusing,
    Sampling,
    Tracing,
)
from kvjax.grammar.refuse_keep import crowded
from kvjax.keep.observations.observe import Queries
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.exchange import takes_of
from kvjax.models.mixers.attention import Attention, mixer_of


@lru_cache(maxsize=1024)
def check_fit(method: Method, config: Config) -> None:
    """Raise InputError if a method cannot act on what the model's layers store, saying which and why.

    Its words must also fit together, which was not checked before for a method that was not built by name.
    Codecs must be able to encode every kind of key, value and state; scores that read keys need keys that a
    query can attend to; merged layers must have slots; and a model without slots has nothing to keep or to
    read. A context is neither scored nor evicted. An encoder, whose tokens attend to later ones, has no
    cache.
    """
    try:
        check(method)
    except ValueError as error:
        raise InputError(str(error)) from error
    if method.layers:
        if len(method.layers) != config.layers:
            raise InputError(
                f"{len(method.layers)} sentences were given for the {config.layers} layers of this model, "
                "expected one for each: see kvjax.by_layer"
            )
        for one in method.sentences:
            check_fit(one, config)
        return
    _check_fitted(method, config)
    config = config if method.make is None else _remade(method, config)
    facts = facts_of(config)
    if facts.encoder:
        raise InputError(
            "this model is an encoder, whose tokens see later ones, so nothing of it can be cached: give "
            "it to kvjax.encode_context, or call it without a cache"
        )
    lower = None if method.keep is None else method.keep.lower
    if any((method.store, method.stack, lower, isinstance(method.read, Copying))):
        check_store(method, config, facts)
    _check_reading(method, config)
    if method.host is not None and facts.shared_slots:
        other = "quest" if method.read is not None else "the method without Host()"
        refuse(method, "several layers read the slots that it brings to the device for one", other)
    if method.read_prompt is not None:
        _check_read_prompt(method, facts)
    if method.keep is None and method.read is None:
        return
    _check_slots(method, facts)
    if method.keep is not None:
        _check_keep(method, method.keep, config, facts)
    if method.read is not None:
        _check_read(method, method.read, config, facts)


def _check_slots(method: Method, facts: LayerFacts) -> None:
    """Raise InputError if no layer has slots that could be evicted, or skipped by a read."""
    if not facts.slots:
        refuse(method, "no layer of this model keeps slots, its states have a constant size", "int8 or int4")
    for name, shared in (("slot values", "the values of one layer"), ("logits", "attention weights")):
        if name in facts.takes:
            refuse(
                method,
                f"its layers share {shared} slot by slot, and would choose differently",
                "a store method",
            )
    if any(s.ids for s in facts.slots):
        refuse(
            method,
            "its keys are made from a token's slot and the one before it, so none may be left out",
            "a store method",
        )


def _check_keep(method: Method, keep: Keep, config: Config, facts: LayerFacts) -> None:
    """Raise InputError if slots cannot be scored, chosen or merged as a keep does it."""
    if facts.clipped and not keep.allocate.uniform:
        refuse(method, "parts of a clipped softmax do not merge, and its pages are attended apart", "snapkv")
    looks = keep.score is not None and keep.score.looks
    looks = looks and not (all(s.expands or not s.factors for s in facts.slots) and _scores_heads(keep))
    if facts.factors and (looks or not keep.phase.steady or keep.per_query_head):
        refuse(method, *_STORES_FACTORS)
    learned = any(lacks_fit(word) or word.fitted is not None for word in fitted_words(keep))
    if learned and any(s.heads != config.kv_heads for s in facts.slots):
        refuse(method, "it was fitted to KV heads, and the model stores other lists of slots", "h2o")
    if learned and len({s.key for s in facts.slots}) > 1:
        refuse(method, "it was fitted to heads of one size, and layers have heads of several", "h2o")
    if keep.score is not None and keep.score.weights:
        if facts.latent or any(s.factors and not s.expands for s in facts.slots):
            refuse(method, "it weighs values by the output matrix, and the model stores latents", "snapkv")
        if facts.shared_slots:
            refuse(method, "it weighs values by the output matrix, and several layers read them", "snapkv")
    if facts.shared_slots and keep.when.in_steps and not keep.when.at_once:
        refuse(method, "it evicts after many tokens, and layers share their slots", "h2o")
    if facts.chunked and not (keep.phase.steady and keep.phase.alike):
        why = "it rotates keys by other places than their positions, and layers attend within chunks of these"
        refuse(method, why, "snapkv")
    if facts.clipped and not keep.phase.alike:
        refuse(method, "near and far tokens are attended apart, and layers clip the softmax", "sink-recent")
    if hiding_of(keep) is not None and facts.shared_slots:
        refuse(method, "tokens drop slots of their own layer, and several layers read them", "h2o")
    if isinstance(keep.merge, Answering) and (facts.shared_slots or facts.clipped):
        refuse(method, "what leaves is asked apart, and layers share slots or clip the softmax", "h2o")
    if keep.merge is not None and (facts.latent or facts.factors):
        refuse(method, "it merges keys and values apart, and the model stores latents", "h2o")


_STORES_FACTORS = (
    "the model stores factors, and the method scores, ranks or rotates stored keys",
    "h2o, sink-recent, kvzip or a store method",
)


def _check_read(method: Method, read: Any, config: Config, facts: LayerFacts) -> None:
    """Raise InputError if slots cannot be read in part as a read does it, or not lie in host memory."""
    computed = Fact.STORED_KEYS not in read.requires and all(s.expands or not s.factors for s in facts.slots)
    # Values that are not stored cannot be summed as they are.
    if facts.factors and (not computed or (isinstance(read, EstimatingRest) and facts.latent)):
        refuse(method, *_STORES_FACTORS)
    if isinstance(read, Sampling) and facts.clipped:
        refuse(method, "what is drawn weighs more than its probability, which layers clip", "quest")
    if isinstance(read, Remembering | Tracing) and (facts.latent or facts.shared_slots):
        refuse(
            method,
            "it remembers how queries meet keys, and the model stores latents, or layers share their slots",
            "quest",
        )
    other = any(s.heads != config.kv_heads for s in facts.slots)
    if isinstance(read, FittedBlocks) and read.fitted is not None and (facts.latent or other):
        refuse(method, "it was fitted to KV heads, and the model stores other lists of slots", "quest")
    if isinstance(read, Copying) and facts.latent:
        refuse(method, "it copies keys and values in few bits, and the model stores latents", "quest")
    if isinstance(read, Recycling | Prefetching) and facts.shared_slots:
        refuse(method, "a selection is that of one layer, and layers share their slots", "quest")
    if isinstance(read, Reusing) and (facts.shared_slots or len({s.heads for s in facts.slots}) > 1):
        refuse(method, "layers share slots or have unequal numbers of lists, and cannot share picks", "quest")
    if isinstance(read, Foreseeing):
        _check_foreseeing(method, read, config, facts)
    if isinstance(read, EstimatingRest):
        taken = [(i, name, at) for i in range(config.layers) for name, at in takes_of(config, i).values()]
        others = [(i, at) for i, name, at in taken if name == "slots" and at is not None]
        if facts.clipped or any(at > i or config.window(i) is not None for i, at in others):
            refuse(
                method,
                "what is not read counts apart, and layers clip the softmax, or read slots from above or "
                "within a window",
                "quest",
            )


def _check_foreseeing(method: Method, read: Any, config: Config, facts: LayerFacts) -> None:
    """Raise InputError if queries cannot be predicted from the input of a layer below."""
    if facts.shared_slots:
        refuse(method, "it predicts queries of the layer that has the slots, and several read them", "quest")
    for i in range(read.skip_layers, config.layers):
        mixer, below = mixer_of(config, i), mixer_of(config, i - read.ahead)
        if mixer.slots(config) is None or config.window(i) is not None:
            continue
        if type(mixer) is not Attention or mixer.query_growth is not None:
            refuse(method, f"it predicts queries by a projection, and those of layer {i} take more", "quest")
        if not below.shapes(config):
            refuse(method, f"it predicts queries from what a layer attends with below layer {i}", "quest")


def _check_read_prompt(method: Method, facts: LayerFacts) -> None:
    """Raise InputError if queries of a prompt cannot attend to blocks of keys alone."""
    if not facts.slots or facts.windowed:
        refuse(method, "no layer of this model attends to a whole prompt", "a store method")
    for wrong, why in (
        (facts.clipped, "parts of a clipped softmax do not merge"),
        (facts.picking, "its queries pick the tokens that they attend to themselves"),
        ("logits" in facts.takes, "its layers share attention weights, of all tokens"),
        (any(s.ids for s in facts.slots), "its keys are made from a token's slot and the one before it"),
    ):
        if wrong:
            refuse(method, why, "the full cache")
    read = method.read_prompt
    if read is not None and read.carries and len({s.heads for s in facts.slots}) > 1:
        refuse(method, "layers have unequal numbers of KV heads, and mix scores of blocks", "xattention")


def _scores_heads(keep: Keep) -> bool:
    """Whether a keep can score heads that are computed from what is stored: once, by queries and keys."""
    return compares_once(keep) and all(isinstance(o, Queries) for o in observations(keep))


def config_of(method: Method, config: Config) -> Config:
    """Return the config of the model that a method acts on: rewritten by its `make`, or unchanged.

    Raises InputError if the method cannot rewrite such a model.
    """
    if method.make is None:
        return config
    try:
        return method.make.config(config)
    except ValueError as error:
        raise InputError(f"{method.id} does not fit this model: {error}") from error


def _remade(method: Method, config: Config) -> Config:
    """`config_of`; InputError also if the rewrite renumbers layers to which arrays were fitted."""
    found = config_of(method, config)
    others = [*fitted_words(dataclasses.replace(method, make=None))]
    if found.layers != config.layers and others:
        refuse(
            method,
            f"its arrays are for the {config.layers} layers of this model, and {method.make.by} makes "
            f"{found.layers} of them",
            "a method that nothing is fitted for",
        )
    return found


def _check_fitted(method: Method, config: Config) -> None:
    """Raise InputError if a word has no fitted arrays, or those of another kind of model."""
    for word in fitted_words(method):
        if word.fitted is None and not lacks_fit(word):
            continue
        if word.fitted is None:
            raise InputError(
                f"{method.id} was never fitted to a model: run `kvjax fit {spelled(method.spec, word.by)} "
                f"--model MODEL --out {word.by}.safetensors` and give the method fitted={word.by}.safetensors"
            )
        try:
            check_lent(word, method)
            word.check(ModelSizes.of(config))
        except InputError as error:
            raise InputError(f"{method.id}: {error}") from error


def _check_reading(method: Method, config: Config) -> None:
    """Raise InputError if tokens cannot be dropped in a model's layers, or be marked there."""
    narrow, reread = None if method.keep is None else method.keep.narrow, method.reread
    marks = (reread is not None and reread.marks) or method.restore is not None
    if narrow is not None or (reread is not None and reread.stages(config.layers, 1)):
        _check_narrow(method, config)
    for layer in range(config.layers if marks else 0):
        mixer = mixer_of(config, layer)
        if type(mixer) is not Attention or mixer.takes or config.window(layer) is not None:
            refuse(
                method,
                f"its weights are for tokens in plain attention to all others, and layer {layer} is "
                f"{mixer!r} with the window {config.window(layer)}",
                "snapkv",
            )


def _check_narrow(method: Method, config: Config) -> None:
    """Raise InputError if tokens cannot be selected at the layer of a `SelectivePropagation` or `Reread`."""
    narrow = None if method.keep is None else method.keep.narrow
    word = narrow or method.reread
    choosing = [layer for layer, _ in word.stages(config.layers, 1)]
    last, above = choosing[-1], int(narrow is not None)
    if last >= config.layers - above:
        if config.layers <= above:
            refuse(method, "it chooses tokens for the layers above, and the model has one layer", "snapkv")
        why = f"tokens are chosen at layer {last}, expected one of 0 to {config.layers - above - 1}"
        refuse(method, why, "another layer")
    for layer in range(config.layers):
        slots = mixer_of(config, layer).slots(config)
        own = None if slots is None or slots.fixed else slots
        if own is None and (layer in choosing or (layer > choosing[0] and narrow is not None)):
            refuse(method, f"layer {layer} keeps no slots, and would miss the tokens left out", "snapkv")
        if layer in choosing and "slots" in mixer_of(config, layer).takes:
            refuse(method, f"layer {layer}, which chooses the tokens, has no keys of its own", "snapkv")
        if own is not None and own.factors and layer in choosing and word.looks:
            refuse(method, "the model stores factors, and tokens are chosen by stored keys", "h2o")
        for name, at in takes_of(config, layer).values():
            between = [one for one in choosing if at is None or at > layer or at <= one < layer]
            if narrow is not None and between:
                source = "the decoder" if at is None else f"layer {at}"
                why = f"which has other tokens than the layers above layer {between[0]}"
                refuse(method, f"layer {layer} takes the {name} of {source}, {why}", "snapkv")
            if narrow is None and at is not None and at > layer:
                why = "which does not run while tokens are chosen"
                refuse(method, f"layer {layer} takes the {name} of layer {at}, {why}", "snapkv")


def check_block_transformer(method: Method, config: BlockConfig) -> None:
    """Raise InputError if a method cannot act on the block decoder, or its codecs not on both decoders."""
    if method.layers:
        refuse(method, "it is for the layers of one decoder, and this model has two", "one method")
    if method.make is not None:
        refuse(method, "it rewrites the weights of one decoder, and this model has two", "int8")
    check_fit(method, config.blocks)
    check_fit(dataclasses.replace(method, keep=None, read=None, reread=None, host=None), config.tokens)
    if method.keep is not None and method.keep.probe is not None:
        refuse(method, "it repeats the prompt's tokens, and blocks are none", "snapkv")
    score = None if method.keep is None else method.keep.score
    traces = {*(() if score is None else score.traces)}
    traces |= method.read.marks if isinstance(method.read, Tracing) else set()
    if any(t.after_layers for t in traces):
        refuse(method, "it asks how likely the prompt's tokens were, and blocks are none", "snapkv")
    if any(t.by_ids for t in traces):
        refuse(method, "it chooses by the ids of tokens, and blocks are none", "snapkv")
    if method.keep is not None and method.keep.narrow is not None:
        refuse(method, "its upper layers leave tokens out, and every block is decoded", "snapkv")
    if method.read_prompt is not None:
        refuse(method, "it picks blocks of one decoder's prompts, and this model has two", "snapkv")
    if method.reread is not None:
        refuse(method, "it reads the tokens of a prompt in its own way, and blocks are none", "snapkv")
    if method.stack is not None:
        refuse(method, "it merges layers of one decoder, and this model has two", "int4")


def check_budget(method: Method, tokens: Iterable[int | np.integer], unit: str = "tokens") -> None:
    """Raise InputError if a method protects more than its budget, in rows of so many tokens."""
    keeps = [(one.id, one.keep) for one in method.sentences]
    for length in sorted({int(t) for t in tokens} - {0}):
        for id, keep in keeps:
            if keep is None or keep.score is None:
                continue
            if why := crowded(keep, length, f"{length} {unit}"):
                raise InputError(f"{id}: {why}")
