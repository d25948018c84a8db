"""Programs of a few operations that move, compare or count numbers run in numpy and are not compiled.

Without `jax.jit`, JAX compiles a program for every operation on every shape, in 16 ms of a core: most of the
programs of the suite. numpy gives the same bits if no number is rounded twice and none is subnormal, which
XLA for CPUs takes for zero. All else is compiled: numbers on a mesh, gradients of functions, sums of floats.
`tests/test_small_programs.py` compares both. A release of JAX whose insides differ is left as it is.
"""

import functools
from collections import Counter
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax._src import array, pjit
from jax._src.lax import lax
from jax._src.sharding_impls import UnspecifiedValue
from jax.extend.core import Literal

# Longer programs have numbers that are rounded more than once, and a program that runs often is compiled.
MOST_OPERATIONS, MOST_RUNS = 8, 40
KINDS = "biuf"
BFLOAT16 = np.dtype(jax.numpy.bfloat16)


class NotHere(Exception):
    """A program that has to be compiled."""


def lighten():
    """Make JAX run small programs in numpy, and `jnp.asarray` of an array of numpy a `device_put`."""
    if hasattr(lax, "stage_p"):
        lax.stage_p.def_impl(_put)
    if hasattr(pjit, "_pjit_call_impl_python"):
        pjit._pjit_call_impl_python = _lightened(pjit._pjit_call_impl_python)


def _put(x):
    # A copy, because a device_put on a CPU may share the memory of an array that the test changes later.
    return x if isinstance(x, jax.Array) else jax.device_put(np.array(x) if isinstance(x, np.ndarray) else x)


def _lightened(compile_and_run):
    runs = WeakKeyDictionary()

    @functools.wraps(compile_and_run)
    def run(*args, jaxpr, **how):
        runs[jaxpr] = runs.get(jaxpr, 0) + 1
        if runs[jaxpr] <= MOST_RUNS and _alone(how) and _light(jaxpr):
            try:
                found = evaluate(jaxpr, [*map(_array, args, jaxpr.in_avals)], Counter())
                return [*map(_jax, found, jaxpr.out_avals)], None, None, []
            except NotHere:
                runs[jaxpr] = MOST_RUNS
        return compile_and_run(*args, jaxpr=jaxpr, **how)

    return run


def _alone(how):
    """Whether a program may run on any device, keeps its arguments and is not searched for NaN."""
    config, shardings = jax.config, (*how["in_shardings"], *how["out_shardings"])
    searched = config.jax_debug_nans or config.jax_debug_infs or config.jax_default_device is not None
    asked = searched or how["compiler_options_kvs"] or any(how["donated_invars"]) or not how["ctx_mesh"].empty
    return not asked and all(isinstance(x, UnspecifiedValue) for x in shardings)


def _operations(jaxpr):
    for eqn in jaxpr.eqns:
        yield from _operations(eqn.params["jaxpr"]) if eqn.primitive.name == "jit" else [eqn]


def _light(jaxpr):
    operations = [*_operations(jaxpr)]
    small = len(operations) <= MOST_OPERATIONS and not jaxpr.effects and not jaxpr.consts
    return small and all(eqn.primitive.name in OPERATIONS for eqn in operations)


def _array(x, aval):
    """Read the numbers of an argument that lies on the first device because nobody has put it elsewhere."""
    if isinstance(x, jax.Array):
        if not isinstance(x, array.ArrayImpl) or x.is_deleted():
            raise NotHere
        if x._committed or x.device != jax.devices()[0]:
            raise NotHere
    elif not isinstance(x, np.ndarray | np.generic | int | float):
        raise NotHere
    if aval.dtype.kind not in KINDS and aval.dtype != BFLOAT16:
        raise NotHere
    return np.asarray(x, aval.dtype)


def _jax(x, aval):
    if (x.shape, x.dtype) != (aval.shape, aval.dtype):
        raise NotHere
    found = jax.device_put(np.array(x))
    if not aval.weak_type:
        return found
    return array.ArrayImpl(aval, found.sharding, found._arrays, committed=False, _skip_checks=True)


