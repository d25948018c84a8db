"""Records what FINCH's authors' code keeps, and kvpress's press: tests/fixtures/authors/finch*.npz.

    python scripts/record_finch.py CHECKOUT

CHECKOUT is a clone of github.com/giulio98/context-compression; it needs torch and kvpress. The authors choose
in the middle of `generate`: here, its model gives the attention of a seeded prompt, its cache notes which
tokens it is told to keep, and what its file imports from an older transformers stands for nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.methods import recorded

QUESTION = 8
# Slots of a budget: the authors keep a whole fraction 1 / f of a context, which gives these for these rows.
BUDGETS = {16: (0, 1, 2, 3), 20: (0, 1, 3)}
FILE = "src/context_compression/models/modeling_mistral.py"


class Nothing:
    """What a file imports and the code that runs does not use."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class Imported(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("is_flash_attn_2_available", "is_flash_attn_greater_or_equal_2_10"):
            return lambda *args: False
        if name == "logging":
            return SimpleNamespace(get_logger=lambda name: None)
        return type(name, (Nothing,), {})


class Noting:
    """A cache that notes which tokens of each layer stay."""

    def __init__(self) -> None:
        self.seen_tokens, self.kept = 0, {}

    def __getitem__(self, layer: int) -> tuple[torch.Tensor]:
        return (torch.zeros(1, 1, recorded.LENGTHS[0], 1),)

    def update_rope(self, layer: int, keys: torch.Tensor, important: torch.Tensor) -> None:
        self.kept[layer] = important[0].numpy()


def load(checkout: Path) -> ModuleType:
    """The authors' file, with `Noting` for its cache and `Imported` modules around it."""
    before = dict(sys.modules)
    names = ["einops", "flash_attn", "flash_attn.flash_attn_interface", "transformers"]
    for name in ("cache_utils", "utils", "models", "models.mistral", "models.mistral.modeling_mistral"):
        names.append(f"transformers.{name}")
    for name in names:
        sys.modules[name] = Imported(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, sys.modules[name])
    spec = importlib.util.spec_from_file_location("authors", checkout / FILE)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ModifiedDynamicCache = Noting
    for name in names:
        del sys.modules[name]
    sys.modules.update(before)
    return module


def kept(authors: ModuleType, slots: int, row: int) -> list[np.ndarray]:
    """Per layer, which tokens [K, T] the authors' `generate` keeps, with the question."""
    prompt, config = recorded.prompt(row), recorded.model().config
    context = prompt.length - QUESTION
    target = next(d for d in range(1, context) if context // -(-context // d) == slots - QUESTION)
    attention = [torch.tensor(p)[None] for p in prompt.p]
    cache, notes = None, []

    def read(past_key_values: Noting, **kwargs: Any) -> SimpleNamespace:
        notes.append(past_key_values)
        return SimpleNamespace(attentions=attention)

    asked = torch.zeros(1, QUESTION, dtype=torch.long)
    text = torch.zeros(1, context, dtype=torch.long)
    itself = SimpleNamespace(
        model=read, split_size=context, target_token=target + QUESTION, mode="attention_score",
        condition="question", normalize=True,
    )  # fmt: skip
    ones = torch.ones_like
    try:
        authors.MistralForCompressedCausalLM.generate(
            itself, SimpleNamespace(log=lambda values: None), asked, ones(asked), asked, ones(asked),
            text, ones(text), max_new_tokens=0,
        )  # fmt: skip
    except TypeError:
        pass  # it goes on to generate, which it cannot here: the choice is made
    (cache,) = notes
    newest = np.arange(prompt.length) >= context
    stay = [newest | np.isin(np.arange(prompt.length), cache.kept[i]) for i in range(config.layers)]
    assert all(one.sum() == slots for one in stay)
    return [np.tile(one, (config.kv_heads, 1)) for one in stay]


def kept_by_kvpress(budget: float, row: int) -> list[np.ndarray]:
    """Per layer, which tokens [K, T] kvpress's press keeps."""
    from kvpress import FinchPress

    prompt, config = recorded.prompt(row), recorded.model().config
    press = FinchPress(compression_ratio=1 - budget)
    press.window_size = QUESTION
    sizes = {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads}
    module: Any = SimpleNamespace(config=SimpleNamespace(**sizes))
    layers = []
    for k, p in zip(prompt.k, prompt.p, strict=True):
        scores: Any = press.score(module, None, torch.tensor(k)[None], None, torch.tensor(p)[None], {})
        best = scores.topk(int(prompt.length * budget), dim=-1).indices[0].numpy()
        layers.append(np.stack([np.isin(np.arange(prompt.length), head) for head in best]))
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout
    authors, cases, others = load(checkout), [], []
    for slots, rows in BUDGETS.items():
        hyper = dict(budget=slots, question=QUESTION)
        cases.append(recorded.Case("finch", hyper, {row: kept(authors, slots, row) for row in rows}))
    for budget in (0.25, 0.75):
        rows = {row: kept_by_kvpress(budget, row) for row in range(len(recorded.LENGTHS))}
        hyper = dict(budget=budget, question=QUESTION, variant="kvpress")
        others.append(recorded.Case("finch", hyper, rows))
    recorded.write("finch", recorded.commit_of(checkout), cases)
    recorded.write("finch_kvpress", recorded.version_of("kvpress"), others)


if __name__ == "__main__":
    main()
