"""Contexts that an encoder reads: float64 numpy written from the equations, and what the cache does."""

import copy
import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.contexts import context_cache
from kvjax.api.fork import fork
from kvjax.api.rows import reset_rows
from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.config_json import config_from_json, config_to_json
from kvjax.models.encoder import encode
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.bidirectional import Bidirectional
from kvjax.models.mixers.cross_attention import CrossAttention
from kvjax.models.model import Model
from kvjax.models.params import Group, regroup
from kvjax.models.transformer import forward
from kvjax.state.codes import Codes
from kvjax.steps.prefilling import probe as probing
from kvjax.steps.prefilling import settle as prompt
from kvjax.steps.prefilling import two_programs as apart
from tests.models.architectures import CEPE, SMALL, TABLE, with_layers
from tests.models.conversation import parameters
from tests.sweep import sweep

ENCODER = Config(
    vocab=30, d_model=12, layers=2, heads=3, kv_heads=3, head_dim=4, d_ff=20, mixers=(Bidirectional(),) * 2
)
# Name: (encoder, layer of the context, tokens per chunk).
PAIRS = {"xc-cache": (SMALL, 0, None), "cepe": (ENCODER, 1, 5)}
DOCS = Path(__file__).parents[2] / "docs" / "architectures.md"
ROOM = 16
CONTEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [7, 9, 3], []]
PROMPTS = np.array([[2, 7, 1, 8, 2, 8, 1], [1, 4, 1, 4, 2, 1, 3], [5, 7, 7, 2, 1, 5, 6]])


def build(config: Config, seed: int) -> Model:
    return Model(config, parameters(config, seed))


class Pair:
    """A decoder, its encoder, and what the definition gives."""

    def __init__(self, name):
        encoder, self.layer, self.chunk = PAIRS[name]
        self.model, self.encoder = build(TABLE[name].config, 1), build(encoder, 2)

    def cache(self, contexts=CONTEXTS, room=ROOM, **options):
        return kvjax.encode_context(
            self.model, self.encoder, contexts, chunk=self.chunk, room=room, **options
        )

    def states(self, context):
        """[S, D] in float64: every chunk by itself."""
        size = self.chunk or max(len(context), 1)
        cuts = [context[i : i + size] for i in range(0, len(context), size)]
        width = self.encoder.config.d_model
        return np.concatenate([np.zeros((0, width)), *[numpy_hidden(self.encoder, c, None) for c in cuts]])

    def logits(self, tokens, context):
        out = numpy_hidden(self.model, tokens, self.states(context))
        return out @ np.asarray(self.model.params["unembed"], np.float64)

    def all_logits(self):
        """[B, T, V] of the prompts, each over its context."""
        return np.stack([self.logits(p, c) for p, c in zip(PROMPTS, CONTEXTS, strict=True)])


made = functools.cache(Pair)
jitted = jax.jit(encode, static_argnames=("config", "chunk"))


@pytest.fixture(scope="module", params=sweep(PAIRS, "cepe"))
def pair(request):
    return made(request.param)


@pytest.fixture(scope="module")
def want(pair):
    """Logits [B, T, V] of the definition."""
    return pair.all_logits()


def close(got, expected):
    np.testing.assert_allclose(np.asarray(got), expected, atol=2e-5 * np.abs(expected).max(), rtol=0)


# --- the definition, in float64 --------------------------------------------------------------------------


def numpy_norm(x, weight, config):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weight


