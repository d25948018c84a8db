"""The GPU kernel of paged decoding: in the interpreter against the equation, and lowered for CUDA on a CPU.

Everything that must not be read is no number, as in `test_paged_decode.py`.
"""

import jax
import jax.numpy as jnp
import pytest

from kvjax.ops.page_pool import make_pool
from kvjax.ops.paged_decode import paged_decode
from kvjax.ops.paged_decode_gpu import gpu_paged_decode
from tests.kernels.close import check
from tests.kernels.test_paged_decode import CASES, by_hand, draw, split

MORE = {
    "64 wide": dict(width=64),
    "80 wide": dict(width=80, rows=("pos",)),
    "96 wide in int8": dict(width=96, rows=("key_scale", "value_scale"), page=32, pages=4, dtype=jnp.int8),
    "192 wide": dict(width=192, dtype=jnp.bfloat16),
    "pages of 24": dict(page=24, pages=5),
}


@pytest.mark.parametrize("programs", [9, 1000])
@pytest.mark.parametrize("case", CASES | MORE)
def test_the_kernel_is_the_equation(case, programs):
    drawn, options = split(case) if case in CASES else (MORE[case], dict(scale=0.09))
    inputs = draw(1, **drawn)
    at = jnp.asarray(1, jnp.int32)
    how = dict(window=None, softcap=None) | options
    call = jax.jit(lambda *x: gpu_paged_decode(*x, at, mass=True, programs=programs, interpret=True, **how))
    bar = 1e-2 if drawn.get("dtype") == jnp.bfloat16 else 2e-6
    check(call(*inputs), by_hand(*inputs, **options), bar)
