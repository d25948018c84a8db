"""The model of a step's time equals sums by hand: bytes read once, products, and what is sent."""

import dataclasses

import pytest

from kvjax.grammar import Method
from kvjax.mesh.rules import as_rules
from kvjax.models.config import Config
from kvjax.models.feed_forward import MoE
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.latent import Latent
from kvjax.plan.collectives import Collective
from kvjax.plan.layouts import abstract
from kvjax.plan.roofline import roofline
from kvjax.plan.sizes import cache_shapes, placed_cache, placed_weights, weights
from kvjax.plan.topologies import topology_of
from kvjax.steps import Run

CONFIG = Config(vocab=64, d_model=32, layers=4, heads=4, kv_heads=2, head_dim=16, d_ff=64)
V5E = topology_of("v5e:4x4")
ROWS, TOKENS = 8, 1024
HBM, MXU, LINKS = 819e9, 197e12, 200e9


def least(config, sent=(), tokens=1, past=1.0, **mesh):
    mesh = mesh or {"data": 4, "model": 2}
    on = abstract(V5E, mesh, as_rules("tensor", tuple(mesh)))
    bare = weights(config, V5E, "bfloat16")
    params = placed_weights(config, bare, V5E, on)
    cache = placed_cache(cache_shapes(Run(config, Method()), bare, ROWS, TOKENS, on.mesh), on)
    found = roofline(config, params, cache, V5E, on, sent, tokens, past)
    assert found is not None
    return found


def milliseconds(bytes, flops):
    return pytest.approx(1e3 * bytes / HBM, rel=1e-6), pytest.approx(1e3 * flops / MXU, rel=1e-6)


# Of a layer on each of two devices: half of the matrices, and two norms.
ATTENTION, MLP, NORMS = (32 * 64 * 2 + 32 * 32 * 2) // 2, 32 * 64 * 3 // 2, 2 * 32
# A device's row of one KV head: keys and values of 16 channels, positions of 4 bytes; two queries meet it.
SLOTS = 2 * TOKENS * (2 * 16 * 2 + 4)
MET = 2 * TOKENS * 2 * 2 * (16 + 16)
TOP = 32 + 32 * 64 // 2


def test_dense_layers_read_all_weights_and_slots_once():
    hbm, mxu, _ = least(CONFIG)
    rows = 2 * 4
    moved = 2 * (4 * (ATTENTION + MLP + NORMS) + TOP) + 4 * SLOTS + rows
    products = 2 * 2 * (4 * (ATTENTION + MLP) + TOP) + 4 * MET
    assert (hbm, mxu) == milliseconds(moved, products)


def test_a_chunk_reads_weights_once_and_multiplies_by_its_tokens_and_the_slots_that_they_meet():
    hbm, mxu, _ = least(CONFIG, tokens=16, past=0.5)
    moved = 2 * (4 * (ATTENTION + MLP + NORMS) + TOP) + (4 * SLOTS + 2 * 4) / 2
    products = 2 * 2 * (16 * 4 * (ATTENTION + MLP) + TOP) + 16 * 4 * MET / 2
    assert (hbm, mxu) == milliseconds(moved, products)


def test_collectives_are_sent_at_the_rate_of_the_links_and_sums_twice():
    sent = [Collective("all-reduce", 3, 1000), Collective("all-gather", 1, 500)]
    found = least(CONFIG, sent)
    assert found.links == pytest.approx(1e3 * 2500 / LINKS)
    assert found.ms == pytest.approx(max(found.hbm, found.mxu) + found.links)
    assert found.tokens_per_second(8) == pytest.approx(8e3 / found.ms)


def test_of_experts_those_count_that_rows_are_expected_to_choose():
    experts = dataclasses.replace(CONFIG, mlps=(MoE(8, 2, 64),) * 4)
    hbm, mxu, _ = least(experts)
    one, router = 8 * MLP, 32 * 8
    touched = 1 - (1 - 2 / 8) ** ROWS
    moved = 2 * (4 * (ATTENTION + NORMS + router + one * touched) + TOP) + 4 * SLOTS + 2 * 4
    products = 2 * 2 * (4 * (ATTENTION + router + one * 2 / 8) + TOP) + 4 * MET
    assert (hbm, mxu) == milliseconds(moved, products)


def test_slots_that_other_layers_read_are_read_again():
    shared = dataclasses.replace(
        CONFIG, mixers=(Attention(), Attention(), Attention(source=1), Attention(source=1))
    )
    without = (32 * 32 * 2) // 2
    hbm, mxu, _ = least(shared)
    moved = 2 * (4 * (ATTENTION + MLP + NORMS) - 2 * without + TOP) + 4 * SLOTS + 2 * 4
    products = 2 * 2 * (4 * (ATTENTION + MLP) - 2 * without + TOP) + 4 * MET
    assert (hbm, mxu) == milliseconds(moved, products)


@pytest.mark.rotating
def test_latents_that_every_device_has_whole_meet_its_own_queries_alone():
    latent = dataclasses.replace(CONFIG, kv_heads=4, mixers=(Latent(96, 32, 16, 16),) * 4)
    (whole, _, _), (split, _, _) = least(latent, data=8, model=1), least(latent, data=8, model=2)
    assert whole > split
    met = [least(latent, data=8, model=n).mxu for n in (1, 2)]
    flops = 2 * TOKENS * 4 * (128 + 96)
    products = 4 * (32 * 4 * 48 + 4 * 96 * 32 + 4 * 16 * 32 + 32 * 64 * 3) + 32 * 64
    down = 4 * 32 * 128
    assert met[0] == pytest.approx(1e3 * (4 * flops + 2 * (products + down + 32)) / MXU, rel=1e-3)
    assert met[1] == pytest.approx(1e3 * (4 * flops / 2 + 2 * (products / 2 + down + 32)) / MXU, rel=1e-3)


def test_of_a_cpu_nothing_is_known():
    topology = topology_of("cpu:8")
    on = abstract(topology, {"data": 8}, as_rules("batch", ("data",)))
    bare = weights(CONFIG, topology, "bfloat16")
    cache = placed_cache(cache_shapes(Run(CONFIG, Method()), bare, ROWS, TOKENS, on.mesh), on)
    assert roofline(CONFIG, placed_weights(CONFIG, bare, topology, on), cache, topology, on, ()) is None
