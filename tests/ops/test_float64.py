"""Operations on float64 numbers, with jax told to keep these: nothing is rounded to float32 on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.base.rope import Rope, angles, rotate
from tests.ops.oracles import oracle
from tests.parity.ops_table import OPS
from tests.sweep import sweep


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(OPS, "mla", "tpa"))
def test_float64_results_are_those_that_are_stored(name):
    inputs, want = oracle(name)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, np.float64 if x.dtype.kind == "f" else None), inputs)
        for form in [{}] if name == "tpa" else [{"recurrent": False}, {"recurrent": True}]:
            got = jax.jit(lambda x, form=form: OPS[name](x, **form))(wide)
            for key, x in want.items():
                # What is stored was rounded to float32: 2^-24 of a number.
                np.testing.assert_allclose(
                    np.asarray(got[key]), x, rtol=6.1e-8, atol=1e-8 * np.abs(x).max(), err_msg=f"{key} {form}"
                )


def test_rotations_of_float64_are_those_of_numpy(rng):
    x, pos = rng.normal(size=(5, 16)), np.array([0, 1, 77, 4096, 100_003])
    rope = Rope(theta=1e4)
    with jax.enable_x64(True):
        cos, sin = angles(rope, jnp.asarray(pos, jnp.int32), 16, dtype=np.float64)
        got = np.asarray(rotate(jnp.asarray(x), cos, sin))
    angle = pos[:, None] * 1e4 ** (-np.arange(8) / 8)
    turn = (x[:, :8] + 1j * x[:, 8:]) * np.exp(1j * angle)
    np.testing.assert_allclose(got, np.concatenate([turn.real, turn.imag], -1), atol=1e-11)
