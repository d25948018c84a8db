"""The weights that marked tokens have beside their model's: what a word asks of the arrays that hold them."""

from __future__ import annotations

from typing import Any

from kvjax.grammar.fitted import ModelSizes, check_sizes


def check_lora(word: Any, model: ModelSizes) -> None:
    """InputError where a word's arrays lack a map's weights (q, k, v and o), or are another model's."""
    heads = model.heads * model.head_dim
    for name in "qkvo":
        width = heads if name == "o" else model.width
        check_sizes(word, "weights", "layers, width", f"{name}_down", (model.layers, width))
        check_sizes(word, "weights", "layers", f"{name}_up", (model.layers,))