def numpy_heads(x, weight, config, turn):
    """[S, heads, H]; turn: pairs (i, i + H / 2) turn by position * theta^(-2 i / H)."""
    half = config.head_dim // 2
    y = (x @ weight).reshape(len(x), weight.shape[1] // config.head_dim, config.head_dim)
    angle = np.arange(len(x))[:, None] * config.rope.theta ** (-np.arange(half) / half)
    z = (y[..., :half] + 1j * y[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([z.real, z.imag], -1) if turn else y


def numpy_mix(p, x, e, config, *, turns, causal):
    """softmax(q k' / sqrt(H)) v, queries from x and keys and values from e; 0 where e is empty."""
    q, k = numpy_heads(x, p["q"], config, turns), numpy_heads(e, p["k"], config, turns)
    v = numpy_heads(e, p["v"], config, False)
    out = np.zeros(q.shape)
    for t, n in np.ndindex(q.shape[:2]):
        seen, head = t + 1 if causal else len(e), n // (q.shape[1] // k.shape[1])
        if seen:
            w = np.exp(k[:seen, head] @ q[t, n] / np.sqrt(config.head_dim))
            out[t, n] = w / w.sum() @ v[:seen, head]
    return out.reshape(len(x), -1) @ p["o"]


def numpy_hidden(model, tokens, states):
    """Hidden states [T, D] behind the last norm."""
    config, params = model.config, jax.tree.map(lambda w: np.asarray(w, np.float64), model.params)
    x = params["embed"][np.asarray(tokens, int)]
    for layer, stacked in enumerate(params["layers"]):
        p = {name: w[0] for name, w in stacked.items()}
        mixer = config.mixers[layer] if config.mixers else Attention()
        y = numpy_norm(x, p["attn_norm"], config)
        if isinstance(mixer, CrossAttention):
            x = x + numpy_mix(p, y, states, config, turns=mixer.turns, causal=False)
        else:
            x = x + numpy_mix(p, y, y, config, turns=True, causal=isinstance(mixer, Attention))
        if "down" in p:
            y = numpy_norm(x, p["mlp_norm"], config)
            x = x + (y @ p["gate"] / (1 + np.exp(-y @ p["gate"])) * (y @ p["up"])) @ p["down"]
    return numpy_norm(x, params["norm"], config)


# --- what is computed ------------------------------------------------------------------------------------


def padded_contexts():
    out = np.zeros((3, 12), np.int32)
    for i, c in enumerate(CONTEXTS):
        out[i, : len(c)] = c
    return jnp.asarray(out), jnp.asarray([len(c) for c in CONTEXTS], jnp.int32)


def weights_of(logits):
    """Draw what a loss multiplies logits by."""
    return np.random.default_rng(3).standard_normal(logits.shape) / logits.size**0.5


@pytest.fixture(scope="module")
def without_cache(pair, want):
    """Logits of every prompt token, and the gradient of their loss in both models' parameters."""
    tokens, lengths = padded_contexts()

    def loss(params):
        held = encode(params[1], tokens, pair.encoder.config, lengths, pair.chunk)
        logits = forward(params[0], jnp.asarray(PROMPTS, jnp.int32), pair.model.config, context=held)
        return (logits * jnp.asarray(weights_of(want), jnp.float32)).sum(), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))((pair.model.params, pair.encoder.params))
    return logits, gradients


@pytest.mark.rotating
def test_a_forward_pass_over_given_states_is_the_definition(without_cache, want):
    close(without_cache[0], want)


@pytest.mark.rotating
def test_prefill_and_steps_over_a_cached_context_are_the_definition(pair, want):
    lengths = np.array([4, 3, 2])
    logits, cache = kvjax.prefill(pair.model, PROMPTS, lengths=lengths, cache=pair.cache(), room=ROOM)
    close(logits, want[[0, 1, 2], lengths - 1])
    for i in range(3):
        logits, cache = kvjax.step(pair.model, cache, PROMPTS[[0, 1, 2], lengths + i])
        close(logits, want[[0, 1, 2], lengths + i])


@pytest.mark.rotating
def test_decoding_may_start_without_a_prompt(pair, want):
    cache = pair.cache()
    for t in range(3):
        logits, cache = kvjax.step(pair.model, cache, PROMPTS[:, t])
        close(logits, want[:, t])
    close(kvjax.step(pair.model, cache, PROMPTS[:, 2], append=False)[0], want[:, 2])


@pytest.mark.rotating
def test_a_row_without_context_is_the_decoder_without_one(pair):
    _, cache = kvjax.prefill(pair.model, PROMPTS, cache=pair.cache([[], [], []]), room=ROOM)
    _, bare = kvjax.prefill(pair.model, PROMPTS, room=ROOM)
    got, expected = (kvjax.step(pair.model, c, PROMPTS[:, 0])[0] for c in (cache, bare))
    assert np.isfinite(np.asarray(got)).all()
    close(got, np.asarray(expected))


@pytest.mark.rotating
def test_generate_writes_what_steps_over_the_context_would():
    pair = made("cepe")
    out = kvjax.generate(pair.model, PROMPTS[:, :4], cache=pair.cache(), max_new_tokens=3, stop=())
    for row, context in enumerate(CONTEXTS):
        tokens = [*PROMPTS[row, :4]]
        for _ in range(3):
            tokens.append(int(np.argmax(pair.logits(tokens, context)[-1])))
        assert np.asarray(out.tokens)[row].tolist() == tokens[4:]


@pytest.mark.rotating
def test_stacked_readers_and_a_prompt_in_pieces_give_the_same():
    reads = dataclasses.replace(CEPE, source=0)
    plain = build(with_layers(CEPE, reads, reads, Attention(), Attention()), 1)
    groups = (Group(0, 1), Group(1, 2), Group(3, 2))
    stacked = Model(plain.config, regroup(plain.params, groups))
    pair = copy.copy(made("cepe"))
    pair.model = plain
    want = pair.all_logits()
    pair.model = stacked
    logits, cache = kvjax.prefill(stacked, PROMPTS[:, :6], cache=pair.cache(), chunk=4, room=ROOM)
    close(logits, want[:, 5])
    close(kvjax.step(stacked, cache, PROMPTS[:, 6])[0], want[:, 6])


def test_an_encoder_sees_all_tokens_of_a_row(rng):
    encoder, tokens = build(ENCODER, 2), rng.integers(0, 30, (2, 9))
    unembed = np.asarray(encoder.params["unembed"], np.float64)
    close(encoder(tokens), np.stack([numpy_hidden(encoder, row, None) for row in tokens]) @ unembed)
    assert config_from_json(json.loads(json.dumps(config_to_json(ENCODER)))) == ENCODER


def test_gradients_reach_the_decoder_and_the_encoder(pair, want, without_cache):
    """Against central differences of the definition, along one direction in each model's parameters."""
    rng, weight, gradients = np.random.default_rng(4), weights_of(want), without_cache[1]
    params = (pair.model.params, pair.encoder.params)
    p = {n: g[0] for n, g in gradients[0]["layers"][pair.layer].items()}
    assert all(np.abs(p[name]).max() > 1e-4 for name in "qkvo")
    for at, name in enumerate(("model", "encoder")):
        way = jax.tree.map(lambda x: rng.standard_normal(x.shape), params[at])

        losses = []
        for eps in (1e-5, -1e-5):
            new = jax.tree.map(lambda x, y, e=eps: np.asarray(x, np.float64) + e * y, params[at], way)
            other = copy.copy(pair)
            setattr(other, name, dataclasses.replace(getattr(pair, name), params=new))
            losses.append((other.all_logits() * weight).sum())
        expected = (losses[0] - losses[1]) / 2e-5
        got = sum(np.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (gradients[at], way)), strict=True))
        assert abs(expected) > 0.01
        assert got == pytest.approx(expected, rel=1e-4)


