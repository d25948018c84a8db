"""The decoder with its attention in kernels, in the interpreter, against the same in plain jnp."""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Method, Store
from kvjax.models.config import Config
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.latent import Latent
from kvjax.models.mixers.log_linear import LogLinearDelta
from kvjax.models.mixers.recurrent import GatedDelta, GatedLinear, KimiDelta, Retention
from kvjax.models.model import Model
from kvjax.models.params import init, plan
from kvjax.ops.base.rope import Rope
from kvjax.store.affine import Affine
from kvjax.store.rotate import Rotate
from tests.kernels.close import check
from tests.kernels.cuda import ON_GPU
from tests.ops.oracles import rms
from tests.sweep import sweep

SIZES = dict(vocab=64, d_model=32, heads=4, kv_heads=2, head_dim=128, d_ff=64, max_positions=4096)
PROMPT = np.random.default_rng(0).integers(0, 64, (2, 96))
LENGTHS = np.array([96, 61])
# The kernels' own: weights are left small, so that two layers do not amplify what float32 rounds. Another
# prompt changes these logits by 0.8 of their size, so that attention is no small part of them.
BAR = 2e-6
TPU, GPU = "tpu interpret", "gpu interpret"


@pytest.fixture(autouse=True)
def whole_products():
    """Let GPUs round no products to 10 bits, as they do unless told not to, in kernels and jnp alike."""
    with jax.default_matmul_precision("float32") if ON_GPU else contextlib.nullcontext():
        yield


def model(stacked=True, layers=2, **options):
    config = Config(layers=layers, rope=Rope(), **SIZES | options)
    params = init(config, jax.random.key(0), jnp.float32, groups=plan(config, stacked=stacked))
    return Model(config, params, name="random")


@pytest.mark.rotating
def test_these_logits_depend_on_what_is_attended_to():
    first, other = (
        kvjax.step(m, kvjax.prefill(m, prompt, lengths=LENGTHS, room=32)[1], [0, 7])[0]
        for m in (model(),)
        for prompt in (PROMPT, (PROMPT + 1) % 64)
    )
    assert rms(other, first) > 0.5


def agree(model, method=None, tokens=3, room=32, kernel="tpu interpret", append=(True,)):
    """Logits and caches of some tokens, given beforehand, behind a prompt that was read in plain jnp."""
    _, cache = kvjax.prefill(model, PROMPT, lengths=LENGTHS, method=method, room=room)
    caches = {kernel: cache, "reference": jax.tree.map(jnp.copy, cache)}
    for token, appended in itertools.product(range(tokens), append):
        done = {
            how: kvjax.step(model, c, [token, 7], append=appended, implementation=how)
            for how, c in caches.items()
        }
        check(*map(jax.tree.leaves, done.values()), BAR)
        caches = {how: new for how, (_, new) in done.items()}


METHODS = {
    "full": None,
    "snapkv": kvjax.method("snapkv", budget=96, window=48, variant="paper"),
    "h2o": kvjax.method("h2o", budget=39),
    "adakv": kvjax.method("adakv", budget=64, window=16, page=128),
    "quest": kvjax.method("quest", budget=64, page=32, skip_layers=0),
}


@pytest.mark.rotating
@pytest.mark.parametrize(
    "method, kernel",
    sweep(itertools.product(METHODS, (TPU, GPU)), ("h2o", TPU)),
)
def test_steps_through_the_kernel_are_steps_in_plain_jnp(method, kernel):
    agree(model(stacked=kernel == TPU), METHODS[method], kernel=kernel)


TURNED = {
    "by rank": kvjax.chain(kvjax.method("snapkv", budget=64, window=16), kvjax.method("renumbered")),
    "by rank, evicted by mass": kvjax.chain(kvjax.method("h2o", budget=39), kvjax.method("renumbered")),
    "by rank, in pages": kvjax.chain(
        kvjax.method("adakv", budget=64, window=16, page=128), kvjax.method("renumbered")
    ),
    "by clamped distance": kvjax.method("lm-infinite", budget=39, distance=50),
}


