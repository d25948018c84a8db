"""Checks, by tracing a score without data, that it declares all its inputs in `needs` and `traces`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.base.errors import InputError
from kvjax.grammar import Keep
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import AttentionSpec, Inputs, Observed, Score, View
from kvjax.keep.algebra import Made
from kvjax.keep.observations.observe import Mass
from kvjax.ops.base.rope import Rope

_T, _H = 32, 16


class _Undeclared(InputError):
    pass


class _Declared(dict):
    """The inputs that a score may use, by name; other names raise an error that lists them."""

    def __init__(self, known: dict[str, Any], refusal: Callable[[str], str]):
        super().__init__(known)
        self.refusal = refusal

    def __missing__(self, name: str) -> Any:
        raise _Undeclared(self.refusal(name))


@lru_cache(maxsize=256)
def _trace(score: Score, probe: Any) -> None:
    named: Score = score
    while isinstance(named, Made):
        named = named.parts[0]
    name = type(named).__name__

    def go(x: jax.Array) -> jax.Array:
        q, k = jnp.broadcast_to(x, (1, 2, _T, _H)), jnp.broadcast_to(x, (1, 1, _T, _H))
        pos, length = jnp.arange(_T, dtype=jnp.int32), jnp.full((1,), _T, jnp.int32)
        inputs = Inputs(q, q, k, jnp.broadcast_to(x, (1, _T, _H)), pos[None], length)
        found = {key_of(o): k[..., 0] if isinstance(o, Mass) else o(inputs) for o in score.needs}
        found |= {} if probe is None else {key_of(probe): k[..., 0]}
        observed = _Declared(
            found,
            lambda o: (
                f"{name} looks at {o}, which its `needs` does not name: add a property `needs` that "
                f"returns frozenset({{{o}}})"
            ),
        )
        traces = _Declared(
            {key_of(trace): k[..., 0] for trace in score.traces},
            lambda t: (
                f"{name} looks at view.of({t}), which its `traces` does not name: add a property "
                f"`traces` that returns frozenset({{{t}}})"
            ),
        )
        view = View(k, k, pos[None, None], None, traces)
        return score(view, Observed(observed, None, length, length // 2, 0, AttentionSpec(1.0, None, Rope())))

    try:
        jax.eval_shape(go, jax.ShapeDtypeStruct((), jnp.float32))
    except _Undeclared:
        raise
    except Exception:
        return  # it expects other sizes; if it is wrong, the error shows when it runs


def check_declared(keep: Keep | None) -> None:
    """Raise InputError if a keep's score uses an observation or a trace that it does not declare.

    >>> from kvjax.methods import snapkv
    >>> check_declared(snapkv(0.5).keep)
    """
    if keep is not None and keep.score is not None:
        _trace(keep.score, keep.probe)