@pytest.mark.rotating
def test_bfloat16_models_hold_bfloat16_contexts():
    pair = made("xc-cache")

    def half(m):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), m.params)
        return dataclasses.replace(m, params=params)

    model = half(pair.model)
    cache = kvjax.encode_context(model, half(pair.encoder), CONTEXTS, chunk=pair.chunk, room=ROOM)
    assert cache.groups[pair.layer].tail.k.dtype == jnp.bfloat16
    logits, cache = kvjax.prefill(model, PROMPTS[:, :6], cache=cache, room=ROOM)
    logits, _ = kvjax.step(model, cache, PROMPTS[:, 6])
    # Eight bits of mantissa in each of four layers.
    want = pair.all_logits()[:, 6]
    np.testing.assert_allclose(np.asarray(logits), want, atol=0.05 * np.abs(want).max(), rtol=0)


# --- what is kept ----------------------------------------------------------------------------------------


@pytest.mark.rotating
def test_the_context_costs_one_state_per_token_and_tokens_of_the_decoder_leave_it_as_it_is(pair):
    cache, width = pair.cache(), pair.encoder.config.d_model
    before = jax.tree.map(np.asarray, cache.groups[pair.layer])
    # Three rows of 16 slots: a state in float32 and a position.
    assert kvjax.nbytes(cache.groups[pair.layer]) == 3 * 16 * (4 * width + 4)
    assert kvjax.nbytes(cache.groups[pair.layer + 2]) == 0
    _, cache = kvjax.prefill(pair.model, PROMPTS, cache=cache, room=ROOM)
    _, cache = kvjax.step(pair.model, cache, PROMPTS[:, 0])
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, cache.groups[pair.layer]))
    kept = [(k >= 0).sum(-1) for k in kvjax.kept_positions(cache)]
    assert kept[pair.layer][:, 0].tolist() == [12, 3, 0]
    assert kept[pair.layer + 2].shape == (3, 0)
    assert all((k == 8).all() for i, k in enumerate(kept) if i % 2 != pair.layer % 2)


