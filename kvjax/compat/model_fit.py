"""Which methods fit which model: what a sentence asks of slots, and what the layers' slots are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.base.errors import InputError
from kvjax.grammar import Keep, Method, check
from kvjax.grammar.calls import hiding_of, observations, shaped
from kvjax.grammar.fitted import ModelSizes, fitted_words, lacks_fit, learns, sees_below, spelled
from kvjax.grammar.protocols import Answering, Preferring
from kvjax.grammar.read_protocols import Remembering, Resting, Reusing, Sampling
from kvjax.grammar.refuse_keep import crowded
from kvjax.keep.observations.observe import Queries
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.exchange import takes_of
from kvjax.models.mixers.attention import Attention, mixer_of
from kvjax.models.mixers.bidirectional import Bidirectional
from kvjax.place.pairs import pairs_of
from kvjax.state.codes import BELOW, at_layer, taught


@lru_cache(maxsize=1024)
def check_fit(method: Method, config: Config) -> None:
    """InputError where a method cannot act on what the model's layers keep, saying which and why.

    Its words must fit together, too, which nobody has asked yet of a method that was not built by name.
    Codecs must be able to hold every kind of key, value and state; scores that look at keys need keys that a
    query can meet; what is merged must be stored; and a model without slots has nothing to keep or to read. A
    context is left alone. An encoder, whose tokens see later ones, has no cache.
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
    config = _remade(method, config)
    facts = _facts(config)
    if facts.encoder:
        raise InputError(
            "this model is an encoder, whose tokens see later ones, so nothing of it can be cached: give "
            "it to kvjax.encode_context, or call it without a cache"
        )
    _check_store(method, config, facts)
    _check_reading(method, config)
    if method.host is not None and facts.lent:
        other = "quest" if method.read is not None else "the method without Host()"
        _refuse(method, "several layers read the slots that it brings to the device for one", other)
    if method.keep is None and method.read is None:
        return
    _check_slots(method, facts)
    if method.keep is not None:
        _check_keep(method, method.keep, config, facts)
    if method.read is not None:
        _check_read(method, method.read, config, facts)


class _Facts(NamedTuple):
    """What the layers of a model keep, as far as methods ask for it.

    slots: of each layer that keeps slots of its own, whose number grows. all_slots: also of those whose
    number is fixed or that read another layer's. takes: names of what layers take from others.
    """

    encoder: bool
    slots: tuple[Any, ...]
    all_slots: tuple[Any, ...]
    takes: frozenset[str]
    clipped: bool

    @property
    def factors(self) -> bool:
        """Whether a layer stores factors, from which keys are computed."""
        return any(s.factors for s in self.slots)

    @property
    def latent(self) -> bool:
        """Whether a layer stores one list that is both its keys and its values."""
        return any(s.shared for s in self.slots)

    @property
    def lent(self) -> bool:
        """Whether several layers read the slots of one."""
        return "slots" in self.takes


def _facts(config: Config) -> _Facts:
    own = [mixer_of(config, i) for i in range(config.layers)]
    kinds = [(m, s) for m in own if (s := m.slots(config)) is not None]
    return _Facts(
        encoder=any(isinstance(m, Bidirectional) for m in own),
        slots=tuple(s for m, s in kinds if "slots" not in m.takes and not s.fixed),
        all_slots=tuple(s for _, s in kinds),
        takes=frozenset(name for m in own for name in m.takes),
        clipped=any(m.clip is not None for m in own),
    )


def _check_store(method: Method, config: Config, facts: _Facts) -> None:
    """InputError where codecs, merged layers or unrotated keys do not fit what layers store."""
    _check_codecs(method, config)
    if method.stack is not None and not pairs_of(method.stack, config):
        _refuse(
            method,
            "it merges neighbouring layers that keep keys and values of all tokens, each for itself, and "
            f"from layer {method.stack.first(config.layers)} of {config.layers} up there are no two of them",
            "a lower start or int4",
        )
    if (
        method.store is not None
        and method.store.unrotated
        and any(s.factors or s.ids for s in facts.all_slots)
    ):
        _refuse(method, "it stores keys before their rotation, and the model stores other things", "int8")
    keep = method.keep
    apart = keep is not None and keep.per_query_head and config.heads != config.kv_heads
    learnt = learns(method.store)
    if learnt and any(s.factors or s.ids or s.shared for s in facts.all_slots):
        _refuse(
            method, "its codes learn from queries that meet keys, and the model stores other things", "kivi"
        )
    store = method.store
    below = store is not None and sees_below((store.keys, store.values))
    kinds = [mixer_of(config, i).slots(config) for i in range(config.layers)]
    plain = all(s is not None and not (s.factors or s.ids or s.shared or s.fixed) for s in kinds)
    if below and (not plain or any(config.window(i) for i in range(config.layers)) or facts.lent):
        why = "it encodes a token by the same one in the layer below, and layers keep other things"
        _refuse(method, why, "kivi")
    if apart and learnt:
        _refuse(
            method,
            "its codes learn what the queries of a KV head ask for, and it keeps other slots for each of "
            "their query heads",
            'variant="grouped" of such a keep',
        )
    if apart and any(True for _ in fitted_words(method.store)):
        _refuse(
            method,
            "its codes were fitted to KV heads, and it keeps other slots for each of their query heads",
            'variant="grouped" of such a keep',
        )


