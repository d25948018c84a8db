"""What methods do with the memory of architectures; what each of them does by itself is in tests/methods."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.grammar import Method, chain
from kvjax.keep.observations.observe import Mass
from kvjax.models.mixers.attention import mixer_of
from kvjax.state.cache import Slots
from kvjax.steps import Run
from kvjax.steps.prefilling import probe as probing
from kvjax.steps.prefilling import settle as prompt
from kvjax.steps.prefilling import two_programs as apart
from tests.models.architectures import TABLE
from tests.models.conversation import TEXTS, close, model, whole
from tests.models.memory_classes import REPRESENTATIVES

T, ROOM = 13, 16
ERRORS = dict(int8=0.05, int4=1.0, kivi=1.0, fp8=0.2)
ALL_PAGES = kvjax.method("quest", budget=32, page=4, skip_layers=0)
STORES = dict(int8={}, int4=dict(group=1), kivi=dict(group=2, residual=4), fp8={})
SMALL_WINDOW = dict(window=4, kernel=3)
KEEPS = {
    "snapkv": SMALL_WINDOW | dict(variant="kvpress"),
    "h2o": {},
    "streamingllm": dict(sinks=1),
    "kvzip": dict(page=4),
    "adakv": SMALL_WINDOW | dict(page=4, variant="kvpress"),
}
# Their layers share or make keys and values in ways that no keep and no read fits.
APART = (
    "svformer",
    "tpa",
    "unequal groups",
    "dha",
    "gqkva",
    "grouped latents",
    "shared attention",
    "lisa",
    "goldfinch",
    "key as value",
    "layer inputs",
)
SLOTTED = [n for n, row in TABLE.items() if row.lists and n not in APART]
REPRESENTED = [n for n in SLOTTED if n in REPRESENTATIVES]


# What always runs: keeps and stores, each on a memory that asks much of it.
KEPT = {("lckv", "h2o")}
CODED = {("goldfinch", "int8")}


def in_turn(cases, always):
    """Parameters of which those in `always` run always, the others in turn; architectures stay together."""
    out = []
    for case in cases:
        name, *_ = values = case if isinstance(case, tuple) else (case,)
        turn = [] if case in always else [pytest.mark.rotating]
        out.append(pytest.param(*values, marks=[pytest.mark.xdist_group(name), *turn]))
    return out


def matrices(config):
    """Whether a layer's state has matrices of heads that are as large whatever the length of a row."""
    mixers = [mixer_of(config, i) for i in range(config.layers)]
    return any(
        len(s) >= 3 for m in mixers for n, s in m.state(config).items() if n not in m.grows and not m.grows
    )


def started(name, method):
    """Logits and cache behind the first prompt under a method."""
    return kvjax.prefill(model(name), TEXTS[:2, :T], method=method, room=ROOM)


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "keep"), in_turn(product(REPRESENTED, KEEPS), KEPT))
def test_a_keep_with_room_for_all_changes_nothing(name, keep):
    logits, cache = started(name, kvjax.method(keep, budget=32, **KEEPS[keep]))
    want = whole(name).logits
    close(logits, want[:2, T - 1])
    close(kvjax.step(model(name), cache, TEXTS[:2, T])[0], want[:2, T])


@pytest.mark.rotating
@pytest.mark.parametrize("name", in_turn(SLOTTED, ("mixattention",)))
def test_a_keep_keeps_its_budget_in_every_layer_that_has_slots(name):
    config = TABLE[name].config
    logits, cache = started(name, kvjax.method("snapkv", budget=8, **KEEPS["snapkv"]))
    close(logits, whole(name).logits[:2, T - 1])
    for layer, kept in enumerate(kvjax.kept_positions(cache)):
        count, window = (kept >= 0).sum(-1), config.window(layer)
        assert (count == (8 if window is None else window)).all()
    logits, _ = kvjax.step(model(name), cache, TEXTS[:2, T])
    assert np.isfinite(np.asarray(logits)).all()