@pytest.mark.rotating
def test_states_from_elsewhere_may_be_held_and_saved(pair, want, tmp_path):
    tokens, lengths = padded_contexts()
    held = jitted(pair.encoder.params, tokens, pair.encoder.config, lengths, pair.chunk)
    kvjax.save_cache(tmp_path / "context", context_cache(pair.model, held, room=ROOM))
    logits, _ = kvjax.prefill(pair.model, PROMPTS, cache=kvjax.load_cache(tmp_path / "context"), room=ROOM)
    close(logits, want[:, -1])


@pytest.mark.rotating
def test_many_prompts_may_ask_one_context(pair):
    cache = fork(pair.cache(CONTEXTS[:1]), 3)
    logits, _ = kvjax.prefill(pair.model, PROMPTS, cache=cache, room=ROOM)
    close(logits, np.stack([pair.logits(p, CONTEXTS[0])[-1] for p in PROMPTS]))


@pytest.mark.rotating
def test_a_row_that_is_emptied_has_no_context(pair, want):
    _, cache = kvjax.prefill(pair.model, PROMPTS[:, :6], cache=pair.cache(), room=ROOM)
    cache = reset_rows(cache, np.array([True, False, False]))
    logits, _ = kvjax.step(pair.model, cache, PROMPTS[[0, 1, 2], [0, 6, 6]])
    close(logits[1:], want[1:, 6])
    close(logits[0], pair.logits(PROMPTS[0, :1], [])[0])


@pytest.mark.rotating
@pytest.mark.parametrize("store", sweep(["int8", "kivi"], "int8"))
def test_a_store_encodes_the_context_where_it_encodes_token_by_token(store):
    pair = made("cepe")
    want = pair.all_logits()
    method = kvjax.method(store, **({} if store == "int8" else dict(group=2, residual=4)))
    cache = pair.cache(method=method)
    state = cache.groups[pair.layer].tail.k
    assert isinstance(state, Codes) == (store == "int8")
    if store == "int8":
        plain = pair.cache().groups[pair.layer]
        assert kvjax.nbytes(cache.groups[pair.layer]) < kvjax.nbytes(plain)
    logits, cache = kvjax.prefill(pair.model, PROMPTS[:, :6], cache=cache, room=ROOM)
    logits, _ = kvjax.step(pair.model, cache, PROMPTS[:, 6])
    error = np.abs(np.asarray(logits) - want[:, 6]).max() / np.abs(want[:, 6]).max()
    assert error < (0.05 if store == "int8" else 1.0)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("keep", "budget", "options"),
    [
        ("snapkv", 4, dict(window=2, kernel=3)),
        pytest.param("streamingllm", 4, dict(sinks=1), marks=pytest.mark.rotating),
        pytest.param("kvzip", 32, dict(page=4), marks=pytest.mark.rotating),
    ],
)
def test_a_keep_leaves_the_context_whole(keep, budget, options):
    pair = made("xc-cache")
    cache = pair.cache(method=kvjax.method(keep, budget=budget, **options))
    _, cache = kvjax.prefill(pair.model, PROMPTS[:, :6], cache=cache, room=ROOM)
    kept = [(k >= 0).sum(-1) for k in kvjax.kept_positions(cache)]
    assert kept[0][:, 0].tolist() == [12, 3, 0]
    assert (kept[1] == min(budget, 6)).all()
    logits, _ = kvjax.step(pair.model, cache, PROMPTS[:, 6])
    if budget == 32:
        close(logits, pair.all_logits()[:, 6])