def evaluate(jaxpr, args, rounded):
    """Evaluate a program in numpy; `rounded` counts its operations on floats."""
    known = dict(zip(jaxpr.jaxpr.invars, args, strict=True))

    def value(x):
        return np.asarray(x.val, x.aval.dtype) if isinstance(x, Literal) else known[x]

    for eqn in jaxpr.eqns:
        inputs, name = [value(x) for x in eqn.invars], eqn.primitive.name
        if name == "jit":
            found = evaluate(eqn.params["jaxpr"], inputs, rounded)
        else:
            found = _act(name, inputs, eqn.params)
            found = found if eqn.primitive.multiple_results else [found]
            if name in ROUNDED and np.issubdtype(found[0].dtype, np.inexact):
                rounded["all"] += 1
                constant = any(isinstance(x, Literal) for x in eqn.invars)
                if rounded["all"] > 1 or name == "div" and constant or _nan(*found):
                    raise NotHere
                _normal(*inputs, *found)
        known |= dict(zip(eqn.outvars, found, strict=True))
    return [value(x) for x in jaxpr.jaxpr.outvars]


def _act(name, inputs, how):
    """Run an operation; what numpy refuses or another release of JAX describes otherwise is compiled."""
    try:
        return OPERATIONS[name](*inputs, **how)
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise NotHere from error


def _nan(*numbers):
    return any(np.isnan(x).any() for x in numbers)


def _normal(*numbers):
    """Leaves floats to XLA of which one is subnormal."""
    for x in numbers:
        if x.dtype.kind not in "biu" and np.any((x != 0) & (np.abs(x) < jax.numpy.finfo(x.dtype).tiny)):
            raise NotHere


def _broadcast(x, shape, broadcast_dimensions, sharding):
    ones = [1] * len(shape)
    for axis, length in zip(broadcast_dimensions, x.shape, strict=True):
        ones[axis] = length
    return np.broadcast_to(x.reshape(ones), shape)


def _convert(x, new_dtype, weak_type, sharding):
    new = np.dtype(new_dtype)
    if new.kind not in KINDS and new != BFLOAT16:
        raise NotHere
    if new == x.dtype or x.dtype.kind == "b":
        return x.astype(new)
    if x.dtype.kind in "iu":
        # bfloat16 of a whole number may be rounded twice.
        if new == BFLOAT16:
            raise NotHere
        return x.astype(new)
    if _nan(x) or new.kind in "iu" and np.any((x < 0) | (x > 100)) or new.kind == "b":
        raise NotHere
    with np.errstate(over="ignore"):
        found = x.astype(new)
    _normal(x, found)
    return found


def _dynamic_slice(x, *starts, slice_sizes):
    at = (
        np.clip(start, 0, length - size)
        for start, size, length in zip(starts, slice_sizes, x.shape, strict=True)
    )
    return x[tuple(slice(i, i + size) for i, size in zip(at, slice_sizes, strict=True))]


def _slice(x, start_indices, limit_indices, strides):
    strides = strides or [None] * x.ndim
    return x[tuple(slice(*ends) for ends in zip(start_indices, limit_indices, strides, strict=True))]


def _iota(dtype, shape, dimension, sharding):
    return _broadcast(np.arange(shape[dimension]).astype(dtype), shape, (dimension,), None)


def _select(which, *cases):
    which = np.broadcast_to(which, cases[0].shape)
    return (
        np.choose(which.astype(int), cases).astype(cases[0].dtype)
        if len(cases) > 2
        else np.where(which, *cases[::-1])
    )


def _pad(x, value, padding_config):
    if any(low < 0 or high < 0 or inside for low, high, inside in padding_config):
        raise NotHere
    return np.pad(x, [ends[:2] for ends in padding_config], constant_values=value)


def _split(x, sizes, axis):
    return np.split(x, np.cumsum(sizes)[:-1], axis)