@pytest.mark.rotating
@pytest.mark.parametrize("head_dim, kernel", [(128, TPU), (128, GPU), (64, GPU)])
@pytest.mark.parametrize("case", TURNED)
def test_keys_that_lie_unrotated_are_turned_in_the_kernel(case, head_dim, kernel):
    agree(model(stacked=kernel == TPU, head_dim=head_dim), TURNED[case], kernel=kernel)


@pytest.mark.rotating
@pytest.mark.parametrize("kernel", (TPU, GPU))
def test_layers_in_pairs_read_directions_and_multiply_by_their_lengths(kernel):
    agree(model(stacked=False), kvjax.method("minicache", start=0, most=0.09), tokens=1, kernel=kernel)


SINGLE = {
    "sparq": kvjax.method("sparq", budget=24, newest=16),
    "magicpig": kvjax.method("magicpig", budget=24, newest=16, planes=3, tables=20, skip_layers=0),
}


@pytest.mark.rotating
@pytest.mark.parametrize("name", SINGLE)
def test_single_slots_are_read_where_they_lie_on_a_gpu(name):
    agree(model(stacked=False), SINGLE[name], kernel=GPU)
    _, cache = kvjax.prefill(model(layers=1), PROMPT, method=SINGLE[name], room=32)
    with pytest.raises(NotImplementedError, match="pages of 1 slots|biases of every query head"):
        kvjax.step(model(layers=1), cache, [1, 2], implementation=TPU)


@pytest.mark.parametrize("kernel", sweep((TPU, GPU)))
def test_codes_are_read_as_they_lie(kernel):
    # A second layer's codes come from what the first one gave: rounding may make them other codes.
    agree(model(layers=1), kvjax.method("int8"), kernel=kernel)


@pytest.mark.parametrize("groups", sweep([False, True]))
def test_rotated_codes_are_read_as_they_lie_by_rotated_queries(groups):
    keys, values = Affine(4, axis="channel", group=16), Affine(4, group=16, together=16)
    keys, values = (keys, values) if groups else (Affine(8), Affine(8))
    store = Store(Rotate() >> keys, Rotate("orthogonal") >> values, 16 if groups else 0)
    agree(model(layers=1), Method(store=store), tokens=1, room=48 if groups else 32)


@pytest.mark.parametrize("kernel", sweep((TPU, GPU), TPU))
@pytest.mark.rotating
def test_pages_of_codes_are_read_as_they_lie(kernel):
    method = kvjax.chain(kvjax.method("adakv", budget=64, window=16, page=128), kvjax.method("int8"))
    agree(model(layers=1), method, kernel=kernel)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "kernel, bits, group, room",
    sweep([(k, *how) for k in (TPU, GPU) for how in ((4, 16, 48), (2, 32, 176))], (TPU, 2, 32, 176)),
)
def test_groups_of_codes_are_read_as_they_lie(bits, group, room, kernel):
    """And the newest tokens beside them, with eight groups in all."""
    method = kvjax.method("kivi", bits=bits, group=group, residual=16)
    agree(model(layers=1), method, room=room, kernel=kernel)


@pytest.mark.rotating
@pytest.mark.parametrize("kernel", sweep((TPU, GPU), GPU))
def test_windows_sinks_and_softcaps_reach_the_kernel(kernel):
    m = model(stacked=False, windows=(127, None), attention_softcap=3.0, mixers=(Attention(sink=True),) * 2)
    agree(m, kernel=kernel)


LANES = {
    "heads of 64": dict(head_dim=64),
    "latents": dict(mixers=(Latent(32, 16, 24, 24),) * 2, kv_heads=4),
}


@pytest.mark.rotating
@pytest.mark.parametrize("kernel", sweep((TPU, GPU), TPU))
@pytest.mark.parametrize("stacked", sweep([True, False], True))
@pytest.mark.parametrize("case", sweep(LANES, "latents"))
def test_slots_on_the_lanes_are_appended_and_read_where_they_lie(case, stacked, kernel):
    agree(model(stacked=stacked, **LANES[case]), kernel=kernel)


