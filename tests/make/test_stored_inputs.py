"""XQuant's stored inputs against a float64 decoder that computes keys and values from decoded inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.compress.below import decoded
from kvjax.grammar import Method, Store
from kvjax.make.stored_inputs import StoredInputs
from kvjax.steps import Run
from kvjax.steps.shared.fitted_arrays import groups_with_arrays
from kvjax.store.affine import Affine
from kvjax.store.over_below import OverBelow
from tests.float64.codes import affine
from tests.float64.reference import Prompt, rms_norm, rope, softmax
from tests.methods.battery import decoder, model, off

ROW = np.random.default_rng(3).integers(0, 64, 21).tolist()
NEXT = [7, 60, 2]


def answers(name, tokens, following, decode):
    """Logits of `following`, one after the other, in float64.

    decode: the inputs [T, D] of all layers so far, those of the last token included -> what their slots
    give. The prompt is read with its own inputs.
    """
    d = decoder(name)
    c, prompt, out = d.config, Prompt(d, tokens), []
    inputs = list(prompt.hidden)
    heads = lambda y: y.reshape(len(y), -1, c.head_dim).swapaxes(0, 1)  # noqa: E731
    for token in following:
        x = d.rest["embed"][[token]]
        for i, layer in enumerate(d.layers):
            inputs[i] = np.concatenate([inputs[i], rms_norm(x, layer["attn_norm"], c.norm_eps)])
            pos, stored = np.arange(len(inputs[i])), decode(inputs[: i + 1])[i]
            k, v = rope(heads(stored @ layer["k"]), pos, c.rope.theta), heads(stored @ layer["v"])
            q = rope(heads(inputs[i][-1:] @ layer["q"]), pos[-1:], c.rope.theta)
            k, v = (np.repeat(y, c.heads // c.kv_heads, 0) for y in (k, v))
            weights = softmax(q @ k.swapaxes(1, 2) / np.sqrt(c.head_dim))
            x = d.finish(layer, x, weights @ v)
        out.append(d.logits(x)[0])
    return out


def check(name, method, decode):
    _, cache = kvjax.prefill(model(name), [ROW, ROW[:9]], method=method, room=8)
    for token, want in zip(NEXT, answers(name, ROW, NEXT, decode), strict=True):
        logits, cache = kvjax.step(model(name), cache, [token, 1])
        assert off(np.asarray(logits)[0], want) < 3e-5
    return cache


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.rotating)])
@pytest.mark.parametrize("name", ["4/2", pytest.param("6/3", marks=pytest.mark.rotating)])
def test_an_input_is_stored_once_for_keys_and_values(name, bits):
    """One row of 32 channels per token, in 2 groups with a range each; no keys and no values."""
    code = affine(bits, 16)
    method = kvjax.method("xquant", variant="mha", bits=bits, group=16)
    cache = check(name, method, lambda inputs: [code(x) for x in inputs])
    slots = cache.groups[0].parts[0].pos.shape[-1]
    each = 2 * slots * (32 * bits // 8 + 2 * 4 + 4)
    assert kvjax.nbytes(cache) == 2 * each + 2 * 4


def over_below(layers, first, bits, coded):
    """XQuant-CL: the sums of the decoded differences of the first `coded` tokens."""

    def decode(inputs):
        out = []
        for i, x in enumerate(inputs):
            near = out[-1] if i >= layers else np.zeros_like(x)
            y = near + affine(first if i < layers else bits, 16)(x - near)
            out.append(np.concatenate([y[:coded], x[coded:]]))
        return out

    return decode


@pytest.mark.rotating
@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.rotating)])
def test_layers_store_differences_to_what_is_decoded_below(layers):
    """With granules of 8 and 2 newer tokens, 16 of 21 tokens are encoded."""
    method = kvjax.method("xquant-cl", bits=2, layers=layers, group=16, tokens=8, residual=2)
    check("deep", method, over_below(layers, 4, 2, 16))


@pytest.mark.rotating
def test_steps_encode_the_sum_over_layers_as_a_prompt_does():
    """After one step, the first 24 of 28 tokens are encoded: the last granule of them by the step."""
    m = model("deep")
    method = kvjax.method("xquant-cl", bits=2, layers=1, group=16, tokens=8, residual=4)
    row = np.random.default_rng(4).integers(0, 64, 27).tolist()
    _, cache = kvjax.prefill(m, [ROW, row], method=method, room=8)
    _, cache = kvjax.step(m, cache, [1, 2])

    @jax.jit
    def read(params, bodies):
        out, below = [], None
        gms = groups_with_arrays(Run(made.config, method).groups(params), params)
        for gm, body in zip(gms, bodies, strict=True):
            below = decoded(gm, body, below)
            out.append(below[0])
        return out

    made = kvjax.prepare(m, method)
    found = read(made.params, [group.bodies[0] for group in cache.groups])
    pos = np.asarray(cache.groups[0].bodies[0].pos)[0, 1, 0]
    (slots,) = np.nonzero(pos >= 0)
    assert sorted(pos[slots].tolist()) == [*range(24)]
    want = over_below(1, 4, 2, 24)(Prompt(decoder("deep"), row).hidden)
    for got, x in zip(found, want, strict=True):
        np.testing.assert_allclose(np.asarray(got)[0, 1, 0][slots], x[pos[slots]], atol=1e-5)


@pytest.mark.rotating
def test_stored_inputs_without_codes_are_the_model_itself():
    m, method = model("4/2"), Method(make=StoredInputs())
    caches = [kvjax.prefill(m, [ROW], method=x, room=4)[1] for x in (method, None)]
    for token in NEXT:
        found = [kvjax.step(m, cache, [token]) for cache in caches]
        assert off(found[0][0], found[1][0]) < 3e-5
        caches = [cache for _, cache in found]
    made = kvjax.prepare(m, method)
    assert off(made(np.array([ROW])), m(np.array([ROW]))) < 3e-5


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"group=5 must divide the 32 channels.*choose other"):
        kvjax.prefill(model("4/2"), [ROW], method="xquant:variant=mha,group=5")
    with pytest.raises(ValueError, match="tokens are encoded together, at least 1, got 0"):
        OverBelow(0)
    with pytest.raises(ValueError, match="layers"):
        kvjax.method("xquant-cl", layers=0)
    with pytest.raises(ValueError, match="got no layer below the rows"):
        (OverBelow() >> Affine(4)).encode(jnp.zeros((1, 1, 32, 8)))
    latents = Method(store=Store(OverBelow() >> Affine(4), None), make=kvjax.method("palu").make)
    with pytest.raises(InputError, match="layers keep other things"):
        kvjax.prefill(model("4/2"), [ROW], method=latents)
    # Some channels of a row have no difference to the layer below, which has all channels.
    with pytest.raises(InputError, match="at most one store; this chain has two, of xquant-cl and mustafar"):
        kvjax.method("xquant-cl + mustafar")
