"""Small programs that tests run in numpy give the bits, dtype and weakness of those that XLA compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.small_programs import MOST_RUNS

# Zeros of both signs, subnormal, huge and infinite numbers, and none at all.
FLOATS = np.array([[0.0, -0.0, 1e-40, 1.5], [-2.5, 3e38, np.inf, np.nan], [7.0, 1 / 3, -1e-30, 100.25]], "f4")
TAME = np.array([[0.5, -0.25, 1.5, 3.0], [-2.5, 3e38, 17.0, 1e-30], [7.0, 1 / 3, -1e-30, 99.75]], "f4")
WHOLE = np.array([[0, -1, 2**31 - 1, -(2**31)], [7, 8, 255, 256], [3, 1, 31, 30]], "i4")
BYTES = WHOLE.astype("u1")
TRUE = WHOLE % 2 == 1
ARRAYS = {"floats": FLOATS, "tame": TAME, "whole": WHOLE, "bytes": BYTES, "true": TRUE}
ONE = {
    "abs": jnp.abs,
    "negative": jnp.negative,
    "transposed": jnp.transpose,
    "flat": jnp.ravel,
    "row": lambda x: x[1],
    "last column": lambda x: x[:, -1],
    "beyond the end": lambda x: jax.lax.dynamic_slice(x, (2, 3), (2, 2)),
    "every other": lambda x: x[::2, ::-1],
    "a new axis": lambda x: x[:, None],
    "repeated": lambda x: jnp.broadcast_to(x, (2, 3, 4)),
    "padded": lambda x: jnp.pad(x, ((1, 0), (0, 2))),
    "joined": lambda x: jnp.concatenate([x, x], 1),
    "stacked": lambda x: jnp.stack([x, x], 1),
    "parts": lambda x: jnp.split(x, 2, 1),
    "rows": lambda x: [*x],
    "largest": jnp.max,
    "largest of a row": lambda x: jnp.max(x, 1),
    "where it is": lambda x: jnp.argmax(x, 1),
    "any": lambda x: jnp.any(x, 0),
    "sum": lambda x: jnp.sum(x, 1),
    "as float32": lambda x: x.astype("float32"),
    "as bfloat16": lambda x: x.astype(jnp.bfloat16),
    "as int8": lambda x: x.astype("int8"),
    "as uint32": lambda x: x.astype("uint32"),
    "as bool": lambda x: x.astype(bool),
    "above one": lambda x: x > 1,
    "between": lambda x: jnp.clip(x, 0, 1),
    "zeros": jnp.zeros_like,
    "bfloat16 and back": lambda x: x.astype(jnp.bfloat16)[1].astype("float32"),
}
TWO = {
    "add": lambda x: x + x[::-1],
    "subtract": lambda x: x - x[::-1],
    "multiply": lambda x: x * x[::-1],
    "divide": lambda x: x / x[::-1],
    "equal": lambda x: x == x[::-1],
    "less": lambda x: x <= x[::-1],
    "larger": lambda x: jnp.maximum(x, x[::-1]),
    "smaller": lambda x: jnp.minimum(x, x[::-1]),
    "either": lambda x: jnp.where(x > x[::-1], x, x[::-1]),
    "weak": lambda x: x[1] * jnp.asarray(2),
}
BITS = {
    "and": lambda x: x & x[::-1],
    "or": lambda x: x | 3,
    "exclusive or": lambda x: x ^ x[::-1],
    "not": lambda x: ~x,
    "left": lambda x: x << 3,
    "right": lambda x: x >> x.dtype.type(2),
}
# Strict promotion refuses them.
REFUSED = {
    ("above one", "true"),
    ("weak", "true"),
    ("subtract", "true"),
    ("negative", "true"),
    ("divide", "true"),
    ("between", "true"),
}


def bits(x):
    return np.asarray(x).tobytes(), x.dtype, x.shape, x.weak_type


@pytest.mark.parametrize("kind", ARRAYS)
def test_the_bits_are_those_of_a_compiled_program(kind):
    cases = {**ONE, **TWO, **(BITS if kind in ("whole", "bytes") else {})}
    cases = {name: by for name, by in cases.items() if (name, kind) not in REFUSED}
    x = jax.device_put(ARRAYS[kind])
    compiled = jax.jit(lambda x: {name: by(x) for name, by in cases.items()}).lower(x).compile()
    for name, wanted in compiled(x).items():
        assert jax.tree.map(bits, cases[name](x)) == jax.tree.map(bits, wanted), name


def test_a_result_shares_no_memory_and_is_free_to_move(monkeypatch):
    x = jax.device_put(np.zeros((64, 64), np.float32))
    y = x.reshape(-1)
    assert y.unsafe_buffer_pointer() != x.unsafe_buffer_pointer() and not y.committed
    there = jax.device_put(x, jax.devices()[1])
    assert (there + y.reshape(64, 64)).device == jax.devices()[1]


@pytest.fixture
def compiled():
    """Yield the programs that are compiled from here on."""
    found = []

    def count(event, duration, fun_name="", **how):
        if event.endswith("backend_compile_duration"):
            found.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(count)
    yield found
    jax.monitoring.unregister_event_duration_listener(count)


def test_a_program_that_runs_often_is_compiled(compiled):
    x = jax.device_put(np.zeros((3, 5, 7), np.float32))
    for _ in range(MOST_RUNS):
        x.transpose(2, 0, 1)
    assert compiled == []
    x.transpose(2, 0, 1), x.transpose(2, 0, 1)
    assert len(compiled) == 1


def test_operations_on_ordinary_numbers_need_no_program(compiled):
    x = jax.device_put(np.arange(24, dtype=np.float32).reshape(2, 3, 4) + 1)
    y = jnp.where(x[1, ::2, None] > 3.0, -x[0, :1], x.astype(jnp.bfloat16)[0, 1].astype("float32") / 2)
    jnp.pad(jnp.concatenate([y, y + 1.5], 1), ((0, 0), (1, 0), (0, 0))).reshape(-1)[jnp.argmax(y[0, 0])]
    assert compiled == []


def test_programs_for_nan_searched_donated_and_deleted_arrays_are_compiled(compiled):
    x = jax.device_put(np.full((3, 2, 5), np.nan, np.float32))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        x.reshape(2, 15)
    y = jax.jit(lambda x: x.reshape(5, 6), donate_argnums=0)(jax.device_put(np.ones((6, 5), np.float32)))
    y.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        y.reshape(30)
    assert len(compiled) >= 2