@pytest.mark.rotating
def test_what_a_probe_reads_again_stands_behind_the_states_of_the_prompt(monkeypatch):
    seen, observe = [], prompt.observe

    def spy(run, params, tokens, lengths, cache, needs):
        seen.append(cache)
        return observe(run, params, tokens, lengths, cache, needs)

    for module in (apart, probing, prompt):
        monkeypatch.setattr(module, "observe", spy)
    started("kimi linear", kvjax.method("kvzip", budget=6, page=4))
    first, again = seen
    state, slots = again.groups
    assert first is None and state.state is not None and slots.tail is not None


@pytest.mark.parametrize("name", in_turn((*SLOTTED, "key as value"), ("key as value",)))
def test_reading_all_pages_changes_nothing(name):
    _, cache = started(name, ALL_PAGES)
    for t in range(T, T + 2):
        logits, cache = kvjax.step(model(name), cache, TEXTS[:2, t])
        close(logits, whole(name).logits[:2, t])


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "store"), in_turn(product(TABLE, STORES), CODED))
def test_a_store_encodes_slots_and_states_and_costs_fewer_bytes(name, store):
    """Where slots can be read by pages, all of those are, which changes nothing."""
    method = kvjax.method(store, **STORES[store])
    logits, cache = started(name, chain(method, ALL_PAGES) if name in SLOTTED else method)
    close(logits, whole(name).logits[:2, T - 1])
    coded = [x for x in jax.tree.leaves(cache) if x.dtype not in (jnp.float32, jnp.int32)]
    # KIVI keeps what has no tokens, a state, as it is; others encode matrices that do not grow.
    encoded = bool(TABLE[name].lists) or (store != "kivi" and matrices(TABLE[name].config))
    assert bool(coded) == encoded
    logits, _ = kvjax.step(model(name), cache, TEXTS[:2, T])
    want = whole(name).logits[:2, T]
    assert np.abs(np.asarray(logits) - want).max() / np.abs(want).max() < ERRORS[store]
    if store in ("int8", "fp8"):
        summaries = [s.summary for group in cache.groups for s in group.parts if isinstance(s, Slots)]
        spent, plain = kvjax.nbytes(cache) - kvjax.nbytes(summaries), TABLE[name].bytes(2, 16 + ROOM)
        assert spent < plain if encoded else spent == plain


@pytest.mark.parametrize(
    ("name", "method", "why"),
    [
        ("kda", "snapkv", "no layer of this model keeps slots"),
        ("tpa", "snapkv", "the model stores factors"),
        ("tpa", "quest", "the model stores factors"),
        ("dha", "tova", "the model stores factors"),
        ("tpa", "streamingllm", "the model stores factors"),
        ("svformer", "h2o", "share the values of one layer"),
        ("mla", "keepkv", "it merges keys and values apart"),
        ("goldfinch", "h2o", "a token's slot and the one before it, so none may be left out"),
        ("goldfinch", "quest", "a token's slot and the one before it, so none may be left out"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(name, method, why):
    hyper = SMALL_WINDOW if method == "snapkv" else {}
    with pytest.raises(InputError, match=why):
        started(name, kvjax.method(method, budget=0.75, **hyper))


@pytest.mark.parametrize("name", in_turn(("yoco", "swiftkv", "goldfinch"), ("swiftkv",)))
def test_a_prefill_runs_layers_that_keep_nothing_for_the_last_token_only(name):
    m = model(name)

    def flops(needs):
        call = partial(steps.observe, Run(m.config, Method()), cache=None, needs=needs)
        ids, length = jnp.zeros((1, 64), jnp.int32), jnp.full((1,), 64, jnp.int32)
        return jax.jit(call).lower(m.params, ids, length).compile().cost_analysis()["flops"]

    # Of four layers two keep nothing, of GoldFinch's too; what is observed needs all. Keys and values stay.
    assert flops(frozenset()) < (0.75 if name == "swiftkv" else 0.62) * flops(frozenset({Mass()}))
