"""A model's parameters as the tensors of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.hf_tensors import TensorPart, short_name, tensors, transposed
from kvjax.models.model import Model
from kvjax.models.stacking import groups_in, layers_of_groups


def fetcher(model: Model) -> Callable[[str], np.ndarray]:
    """Make a function from a full tensor name to the tensor as the checkpoint stores it."""
    params, table = model.params, tensors(model.config)
    stacks = zip(layers_of_groups(params), groups_in(params), strict=True)
    layer_at = {number: (p, i) for p, group in stacks for i, number in enumerate(group.layers)}

    def part(part: TensorPart) -> np.ndarray:
        if part.layer is None:
            value = np.asarray(params[part.leaf])
            return value.T if transposed(part.leaf) else value
        group, i = layer_at[part.layer]
        value = group[part.leaf][i] if part.expert is None else group[part.leaf][i, part.expert]
        return np.asarray(value[..., part.columns]).T

    def whole(name: str) -> np.ndarray:
        tensor = table[short_name(name)]
        if all(p.rows is None for p in tensor.parts):
            return np.concatenate([part(p) for p in tensor.parts])
        values = [part(p) for p in tensor.parts]
        if len({p.layer for p in tensor.parts}) > 1:
            return _one_of_equals(name, values)
        if any(p.transposed or p.stacked for p in tensor.parts):
            out = np.empty(tensor.shape, values[0].dtype)
        else:
            out = np.empty((sum(len(v) for v in values), *values[0].shape[1:]), values[0].dtype)
        for p, value in zip(tensor.parts, values, strict=True):
            target = out[p.expert] if p.stacked else out
            (target.T if p.transposed else target)[p.rows] = value
        return out.reshape(tensor.shape)

    return whole


def _one_of_equals(name: str, values: list[np.ndarray]) -> np.ndarray:
    """Return a tensor that is a parameter of several layers; InputError if theirs differ."""
    if any(not np.array_equal(values[0], other) for other in values[1:]):
        raise InputError(
            f"{name} is one tensor in a checkpoint of this family, and the layers side by side that share it "
            "hold different numbers: use save_checkpoint instead"
        )
    return values[0]