@pytest.mark.rotating
def test_what_a_probe_reads_again_sees_the_context(monkeypatch):
    """KVzip's scores come from a second reading, which must ask the same context as the first."""
    pair, seen, observe = made("xc-cache"), [], prompt.observe

    def spy(run, params, tokens, lengths, cache, needs):
        seen.append(cache.groups[0].tail.k)
        return observe(run, params, tokens, lengths, cache, needs)

    cache = pair.cache(method=kvjax.method("kvzip", budget=3, sinks=1, page=4))
    for module in (prompt, apart, probing):
        monkeypatch.setattr(module, "observe", spy)
    # Without jit, because what two programs are given is never the same to them.
    with jax.disable_jit():
        kvjax.prefill(pair.model, PROMPTS[:, :6], cache=cache, room=ROOM)
    # Both hold the very array: nothing else can have given the second one a context.
    assert len(seen) == 2 and seen[0] is seen[1]


@pytest.mark.rotating
def test_the_example_of_the_documentation_runs():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    scope = {}
    exec(next(b for b in blocks if "encode_context" in b), scope)
    assert scope["cache"].next.tolist() == [3, 1] and scope["cache"].method.id == "int8"


# --- what does not fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixers", "why"),
    [
        ((Attention(), CrossAttention(0)), "width is 0, expected a whole number >= 1"),
        ((CrossAttention(8, kv_heads=3), Attention()), "4 query heads cannot share 3 KV heads"),
        ((CrossAttention(8, source=7), Attention()), "source=7 names no layer of 0 to 1"),
        ((CrossAttention(8, source=1), CrossAttention(8)), "layer 0 reads the context of layer 1, expected"),
        ((Attention(), CrossAttention(8, source=0)), "layer 1 reads layer 0, whose slots differ"),
        ((CrossAttention(8), CrossAttention(9, source=0)), "layer 1 reads layer 0, whose slots differ"),
        ((CrossAttention(8), Attention(source=0)), "layer 1 reads layer 0, whose slots differ"),
    ],
)
def test_configs_that_do_not_fit_are_refused(mixers, why):
    with pytest.raises(ValueError, match=why):
        with_layers(*mixers)


@pytest.mark.parametrize(
    ("mixer", "why"), [(CEPE, "layer 1 has a window"), (Bidirectional(), "has a window")]
)
def test_layers_that_see_everything_have_no_window(mixer, why):
    with pytest.raises(ValueError, match=why):
        with_layers(Attention(), mixer, windows=(None, 4))


def test_contexts_that_do_not_fit_are_refused():
    pair = made("cepe")
    model, encoder = pair.model, pair.encoder
    plain = build(SMALL, 1)
    two = build(with_layers(CEPE, CEPE), 1)
    wide = build(dataclasses.replace(SMALL, d_model=20), 1)
    short = build(dataclasses.replace(encoder.config, max_positions=8), 2)
    cases = [
        (plain, encoder, CONTEXTS, {}, "0 layers of this model hold a context, expected one"),
        (two, encoder, CONTEXTS, {}, "2 layers of this model hold a context, expected one"),
        (
            model,
            wide,
            CONTEXTS,
            {},
            f"20 channels per token, layer {pair.layer} reads {encoder.config.d_model}",
        ),
        (model, short, CONTEXTS, {}, "would read 12 tokens at once, its last position is 8"),
        (model, encoder, CONTEXTS, dict(chunk=0), "chunk is 0, expected at least 1"),
        (model, encoder, [[99]], {}, "token id 99 is outside the vocabulary"),
    ]
    for decoder, reader, contexts, options, why in cases:
        with pytest.raises(InputError, match=why):
            kvjax.encode_context(decoder, reader, contexts, **options)
    assert kvjax.encode_context(model, short, CONTEXTS, chunk=8).next.tolist() == [0, 0, 0]


def test_an_encoder_is_not_decoded():
    with pytest.raises(InputError, match="this model is an encoder"):
        kvjax.prefill(build(ENCODER, 2), [[1, 2, 3]])