def _check_slots(method: Method, facts: _Facts) -> None:
    """InputError where no layer has slots of which some could be left out or not be read."""
    if not facts.slots:
        _refuse(method, "no layer of this model keeps slots, its states have a constant size", "int8 or int4")
    for name, shared in (("slot values", "the values of one layer"), ("logits", "attention weights")):
        if name in facts.takes:
            _refuse(
                method,
                f"its layers share {shared} slot by slot, and would choose differently",
                "a store method",
            )
    if any(s.ids for s in facts.slots):
        _refuse(
            method,
            "its keys are made from a token's slot and the one before it, so none may be left out",
            "a store method",
        )


def _check_keep(method: Method, keep: Keep, config: Config, facts: _Facts) -> None:
    """InputError where slots cannot be scored, chosen or merged as a keep does it."""
    if facts.clipped and not keep.allocate.uniform:
        _refuse(method, "parts of a clipped softmax do not merge, and its pages are attended apart", "snapkv")
    looks = keep.score is not None and getattr(keep.score, "looks", True)
    looks = looks and not (all(s.expands or not s.factors for s in facts.slots) and _scores_heads(keep))
    if facts.factors and (looks or not keep.phase.steady or keep.per_query_head):
        _refuse(method, *_STORES_FACTORS)
    learned = any(lacks_fit(word) or word.fitted is not None for word in fitted_words(keep))
    if learned and any(s.heads != config.kv_heads for s in facts.slots):
        _refuse(method, "it was fitted to KV heads, and the model stores other lists of slots", "h2o")
    if getattr(keep.score, "weights", False):
        if facts.factors or facts.latent:
            _refuse(method, "it weighs values by the output matrix, and the model stores latents", "snapkv")
        if facts.lent:
            _refuse(method, "it weighs values by the output matrix, and several layers read them", "snapkv")
    at_once = keep.when.at_once and not getattr(keep.score, "carried", False)
    if facts.lent and keep.when.in_steps and not at_once:
        _refuse(method, "it evicts after many tokens, and layers share their slots", "h2o")
    if facts.clipped and not keep.phase.alike:
        _refuse(method, "near and far tokens are attended apart, and layers clip the softmax", "sink-recent")
    if hiding_of(keep) is not None and facts.lent:
        _refuse(method, "tokens drop slots of their own layer, and several layers read them", "h2o")
    if isinstance(keep.merge, Answering) and (facts.lent or facts.clipped):
        _refuse(method, "what leaves is asked apart, and layers share slots or clip the softmax", "h2o")
    if keep.merge is not None and (facts.latent or facts.factors):
        _refuse(method, "it merges keys and values apart, and the model stores latents", "h2o")


_STORES_FACTORS = (
    "the model stores factors, and the method scores, ranks or rotates stored keys",
    "h2o, sink-recent, kvzip or a store method",
)


def _check_read(method: Method, read: Any, config: Config, facts: _Facts) -> None:
    """InputError where slots cannot be read in part as a read does it, or not lie in host memory."""
    if facts.factors:
        _refuse(method, *_STORES_FACTORS)
    if isinstance(read, Sampling) and facts.clipped:
        _refuse(method, "what is drawn weighs more than its probability, which layers clip", "quest")
    if isinstance(read, Remembering) and (facts.latent or facts.lent):
        _refuse(
            method,
            "it remembers how queries meet keys, and the model stores latents, or layers share their slots",
            "quest",
        )
    if isinstance(read, Reusing) and (facts.lent or len({s.heads for s in facts.slots}) > 1):
        _refuse(
            method, "layers share slots or have unequal numbers of lists, and cannot share picks", "quest"
        )
    if isinstance(read, Resting):
        taken = [(i, name, at) for i in range(config.layers) for name, at in takes_of(config, i).values()]
        others = [(i, at) for i, name, at in taken if name == "slots" and at is not None]
        if facts.clipped or any(at > i or config.window(i) is not None for i, at in others):
            _refuse(
                method,
                "what is not read counts apart, and layers clip the softmax, or read slots from above or "
                "within a window",
                "quest",
            )


