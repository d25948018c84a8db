"""Records what CItruS's authors' code keeps: tests/fixtures/authors/citrus.npz.

    python scripts/record_citrus.py CHECKOUT

CHECKOUT is a clone of github.com/ybai-nlp/CItruS; it needs torch and tqdm. Its `instruction_aware_single` is
given a seeded prompt: the text, then the instruction as the chunk that stays and as what is asked.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.methods import recorded

QUESTION = 8


def load(checkout: Path) -> ModuleType:
    """The authors' file without what it does to models."""
    for name in ("llama", "mistral"):
        module: Any = ModuleType(f"convert_models.modify_{name}")
        setattr(module, f"enable_{name}_pos_shift_attention", None)
        sys.modules[module.__name__] = module
    sys.modules["convert_models"] = ModuleType("convert_models")
    sys.path.insert(0, str(checkout / "src"))
    return importlib.import_module("citrus_methods")


def kept(authors: ModuleType, budget: float, row: int) -> list[np.ndarray]:
    """Per layer, which tokens [K, T] the authors' code keeps of a row."""
    prompt, config = recorded.prompt(row), recorded.model().config
    context, at = prompt.length - QUESTION, torch.arange(prompt.length)
    slots = int(prompt.length * budget)
    held = tuple((at[None, None, :, None],) * 2 for _ in prompt.p)
    out = SimpleNamespace(
        attentions=[torch.tensor(p)[None] for p in prompt.p],
        past_key_values=held,
        logits=torch.zeros(1, 1, 1),
    )
    text, asked = torch.zeros(1, context, dtype=torch.long), torch.zeros(1, QUESTION, dtype=torch.long)
    stay, _ = authors.get_past_key_values_instruction_aware_single(
        text, asked, asked, lambda *args, **kwargs: out, k=slots - QUESTION
    )
    layers = [np.isin(at.numpy(), keys[0, 0, :, 0].numpy()) for keys, _ in stay]
    assert all(layer.sum() == slots for layer in layers)
    return [np.tile(layer, (config.kv_heads, 1)) for layer in layers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout
    authors, cases = load(checkout), []
    for budget in (0.25, 0.75):
        rows = {row: kept(authors, budget, row) for row in range(len(recorded.LENGTHS))}
        cases.append(recorded.Case("citrus", dict(budget=budget, question=QUESTION), rows))
    recorded.write("citrus", recorded.commit_of(checkout), cases)


if __name__ == "__main__":
    main()
