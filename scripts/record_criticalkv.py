"""Records what CriticalKV's authors' code keeps: tests/fixtures/authors/criticalkv.npz.

    python scripts/record_criticalkv.py CHECKOUT

CHECKOUT is a clone of github.com/FFY0/DefensiveKV; it needs torch and transformers. Its presses are loaded
from their files, without the package, whose other presses need kernels. They average over a group and smooth
by the mean, which is `variant="kvpress"`. SnapKV's press gives its window the largest attention of all, here
more than that: where the first stage has fewer slots than the window, equal scores would decide otherwise
which of them it takes, and norms of values which of the others stay.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.methods import recorded

WINDOW, KERNEL = 8, 5


def load(checkout: Path) -> tuple[Any, Any]:
    """The class of SnapKV's press, and the file of CriticalKV's."""
    for package in ("kvpress", "kvpress.presses"):
        sys.modules[package] = empty = ModuleType(package)
        empty.__path__ = [str(checkout / package.replace(".", "/"))]
    snap = importlib.import_module("kvpress.presses.snapkv_press").SnapKVPress

    class Staying(snap):
        def score(self, *args: Any) -> torch.Tensor:
            scores = super().score(*args)
            scores[..., -self.window_size :] = torch.inf
            return scores

    return Staying, importlib.import_module("kvpress.presses.criticalkv_press")


def kept(presses: tuple[Any, Any], budget: float, across_heads: bool, row: int, layer: int) -> np.ndarray:
    """Which tokens [K, T] the press keeps of a row."""
    prompt, config = recorded.prompt(row), recorded.model().config
    snap = presses[0](compression_ratio=1 - budget, window_size=WINDOW, kernel_size=KERNEL)
    sizes = {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads}
    sizes |= {"head_dim": config.head_dim, "hidden_size": config.d_model}
    module = SimpleNamespace(
        config=SimpleNamespace(**sizes, _attn_implementation="sdpa"),
        head_dim=config.head_dim,
        num_key_value_groups=prompt.group,
        o_proj=SimpleNamespace(weight=torch.tensor(recorded.output_matrix(layer).T)),
    )
    k, v, p = (torch.tensor(x[layer])[None] for x in (prompt.k, prompt.v, prompt.p))
    if across_heads:
        presses[1].CriticalAdaKVPress(snap).compress(module, None, k, v, p, {})
        stay = np.ones((config.kv_heads, prompt.length), bool)
        _, heads, slots = module.masked_key_indices
        stay[heads.numpy(), slots.numpy()] = False
        return stay
    scores = presses[1].CriticalKVPress(snap).score(module, None, k, v, p, {})
    best = scores.topk(int(prompt.length * budget), dim=-1).indices[0].numpy()
    return np.stack([np.isin(np.arange(prompt.length), head) for head in best])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout
    presses, cases = load(checkout), []
    for budget, across in itertools.product((0.25, 0.75), (False, True)):
        rows = {
            row: [kept(presses, budget, across, row, i) for i in range(recorded.model().config.layers)]
            for row in range(len(recorded.LENGTHS))
        }
        hyper = dict(budget=budget, window=WINDOW, kernel=KERNEL, variant="kvpress", page=4)
        hyper |= {"across_heads": True} if across else {}
        cases.append(recorded.Case("criticalkv", hyper, rows))
    recorded.write("criticalkv", recorded.commit_of(checkout), cases)


if __name__ == "__main__":
    main()