def _scores_heads(keep: Keep) -> bool:
    """Whether a keep can score heads that are computed from what is stored: once, by queries and keys."""
    assert keep.score is not None
    once = not keep.when.in_steps and not keep.score.traces and not isinstance(keep.allocate, Preferring)
    return once and all(isinstance(o, Queries) for o in observations(keep))


def config_of(method: Method, config: Config) -> Config:
    """The config of the model that a method acts on: what its `make` makes of this one, or this one.

    Raises InputError where the method cannot rewrite such a model.
    """
    if method.make is None:
        return config
    try:
        return method.make.config(config)
    except ValueError as error:
        raise InputError(f"{method.id} does not fit this model: {error}") from error


def _remade(method: Method, config: Config) -> Config:
    """`config_of`; InputError also where layers would have other numbers than arrays were fitted to."""
    found = config_of(method, config)
    others = [*fitted_words(dataclasses.replace(method, make=None))]
    if found.layers != config.layers and others:
        _refuse(
            method,
            f"its arrays are for the {config.layers} layers of this model, and {method.make.by} makes "
            f"{found.layers} of them",
            "a method that nothing is fitted for",
        )
    return found


def _check_fitted(method: Method, config: Config) -> None:
    """InputError where a word was never fitted, or to another kind of model."""
    sizes = ModelSizes.of(config)
    for word in fitted_words(method):
        if word.fitted is None and not lacks_fit(word):
            continue
        if word.fitted is None:
            raise InputError(
                f"{method.id} was never fitted to a model: run `kvjax fit {spelled(method.spec, word.by)} "
                f"--model MODEL --out {word.by}.safetensors` and give the method fitted={word.by}.safetensors"
            )
        try:
            word.check(sizes)
        except InputError as error:
            raise InputError(f"{method.id}: {error}") from error


def _check_reading(method: Method, config: Config) -> None:
    """InputError where tokens cannot be left out of a model's layers, or be marked there."""
    narrow = None if method.keep is None else method.keep.narrow
    # Words with fitted arrays mark tokens, and those with stages choose some at a layer.
    marks = hasattr(method.reread, "fitted") or method.restore is not None
    if narrow is not None or hasattr(method.reread, "stages"):
        _check_narrow(method, config)
    for layer in range(config.layers if marks else 0):
        mixer = mixer_of(config, layer)
        if type(mixer) is not Attention or mixer.takes or config.window(layer) is not None:
            _refuse(
                method,
                f"its weights are for tokens in plain attention to all others, and layer {layer} is "
                f"{mixer!r} with the window {config.window(layer)}",
                "snapkv",
            )


def _check_narrow(method: Method, config: Config) -> None:
    """InputError where tokens cannot be chosen at the layer of a `Narrow` or `Reread`, or not be left out."""
    narrow = None if method.keep is None else method.keep.narrow
    word = narrow or method.reread
    choosing = [layer for layer, _ in word.stages(config.layers, 1)]
    last, above = choosing[-1], int(narrow is not None)
    if last >= config.layers - above:
        if config.layers <= above:
            _refuse(method, "it chooses tokens for the layers above, and the model has one layer", "snapkv")
        why = f"tokens are chosen at layer {last}, expected one of 0 to {config.layers - above - 1}"
        _refuse(method, why, "another layer")
    for layer in range(config.layers):
        slots = mixer_of(config, layer).slots(config)
        own = None if slots is None or slots.fixed else slots
        if own is None and (layer in choosing or (layer > choosing[0] and narrow is not None)):
            _refuse(method, f"layer {layer} keeps no slots, and would miss the tokens left out", "snapkv")
        if layer in choosing and "slots" in mixer_of(config, layer).takes:
            _refuse(method, f"layer {layer}, which chooses the tokens, has no keys of its own", "snapkv")
        if own is not None and own.factors and layer in choosing and getattr(word, "looks", True):
            _refuse(method, "the model stores factors, and tokens are chosen by stored keys", "h2o")
        for name, at in takes_of(config, layer).values():
            between = [one for one in choosing if at is None or at > layer or at <= one < layer]
            if narrow is not None and between:
                source = "the decoder" if at is None else f"layer {at}"
                why = f"which has other tokens than the layers above layer {between[0]}"
                _refuse(method, f"layer {layer} takes the {name} of {source}, {why}", "snapkv")
            if narrow is None and at is not None and at > layer:
                why = "which does not run while tokens are chosen"
                _refuse(method, f"layer {layer} takes the {name} of layer {at}, {why}", "snapkv")


