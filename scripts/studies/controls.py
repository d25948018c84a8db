"""Control methods of no paper that explain a method's score, for the surprises of docs/claims.md.

kvjax compare --methods random scripts/studies/controls.py:random_alike --protocol agnostic
kvjax compare --methods snapkv 'scripts/studies/controls.py:snapkv_layer:layer=1' --protocol agnostic
"""

from __future__ import annotations

import dataclasses

import kvjax
from kvjax.grammar import Budget, Keep, Method
from kvjax.keep.budgets.budget import PerLayer, Uniform
from kvjax.keep.budgets.layer_budgets import MeanOverHeads
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.score import RandomScore, WindowAttention
from kvjax.methods.shared import window_score


def random_alike(budget: float) -> Method:
    """Random eviction in which all heads of a layer evict the same tokens, as in TOVA."""
    return Method(Keep(MeanOverHeads(RandomScore(0)), Budget(budget), Uniform()))


def tova_apart(budget: float) -> Method:
    """TOVA's score at the end of a prompt, with an own selection per head."""
    return Method(Keep(WindowAttention(1, hide_window=False), Budget(budget), Uniform()))


def tova_longer(budget: float, window: int = 16) -> Method:
    """TOVA at the end of a prompt, scored by several of the last queries instead of the last one."""
    return Method(Keep(WindowAttention(window, heads="layer"), Budget(budget), Uniform(), (Recent(window),)))


def snapkv_layer(budget: float, layer: int = 0) -> Method:
    """SnapKV on four layers, of which one has 1.9 times the mean budget, and the others 0.7 times."""
    shares = tuple(1.9 if i == layer else 0.7 for i in range(4))
    score = window_score(16, 5, "grouped")
    return Method(Keep(score, Budget(budget), PerLayer(shares), (Recent(16),)))


def turned_round(budget: float, of: str = "q-filters") -> Method:
    """Make a method evict the slots it would keep, and keep those it would evict; protected slots stay."""
    return _turned(kvjax.method(of, budget=budget))


def equal_layers(budget: float, of: str = "kv-compress") -> Method:
    """Make a method give all its KV heads the same number of slots, selected by its own score."""
    method = kvjax.method(of, budget=budget)
    return dataclasses.replace(method, keep=dataclasses.replace(method.keep, allocate=Uniform()))


def newest_kept(budget: float, of: str = "curdkv", tokens: int = 32) -> Method:
    """Make a method also protect the newest tokens, and so the question at the end of a prompt."""
    method = kvjax.method(of, budget=budget)
    protect = (*method.keep.protect, Recent(tokens))
    return dataclasses.replace(method, keep=dataclasses.replace(method.keep, protect=protect))


def without_merge(budget: float, of: str = "d2o") -> Method:
    """Make a method evict the slots it would merge."""
    method = kvjax.method(of, budget=budget)
    return dataclasses.replace(method, keep=dataclasses.replace(method.keep, merge=None))


def large_keys(budget: float) -> Method:
    """Keep the keys with the largest norms, where L2Compress keeps those with the smallest."""
    return _turned(kvjax.method("l2compress", budget=budget, skip_layers=0))


def _turned(method: Method) -> Method:
    return dataclasses.replace(method, keep=dataclasses.replace(method.keep, score=-1.0 * method.keep.score))
