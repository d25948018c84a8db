"""Checks of the additional projection weights (LoRA) that marked tokens use."""

from __future__ import annotations

from typing import Any

from kvjax.grammar.fitted import ModelSizes, check_sizes


def check_lora(word: Any, model: ModelSizes) -> None:
    """Raise InputError if a word's arrays lack the weights of q, k, v or o, or do not fit the model."""
    heads = model.heads * model.head_dim
    for name in "qkvo":
        width = heads if name == "o" else model.width
        check_sizes(word, "weights", "layers, width", f"{name}_down", (model.layers, width))
        check_sizes(word, "weights", "layers", f"{name}_up", (model.layers,))