def check_block_transformer(method: Method, config: BlockConfig) -> None:
    """InputError where a method cannot act on the block decoder, or its codecs not on both decoders."""
    if method.layers:
        _refuse(method, "it is for the layers of one decoder, and this model has two", "one method")
    if method.make is not None:
        _refuse(method, "it rewrites the weights of one decoder, and this model has two", "int8")
    check_fit(method, config.blocks)
    check_fit(dataclasses.replace(method, keep=None, read=None, reread=None, host=None), config.tokens)
    if method.keep is not None and method.keep.probe is not None:
        _refuse(method, "it repeats the prompt's tokens, and blocks are none", "snapkv")
    score = None if method.keep is None else method.keep.score
    traces = () if score is None else score.traces
    if any(getattr(t, "behind_layers", False) for t in traces):
        _refuse(method, "it asks how likely the prompt's tokens were, and blocks are none", "snapkv")
    if any(getattr(t, "by_ids", False) for t in traces):
        _refuse(method, "it chooses by the ids of tokens, and blocks are none", "snapkv")
    if method.keep is not None and method.keep.narrow is not None:
        _refuse(method, "its upper layers leave tokens out, and every block is decoded", "snapkv")
    if method.reread is not None:
        _refuse(method, "it reads the tokens of a prompt in its own way, and blocks are none", "snapkv")
    if method.stack is not None:
        _refuse(method, "it merges layers of one decoder, and this model has two", "int4")


def check_budget(method: Method, tokens: Iterable[int | np.integer], unit: str = "tokens") -> None:
    """InputError where what a method protects is more than its budget, in rows of so many tokens."""
    keeps = [(one.id, one.keep) for one in method.sentences]
    for length in sorted({int(t) for t in tokens} - {0}):
        for id, keep in keeps:
            if keep is None or keep.score is None:
                continue
            if why := crowded(keep, length, f"{length} {unit}"):
                raise InputError(f"{id}: {why}")


def _refuse(method: Method, why: str, instead: str) -> None:
    raise InputError(f"{method.id} does not fit this model: {why}. Use {instead} here")


def _check_codecs(method: Method, config: Config) -> None:
    stores = (method.store, None if method.keep is None else method.keep.lower)
    each = [(name, getattr(store, name)) for store in stores if store for name in ("keys", "values")]
    layers = range(config.layers)
    each = dict.fromkeys((name, at_layer(codec, i)) for name, codec in each if codec for i in layers)
    for name, codec in each:
        assert codec is not None
        words = [*fitted_words(codec)]
        known = [w.fitted for w in words if w.fitted is not None]
        arrays: dict[Any, Any] = {
            f.digest: {n: jnp.asarray(x[0]) for n, x in f.arrays.items()} for f in known
        }
        codec = taught(codec, arrays)
        words += learns(codec)
        for width in _stored_widths(config, name, states=not words):
            # What was fitted is of the heads that lead a row's tokens.
            lists = (1, config.kv_heads) if words else ()
            one = jax.ShapeDtypeStruct((*lists, codec.granule, width), jnp.float32)
            try:
                if sees_below(codec):
                    below: dict[str, Any] = dict.fromkeys(("key", "value", "own key"), jnp.zeros(one.shape))
                    codec = taught(codec, arrays | {BELOW: below})
                data = jax.eval_shape(codec.encode, one)
                back = jax.eval_shape(partial(codec.decode, width=width, dtype=one.dtype), data)
                shaped(codec, "decoded rows", back, "[granule, width]", one.shape)
            except ValueError as error:
                raise InputError(
                    f"{method.id} cannot store {name} of {width} channels: {error}: "
                    "choose other hyper-parameters"
                ) from error


def _stored_widths(config: Config, name: str, states: bool) -> set[int]:
    """Channels of every kind of key or value; with `states`, also of the matrices of states."""
    out = set()
    for layer in range(config.layers):
        mixer = mixer_of(config, layer)
        slots = mixer.slots(config)
        if slots is not None and not ((slots.shared or slots.ids) and name == "values"):
            out.add(slots.key if name == "keys" else slots.value)
        elif slots is None and name == "keys" and states:
            constant = {n: shape for n, shape in mixer.state(config).items() if n not in mixer.grows}
            out |= {shape[-1] for shape in constant.values() if len(shape) >= 3}
    return out
