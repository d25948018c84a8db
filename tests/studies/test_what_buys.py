"""The page of what buys what: it shows its data, and counts what a prompt computes."""

import pytest

import kvjax
from kvjax.methods import METHODS
from kvjax.plan.cache_sizes import CacheSizes
from scripts.studies import board, what_buys

LAYERS = 30


def test_the_page_shows_its_data():
    assert what_buys.PAGE.agrees(), "run: python -m scripts.studies.what_buys --write"


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("snapkv(budget=0.25)", 1.0),
        # 13 layers read 1024 tokens, and then all 30 read the quarter that layer 12 chose.
        ("gemfilter(budget=0.25, filter_layer=12)", 13 / 30 + 0.25),
        # 15 layers read all tokens, the upper 15 a fifth (204 of 1024).
        ("fastkv(budget=0.25, tsp_layer=14, share=0.2)", (15 * 1024 + 15 * 204) / (30 * 1024)),
        ("lazyllm(layer=9, share=0.5)", (10 + 20 * 0.5) / 30),
    ],
)
def test_layers_that_read_fewer_tokens_compute_less(text, share):
    assert what_buys.computed(kvjax.method(text), LAYERS) == pytest.approx(share, abs=1e-9)


def test_every_family_of_methods_that_saves_something_has_a_kind():
    families = {METHODS[id].paper.family for id in METHODS} - {"baseline", "prefix-reuse"}
    assert families <= {family for of in what_buys.KINDS.values() for family in of}


def test_the_best_of_a_kind_is_within_its_limit():
    rows = [
        what_buys.Row("evict tokens", "a 0.25", 25, 25, 25, 100, {"aware": 1.5}),
        what_buys.Row("evict tokens", "b 0.5", 50, 50, 50, 100, {"aware": 0.5}),
        what_buys.Row("read part of the cache", "c", 107, 107, 27, 100, {"aware": -0.001}),
        what_buys.Row("keep in host memory", "d", 100, 2, 100, 100, {"aware": 0.0}),
    ]
    assert [x.label for x in what_buys.front(rows[:3], "held", "aware")] == ["a 0.25", "b 0.5", "c"]
    assert [x.label for x in what_buys.front(rows[:3], "read", "aware")] == ["a 0.25", "c"]
    lines = what_buys.best(rows, "aware").splitlines()
    assert "| evict tokens | +0.50 (b 0.5) | +1.50 (a 0.25) | +0.50 (b 0.5) | +1.50 (a 0.25) |" in lines
    assert "| read part of the cache | – | – | +0.00 (c) | +0.00 (c) |" in lines
    # What is in host memory is not held on the device, and is read from there.
    assert "| keep in host memory | +0.00 (d) | +0.00 (d) | – | – |" in lines


@pytest.mark.parametrize(("method", "far"), [("full", 0), ("offloaded", 2 * LAYERS * 3 * 64 * 2 * 64)])
def test_bytes_in_host_memory_are_keys_and_values_of_an_offloaded_cache(method, far):
    """Keys and values of 30 layers, 3 KV heads and 64 tokens, of 64 channels in bfloat16."""
    found = kvjax.method(method)
    sizes = CacheSizes(what_buys.of_the_board(), "bfloat16", 64, [found])
    assert what_buys.far_bytes(sizes.cache(found)) == far


def test_bytes_without_codes_are_those_that_the_board_measured():
    """Of methods that evict or merge alone: shapes of a float32 cache and of a bfloat16 one differ little."""
    sizes, compared = what_buys.DATA.read()["sizes"], set()
    for line in board.at_1024():
        method = kvjax.method(line["sentence"])
        if line["sentence"] in sizes and not (method.store or method.read or method.make or method.host):
            assert sizes[line["sentence"]][0] == pytest.approx(line["kept"], abs=0.02), line["method"]
            compared.add(line["method"])
    assert len(compared) > 40 and {"fastgen", "simlayerkv", "dbudgetkv"} <= compared
