"""What codes make of tokens, observed when they come."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.grammar.kinds import Inputs
from kvjax.keep.observations.code_error import CodeError
from kvjax.store.affine import Affine
from tests.float64.codes import affine, faithful


def test_the_error_is_that_of_what_comes_back_of_keys_and_values(rng):
    k, v = rng.normal(size=(2, 2, 3, 5, 16))
    k[0, 1] *= 100
    inputs = [jnp.asarray(x, jnp.float32) for x in (k, v)]
    seen = Inputs(None, None, None, None, None, None, k=inputs[0], v=inputs[1])
    got = CodeError(Affine(2))(seen)
    want = 1 - faithful(affine(2, 16), k, v)
    np.testing.assert_allclose(got, want, atol=2e-3)
    nothing = CodeError(Affine(2))(seen._replace(k=0 * inputs[0], v=None))
    assert not np.asarray(nothing).any()
    with pytest.raises(ValueError, match="encodes 8 together: use Affine"):
        CodeError(Affine(2, axis="channel", group=8))
