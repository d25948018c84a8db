"""Families as they are used, in rows of unequal lengths, two turns and steps.

They compute what one pass computes, and methods act on the layers that keep every token.
"""

import functools
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.models.hf import load_hf
from kvjax.models.mixers.attention import mixer_of
from tests.models import hf_fixtures
from tests.models.hf_fixtures import BAR
from tests.sweep import sweep

# The hardest checkpoint of every family whose layers are not all of one kind.
FAMILIES = (
    "gpt_oss", "olmo3", "qwen3_next_pattern", "gemma3_nested", "smollm3_windows", "exaone4", "ministral3",
    "qwen3_5_text", "minimax_m2", "glm4_moe",
    "glm4_moe_lite",
    "granitemoehybrid", "gemma4_text", "gemma4_experts", "llama4_text", "cohere2", "jamba", "bamba",
    "nemotron_h", "lfm2_moe", "glm_moe_dsa_picks", "deepseek_v32_picks", "gemma3n_text",
    "falcon_h1",
)  # fmt: skip
# Keys that are computed from values in each step cannot be ranked there.
REFUSED = {("gemma4_experts", "quest(budget=16)"): "the model stores factors"}
ROWS = np.random.default_rng(3).integers(0, 80, (3, 40)).astype(np.int32)
FIRST, SECOND = np.array([23, 9, 17]), np.array([5, 12, 1])


@functools.cache
def loaded(name):
    """(model, logits [3, 40, V] of every token in one pass, which are transformers' by test_hf.py)."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_hf(hf_fixtures.write(hf_fixtures.read(name), Path(folder)))
    return model, np.asarray(model(ROWS))


def at(logits, lengths):
    return logits[np.arange(3), lengths - 1]


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(FAMILIES, "gpt_oss"))
def test_two_turns_of_unequal_rows_and_steps_compute_what_one_pass_does(name):
    model, whole = loaded(name)
    bar = BAR * np.abs(whole).max()
    logits, cache = kvjax.prefill(model, ROWS[:, : max(FIRST)], lengths=FIRST, room=20)
    np.testing.assert_allclose(logits, at(whole, FIRST), atol=bar, rtol=0)
    rest = np.stack([row[n : n + max(SECOND)] for row, n in zip(ROWS, FIRST, strict=True)])
    logits, cache = kvjax.prefill(model, rest, lengths=SECOND, cache=cache)
    read = FIRST + SECOND
    np.testing.assert_allclose(logits, at(whole, read), atol=bar, rtol=0)
    for _ in range(3):
        logits, cache = kvjax.step(model, cache, ROWS[np.arange(3), read])
        read = read + 1
        np.testing.assert_allclose(logits, at(whole, read), atol=bar, rtol=0)


# method -> how many of 40 tokens every KV head keeps; None: all.
METHODS = {"snapkv(budget=0.5, window=4)": 20, "h2o(budget=0.25)": 10, "int8": None, "quest(budget=16)": None}


@pytest.mark.parametrize(
    ("name", "method"), sweep(list(product(FAMILIES, METHODS)), ("gpt_oss", next(iter(METHODS))))
)
def test_a_method_acts_on_the_layers_that_keep_every_token(name, method):
    model, _ = loaded(name)
    config, tokens = model.config, ROWS.shape[1]
    if (name, method) in REFUSED:
        with pytest.raises(InputError, match=REFUSED[name, method]):
            kvjax.prefill(model, ROWS, method=method, room=8)
        return
    _, cache = kvjax.prefill(model, ROWS, method=method, room=8)
    for i, pos in enumerate(kvjax.kept_positions(cache)):
        window, mixer = config.window(i), mixer_of(config, i)
        if mixer.slots(config) is None or "slots" in mixer.takes:
            assert pos.shape[1:] == (0, 0)
        elif window is not None:
            # Its window is what a layer keeps at most, with and without a method.
            newest = set(range(tokens - window, tokens))
            assert all(newest >= set(head[head >= 0]) for row in pos for head in row)
            assert all(len(set(head[head >= 0])) >= window - 1 for row in pos for head in row)
        else:
            kept = METHODS[method] or tokens
            np.testing.assert_array_equal((pos >= 0).sum(-1), kept)
    logits, _ = kvjax.step(model, cache, ROWS[:, 0])
    assert np.isfinite(np.asarray(logits)).all()
