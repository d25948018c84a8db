"""Claims of papers on attention kernels, as counts of what runs in their place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

import kvjax
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.attention.flash_prefill import flash_prefill
from kvjax.ops.attention.union import Keys, attend, merge
from kvjax.ops.decode.page_pool import make_pool
from kvjax.ops.decode.paged_decode import paged_decode
from kvjax.ops.decode.ragged_decode import ragged_decode
from kvjax.ops.decode.stacked_decode import stacked_decode
from kvjax.pallas_kernels.flash_prefill.plan import MASKED, UNSEEN, Sizes, block_kinds
from kvjax.serve import Prompt
from kvjax.serve.device.arena import Arena, PageFormat, Shape, _rows
from kvjax.serve.device.jobs import job_of
from kvjax.serve.device.pages import RequestPages
from kvjax.serve.device.write import draws_of, write_slice
from kvjax.serve.systems.kernels import KERNELS
from kvjax.words import Float8, Rotate
from tests.methods import battery
from tests.serve import test_kernel_claims as this

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.rotating) for seed in (1, 2))]


def test_every_claim_of_a_kernel_is_tested_here_by_the_name_on_its_card():
    for one in KERNELS.values():
        assert callable(getattr(this, one.tested)), one.id


def largest(jaxpr):
    """Numbers of the largest array that a program makes outside of its kernels."""
    found = 0
    for step in jaxpr.eqns:
        found = max([found, *(int(np.prod(x.aval.shape)) for x in step.outvars)])
        if step.primitive.name != "pallas_call":
            inner = jax.tree.leaves([*step.params.values()], is_leaf=lambda x: isinstance(x, ClosedJaxpr))
            for one in inner:
                if isinstance(one, ClosedJaxpr):
                    found = max(found, largest(one.jaxpr))
    return found


def test_no_array_of_a_prompts_attention_grows_with_the_square_of_its_length():
    def most(tokens, implementation):
        x = jax.ShapeDtypeStruct((1, 2, tokens, 128), jnp.float32)
        at = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

        def one(q, k, v, at):
            return flash_prefill(q, k, v, at, at, scale=0.1, implementation=implementation)

        return largest(jax.make_jaxpr(one)(x, x, x, at).jaxpr)

    flash, plain = ([most(t, name) for t in (2048, 4096)] for name in ("tpu interpret", "reference"))
    assert flash[1] == 2 * flash[0] and plain[1] == 4 * plain[0] > flash[1]
    assert most(128, "tpu interpret") >= most(128, "reference")


@pytest.mark.rotating
@pytest.mark.parametrize("blocks", [1, 4, 7])
def test_a_causal_prompt_visits_half_of_the_blocks_and_masks_the_diagonal(blocks):
    size, at = 16, jnp.arange(16 * blocks)[None, None]
    kinds = np.asarray(block_kinds(at, at, Sizes(size, size, 1.0)))
    assert (kinds != UNSEEN).sum() == blocks * (blocks + 1) // 2 and (kinds == MASKED).sum() == blocks
    newer = np.asarray(block_kinds(at + 16 * blocks, at, Sizes(size, size, 1.0)))
    assert (newer != UNSEEN).all() and not (newer == MASKED).any()


def attention(q, k, v):
    """Attention in float64, [T, H]."""
    z = q @ k.T / np.sqrt(q.shape[1])
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


@pytest.mark.rotating
@pytest.mark.parametrize("seed", SEEDS)
def test_a_rotation_before_float8_makes_the_error_of_outliers_smaller(seed):
    """The paper's numbers (section 4.3): N(0, 1), and to every thousandth N(0, 100) is added; eight heads."""

    def coded(codec, x):
        return np.float64(codec.decode(codec.encode(jnp.asarray(x, jnp.float32)[None]), 128, jnp.float32)[0])

    def error(codec, heads):
        each = []
        for q, k, v in heads:
            got = attention(coded(codec, q), coded(codec, k), coded(Float8(), v))
            each.append(np.mean((got - attention(q, k, v)) ** 2))
        return np.sqrt(np.mean(each))

    draw = np.random.default_rng(seed)
    plain = draw.normal(size=(8, 3, 512, 128))
    far = plain + 10 * draw.normal(size=plain.shape) * (draw.random(plain.shape) < 1e-3)
    rotated = Rotate("hadamard") >> Float8()
    assert 1.1 < error(Float8(), far) / error(rotated, far) < 1.3
    assert error(Float8(), plain) / error(rotated, plain) == pytest.approx(1, abs=0.02)


