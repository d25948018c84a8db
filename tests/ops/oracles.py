"""Stored float64 results of the ops, and how far a result is from them."""

from pathlib import Path

import numpy as np

ORACLES = Path(__file__).parents[1] / "fixtures" / "oracles"
# Outputs whose names do not say that they are outputs.
MORE_OUTPUTS = {
    "kda_gate": {"g"},
    "hgrn2": {"g"},
    "deltaformer": {"u"},
    "dmc": {"slots"},
    "log_linear_attn": {"level_table"},
    "mla": {"cache_latent", "cache_rope"},
    "tpa": {"b_k_rotated"},
    "transformer_vq": {"shortcodes"},
}


def oracle(name):
    """Read (inputs, expected outputs) of a file; its results are float64, stored as float32."""
    with np.load(ORACLES / f"{name}.npz") as file:
        arrays = {n: file[n] for n in file.files if n != "meta"}
    more = MORE_OUTPUTS.get(name, set())
    want = {n: x for n, x in arrays.items() if n == "o" or n.startswith(("o_", "final_", "g_")) or n in more}
    return {n: x for n, x in arrays.items() if n not in want}, want


def rms(got, want):
    """Root of the mean squared difference, relative to that of `want`."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
