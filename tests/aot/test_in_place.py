"""Whole programs around the kernels keep a donated cache in its own memory: nothing of its size beside it."""

import pytest

from kvjax.aot.cases import CASES
from kvjax.aot.hardware import TOPOLOGIES
from kvjax.aot.probe import available, probe

NAMES = [n for n in CASES if n.startswith("paged_append") or n.endswith(("-step", "-generation"))]
PAIRS = [(name, TOPOLOGIES[i % len(TOPOLOGIES)]) for i, name in enumerate(NAMES)]


@pytest.mark.skipif(bool(available()), reason=available())
@pytest.mark.parametrize(("name", "topology"), PAIRS, ids=lambda x: x)
def test_a_donated_cache_is_aliased_as_a_whole_and_nothing_large_lies_beside_it(name, topology):
    found = probe(topology, name)
    assert "error" not in found, found
    assert found["aliases"] == found["cache"] and found["copies"] == 0
    assert found["temporaries"] < 0.01 * found["cache"]


def test_there_are_steps_and_generations_to_compile():
    assert {"stacked_decode-step", "stacked_decode-generation", "mla_decode-bfloat16-step"} <= set(NAMES)
