"""Claims of papers on attention kernels, as counts of what runs in their place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

import kvjax
from kvjax.ops.attention.flash_prefill import flash_prefill
from kvjax.ops.attention.union import Keys, attend, merge
from kvjax.pallas_kernels.flash_prefill.plan import MASKED, UNSEEN, Sizes, block_kinds
from kvjax.serve.device.arena import Kind, Shape, _rows
from kvjax.serve.systems.kernels import KERNELS
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


@pytest.mark.parametrize("blocks", [1, 4, 7])
def test_a_causal_prompt_visits_half_of_the_blocks_and_masks_the_diagonal(blocks):
    size, at = 16, jnp.arange(16 * blocks)[None, None]
    kinds = np.asarray(block_kinds(at, at, Sizes(size, size, 1.0)))
    assert (kinds != UNSEEN).sum() == blocks * (blocks + 1) // 2 and (kinds == MASKED).sum() == blocks
    newer = np.asarray(block_kinds(at + 16 * blocks, at, Sizes(size, size, 1.0)))
    assert (newer != UNSEEN).all() and not (newer == MASKED).any()


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
    kivi = Kind(shape, kvjax.method("kivi(bits=4)").store).holding
    plain = Kind(shape, None).holding
    assert kivi.pages(32768) <= 0.35 * plain.pages(32768)
    assert kivi.pages(128) == plain.pages(128)
    assert kivi.pages(1024) < plain.pages(1024)
