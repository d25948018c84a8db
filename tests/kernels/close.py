"""Compares results of kernels, and runs the interpreter that detects races."""

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from tests.ops.oracles import rms


def check(got, want, bar):
    """Check equal infinities, no NaN, and a relative RMS below `bar`, result by result."""
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_array_equal(np.isneginf(x), np.isneginf(y))
        finite = np.isfinite(y)
        assert np.isfinite(x[finite]).all() and rms(x[finite], y[finite]) < bar


def with_races(call, dma):
    """(results, whether the interpreter saw a race) of call(mode), with copies that take their time."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as machine

    mode = pltpu.InterpretParams(detect_races=True, dma_execution_mode=dma)
    try:
        return [np.asarray(x, np.float64) for x in call(mode)], machine.races.races_found
    except jax.errors.JaxRuntimeError as error:
        # Later releases raise an error at a race instead of recording it.
        if "RACE DETECTED" not in str(error):
            raise
        return [], True
    finally:
        pltpu.reset_tpu_interpret_mode_state()