def laid_out(k, v, page, seed):
    """Lay keys and values [K, S, H] out in pages that lie anywhere; return the pool and table [1, K, M]."""
    pages = k.shape[0] * k.shape[1] // page
    table = np.random.default_rng(seed).permutation(pages).astype(np.int32)
    words = np.zeros((2, 1, pages, page, k.shape[2]), np.float32)
    words[:, 0, table] = np.stack([k, v]).reshape(2, pages, page, -1)
    return make_pool(*map(jnp.asarray, words)), jnp.asarray(table.reshape(1, k.shape[0], -1))


@pytest.mark.rotating
@pytest.mark.parametrize("seed", SEEDS)
def test_one_cache_in_four_layouts_gives_one_attention(seed):
    heads, slots, width, lengths = 2, 64, 8, np.array([[37, 50]])
    draw = np.random.default_rng(seed)
    q = jnp.asarray(draw.normal(size=(1, 2 * heads, 1, width)), jnp.float32)
    k, v = draw.normal(size=(2, heads, slots, width)).astype(np.float32)
    want = [
        attention(np.float64(q[0, i]), *(x[i // 2, : lengths[0, i // 2]] for x in (k, v))) for i in range(4)
    ]
    scale, at = width**-0.5, jnp.full((1, 1), slots, jnp.int32)
    found = {}
    for page in (4, 16):
        pool, table = laid_out(k, v, page, seed)
        found[page] = paged_decode(q, pool, table, jnp.asarray(lengths), at, scale=scale)[0]
    found["rows"] = stacked_decode(
        q, *(jnp.asarray(x)[None, None] for x in (k, v)), jnp.asarray(lengths), at, scale=scale
    )[0]
    starts = jnp.asarray([[0, slots]])
    flat = (jnp.asarray(x.reshape(-1, width)) for x in (k, v))
    found["ragged"] = ragged_decode(
        q, *flat, starts, jnp.asarray(lengths), most=slots, aligned=slots, scale=scale
    )[0]
    for got in found.values():
        np.testing.assert_allclose(got[0], want, atol=1e-5)


def test_a_table_weighs_little_beside_its_pages():
    def share(page, width, dtype):
        shape = (1, 6, page, width)
        pool = jax.eval_shape(lambda: make_pool(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)))
        return 4 * pool.words.shape[1] / (4 * np.prod(pool.words.shape))

    assert share(16, 128, jnp.bfloat16) == 1 / 2048 and share(1, 8, jnp.float32) == 1 / 64


def parts_of(seed, slots, workers):
    """Attention of one token over `slots` slots: over all of them in float64, and its parts by worker."""
    draw = np.random.default_rng(seed)
    q, k, v = (draw.normal(size=(1, 2, n, 8)).astype(np.float32) for n in (1, slots, slots))
    z = np.einsum("bnth,bnsh->bnts", np.float64(q), k)
    p = np.exp(z - z.max(-1, keepdims=True))
    want = np.einsum("bnts,bnsh->bnth", p / p.sum(-1, keepdims=True), v)
    parts = []
    for part in np.array_split(np.arange(slots), workers):
        keys = Keys(jnp.asarray(k[:, :, part]), jnp.asarray(v[:, :, part]), None)
        parts.append(attend(jnp.asarray(q), keys, jnp.zeros((1, 1), jnp.int32), scale=1.0)[:2])
    return want, parts, k.nbytes + v.nbytes


def weight(part):
    return sum(x.nbytes for x in part)


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_the_slots_merge_to_all_of_them(seed):
    handed = {}
    for slots in (64, 512):
        want, parts, held = parts_of(seed, slots, 4)
        np.testing.assert_allclose(merge(parts)[0], want, atol=1e-5)
        handed[slots] = sum(map(weight, parts))
        assert handed[slots] < held / 10
    assert handed[64] == handed[512]
    _, parts, held = parts_of(seed, 8, 8)
    assert sum(map(weight, parts)) > held / 2


@pytest.mark.rotating
@pytest.mark.parametrize("seed", SEEDS)
def test_parts_merge_in_a_tree_of_few_rounds(seed):
    for workers, rounds in ((2, 1), (8, 3)):
        want, parts, _ = parts_of(seed, 40, workers)
        done = 0
        while len(parts) > 1:
            parts = [merge(parts[i : i + 2]) for i in range(0, len(parts), 2)]
            done += 1
        np.testing.assert_allclose(parts[0][0], want, atol=1e-5)
        # A ring hands each device's keys and values on n - 1 times.
        assert done == rounds and (done < workers - 1) == (workers > 2)


def test_samples_of_a_prompt_hold_and_read_it_once():
    model = battery.model("4/2")
    tokens = np.random.default_rng(0).integers(0, battery.VOCAB, 48).tolist()

    def parts(tokens, room):
        """Bytes of the prompt and of what belongs to each sample, which their sum is made of."""
        _, cache = kvjax.prefill(model, [tokens])
        held = {n: kvjax.nbytes(kvjax.fork(cache, n, room=room)) for n in (2, 4, 8)}
        each = (held[8] - held[4]) // 4
        assert held[4] - held[2] == 2 * each
        return held[8] - 8 * each, each

    prompt, each = parts(tokens, 4)
    # A slot of a layer has a key and a value of 2 KV heads, and positions.
    slot = 2 * 2 * model.config.head_dim * 4 * model.config.layers
    assert prompt >= 48 * slot and 4 * slot <= each < prompt / 4
    prompt, each = parts(tokens[:3], 64)
    assert prompt < each


def test_pages_of_codes_weigh_a_share_of_uncoded_ones():
    shape = Shape(64, 8, 128, "bfloat16", _rows("bfloat16", 64, 128, ("pos",)))
    kivi = PageFormat(shape, kvjax.method("kivi(bits=4)").store).holding
    plain = PageFormat(shape, None).holding
    assert kivi.pages(32768) <= 0.35 * plain.pages(32768)
    assert kivi.pages(128) == plain.pages(128)
    assert kivi.pages(1024) < plain.pages(1024)


def step_over(layers, mesh):
    """Compile a server's step of a decoder on a mesh; return it, the bytes of its weights and of its pool."""
    config = Config(
        vocab=64, d_model=32, layers=layers, heads=8, kv_heads=8, head_dim=8, d_ff=64, max_positions=64
    )
    model = Model(config, init(config, jax.random.key(0)))
    model = model if mesh is None else kvjax.spread(model, mesh, "tensor")
    pages = RequestPages(model, Arena(model, 4, 64), 4, 4)
    job = job_of(model, 0, Prompt([1, 2, 3], 4))
    pages.lists[0], pages.tables[0] = np.zeros((layers, 8), np.int32), [5]
    state = pages.pools, pages._rows([job], 4)
    draws, active = draws_of([job], [0], 4), np.arange(4) < 1
    how = model.params, state, np.zeros(4, np.int32), active, draws, np.int32(1)
    compiled = write_slice.lower(pages.step, *how, 0).compile()
    held = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in (model.params, pages.arena.words)]
    return compiled, *held


def test_a_step_on_a_mesh_has_two_all_reduces_per_layer_and_a_share_of_the_bytes():
    """Counted in the compiled program: one after attention and one after the MLP, as in Megatron-LM."""

    def reduces(compiled):
        return len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text()))

    made = {layers: step_over(layers, "model=4") for layers in (1, 3)}
    assert reduces(made[3][0]) - reduces(made[1][0]) == 2 * 2
    for what in ("all-gather", "all-to-all", "collective-permute"):
        texts = [compiled.as_text() for compiled, *_ in made.values()]
        assert texts[0].count(f" {what}(") == texts[1].count(f" {what}("), what
    alone, weights, pool = step_over(3, None)
    assert reduces(alone) == 0
    here, there = (one.memory_analysis().argument_size_in_bytes for one in (made[3][0], alone))
    assert there >= weights + pool and here < (weights + pool) / 4 + 0.1 * there