def _bits(x, new_dtype):
    new = np.dtype(new_dtype)
    if new.itemsize != x.dtype.itemsize or new.kind not in KINDS:
        raise NotHere
    return np.ascontiguousarray(x).view(new).reshape(x.shape)


def _exact(by):
    """Make an operation that rounds nothing."""

    def act(*inputs, **how):
        _normal(*inputs)
        return by(*inputs, **how)

    return act


def _whole(by):
    """Make an operation on whole numbers and truth values alone: in floats, zeros have signs and NaN bits."""

    def act(*inputs, **how):
        if any(x.dtype.kind not in "biu" for x in inputs):
            raise NotHere
        return by(*inputs, **how)

    return act


def _arithmetic(by):
    def act(x, y, out_dtype=None):
        if out_dtype is not None or not all(
            z.dtype.kind in "biu" or z.dtype in (np.float32, np.float64) for z in (x, y)
        ):
            raise NotHere
        with np.errstate(all="ignore"):
            return by(x, y)

    return act


def _divide(x, y):
    if x.dtype.kind != "f":
        raise NotHere
    return np.divide(x, y)


def _extreme(by):
    """Take the larger or the smaller: of NaN and of zeros of two signs, XLA may take another one."""

    def act(*inputs, **how):
        found = by(*inputs, **how)
        if found.dtype.kind not in "biu" and (_nan(*inputs) or np.any(found == 0)):
            raise NotHere
        return found

    return _exact(act)


def _reduced(by):
    return lambda x, axes, out_sharding=None: by.reduce(x, tuple(axes), dtype=x.dtype)


def _argmax(x, axes, index_dtype):
    if len(axes) > 1 or _nan(x):
        raise NotHere
    return np.argmax(x, axes[0]).astype(index_dtype)


def _shifted(by):
    def shift(x, y):
        if x.dtype.kind != "u" or np.any(y >= 8 * x.dtype.itemsize):
            raise NotHere
        return by(x, y)

    return shift


ROUNDED = ("add", "sub", "mul", "div")
OPERATIONS = {
    "add": _arithmetic(np.add),
    "abs": _exact(np.abs),
    "and": _whole(np.bitwise_and),
    "argmax": _exact(_argmax),
    "bitcast_convert_type": _bits,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "convert_element_type": _convert,
    "div": _arithmetic(_divide),
    "dynamic_slice": _dynamic_slice,
    "eq": _exact(np.equal),
    "ge": _exact(np.greater_equal),
    "gt": _exact(np.greater),
    "iota": _iota,
    "le": _exact(np.less_equal),
    "lt": _exact(np.less),
    "max": _extreme(np.maximum),
    "min": _extreme(np.minimum),
    "mul": _arithmetic(np.multiply),
    "ne": _exact(np.not_equal),
    "neg": _exact(np.negative),
    "not": _whole(np.invert),
    "or": _whole(np.bitwise_or),
    "pad": _pad,
    "reduce_and": _whole(_reduced(np.bitwise_and)),
    "reduce_max": _extreme(_reduced(np.maximum)),
    "reduce_min": _extreme(_reduced(np.minimum)),
    "reduce_or": _whole(_reduced(np.bitwise_or)),
    "reduce_sum": _whole(_reduced(np.add)),
    "reshape": lambda x, new_sizes, dimensions, sharding: x.reshape(new_sizes),
    "rev": lambda x, dimensions: np.flip(x, dimensions),
    "select_n": _select,
    "shift_left": _shifted(np.left_shift),
    "shift_right_logical": _shifted(np.right_shift),
    "slice": _slice,
    "split": _split,
    "squeeze": lambda x, dimensions: x.squeeze(dimensions),
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "sub": _arithmetic(np.subtract),
    "transpose": lambda x, permutation: x.transpose(permutation),
    "unstack": lambda x, axis: [*np.moveaxis(x, axis, 0)],
    "xor": _whole(np.bitwise_xor),
}
