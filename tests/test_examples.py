"""The examples of docs/examples run, and compute what they say."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import AttentionSpec, Seen, View
from kvjax.keep.select import top
from kvjax.methods.parse import parse_method
from kvjax.methods.user import from_file
from kvjax.ops.rope import Rope
from tests.methods.battery import MAIN, model, positions, prompt_of
from tests.methods.table import count
from tests.reference import best

ROOT = Path(__file__).parents[1]
KEYDIFF = ROOT / "docs" / "examples" / "keydiff.py"
ORACLE = Path(__file__).parent / "fixtures" / "kvpress_tiny_llama.npz"


def distinctness(keys):
    """KeyDiff's equation in float64, keys [..., T, H]."""
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    mean = unit.mean(-2, keepdims=True)
    return -(unit * mean).sum(-1) / np.linalg.norm(mean, axis=-1)


def test_keydiff_keeps_the_most_distinct_keys_of_every_head():
    method = from_file(f"{KEYDIFF}:keydiff", budget=0.5)
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=8)
    kept = positions(cache)
    for row, tokens in enumerate(MAIN.first):
        for layer, keys in enumerate(prompt_of("4/2", "main", row).k):
            want = best(distinctness(keys), [count(len(tokens))] * len(keys))
            assert kept[layer][row] == [set(np.flatnonzero(head).tolist()) for head in want]


def test_keydiff_chains_with_a_store_from_one_text():
    label, build = parse_method(f"{KEYDIFF}:keydiff + int8")
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=build(0.5), room=8)
    plain = kvjax.prefill(model("4/2"), MAIN.first, method=parse_method(f"{KEYDIFF}:keydiff")[1](0.5), room=8)
    assert positions(cache) == positions(plain[1])
    assert kvjax.nbytes(cache) < kvjax.nbytes(plain[1])
    assert label.endswith("keydiff.py:keydiff + int8")


@pytest.mark.skipif(not ORACLE.is_file(), reason="no fixture of kvpress's scores")
def test_keydiff_scores_equal_those_of_kvpress():
    with np.load(ORACLE) as file:
        if "keydiff/scores" not in file:
            pytest.skip("the fixture has no KeyDiff")
        keys, scores, kept = (file[name] for name in ("ref/keys", "keydiff/scores", "keydiff/keep"))
    keep = from_file(f"{KEYDIFF}:keydiff", budget=0.5).keep
    for k, want, mask in zip(keys, scores, kept, strict=True):
        pos = jnp.broadcast_to(jnp.arange(k.shape[2], dtype=jnp.int32), k.shape[:3])
        length = jnp.full(k.shape[:1], k.shape[2])
        seen = Seen({}, None, length, length // 2, 0, AttentionSpec(1.0, None, Rope()))
        score = keep.score(View(jnp.asarray(k), jnp.asarray(k), pos, None, {}), seen)
        np.testing.assert_allclose(score, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
        np.testing.assert_array_equal(top(score, jnp.full(k.shape[:2], k.shape[2] // 2)), mask)


def test_contributing_shows_the_example_as_it_is():
    code = KEYDIFF.read_text().partition('"""\n\n')[2]
    assert code and code in (ROOT / "CONTRIBUTING.md").read_text()