STATES = dict(heads=8, key_dim=8, value_dim=128)


RECURRENT = {
    "Retention": Retention(**STATES, gated=True),
    "GatedLinear": GatedLinear(**STATES),
    "GatedDelta": GatedDelta(**STATES),
    "KimiDelta": KimiDelta(**STATES),
    "LogLinearDelta": LogLinearDelta(**STATES, levels=9),
}


@pytest.mark.parametrize("name, stacked", sweep(itertools.product(RECURRENT, [True, False])))
def test_states_are_written_where_they_lie(name, stacked):
    agree(model(stacked=stacked, mixers=(RECURRENT[name],) * 2), append=(False, True), tokens=2)


@pytest.mark.parametrize("name", sweep(RECURRENT))
def test_states_that_would_be_copied_are_refused(name):
    m = model(layers=1, mixers=(dataclasses.replace(RECURRENT[name], value_dim=64),))
    _, cache = kvjax.prefill(m, PROMPT, room=32)
    with pytest.raises(NotImplementedError, match="cannot run as .*states of 8 x 64 would be copied"):
        kvjax.step(m, cache, [1, 2], implementation="tpu interpret")


def test_recurrent_layers_between_others_run_in_their_kernels():
    """Two equal layers, whose states are one stack, and another alone; also where no token is appended."""
    mixers = tuple(RECURRENT[name] for name in ("GatedDelta", "GatedDelta", "LogLinearDelta"))
    agree(model(layers=3, mixers=mixers), append=(False, True), tokens=2)


@pytest.mark.rotating
def test_a_prompt_through_the_kernels_gives_the_same_cache_and_logits():
    m, method = model(), kvjax.method("h2o", budget=40)
    found, want = (
        kvjax.prefill(m, PROMPT, lengths=LENGTHS, method=method, room=32, implementation=how)
        for how in ("tpu interpret", "reference")
    )
    for a, b in zip(kvjax.kept_positions(found[1]), kvjax.kept_positions(want[1]), strict=True):
        np.testing.assert_array_equal(a, b)
    check(jax.tree.leaves(found), jax.tree.leaves(want), BAR)


REFUSED = {
    "pages that a method picks have a kernel where": kvjax.chain(
        kvjax.method("quest", budget=32, skip_layers=0), kvjax.method("int8")
    ),
    "a dense cache of such codes": kvjax.method("int4"),
    "codes in groups have no kernel for unrotated keys": kvjax.chain(
        kvjax.method("snapkv", budget=64, window=16),
        kvjax.method("renumbered"),
        kvjax.method("kivi", group=16),
    ),
    "7 groups of 16 tokens, expected a multiple of 8": kvjax.method("kivi", bits=4, group=16, residual=8),
    "groups of 16 tokens in 2 bits, expected 16": kvjax.method("kivi", bits=2, group=16, residual=8),
}


@pytest.mark.rotating
@pytest.mark.parametrize("why", sweep(REFUSED, "a dense cache of such codes"))
def test_forcing_a_kernel_on_what_it_cannot_read_says_why(why):
    m = model(layers=1)
    _, cache = kvjax.prefill(m, PROMPT, method=REFUSED[why], room=32)
    with pytest.raises(NotImplementedError, match=f"attention over slots cannot run as .*{why}"):
        kvjax.step(m, cache, [1, 2], implementation="tpu interpret")


def test_slots_on_the_lanes_come_in_whole_tiles_and_kernels_on_their_platform():
    m = model(layers=1, head_dim=64)
    _, cache = kvjax.prefill(m, PROMPT, room=33)
    with pytest.raises(NotImplementedError, match="append cannot run as .*129 slots, expected a multiple"):
        kvjax.step(m, cache, [1, 2], implementation="tpu interpret")
    with pytest.raises(NotImplementedError, match="this runs on cpu"):
        kvjax.step(m, cache, [1, 2], implementation="tpu")
