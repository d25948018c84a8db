"""Inputs of `kvjax simulate`: costs of an iteration at published rates, and what a method changes."""

from __future__ import annotations

import difflib
import math
from typing import Any

from kvjax.aot.hardware import DEVICES, GPUS
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.keep.observations.probe import RepeatContext
from kvjax.methods import as_method
from kvjax.models.config import Config
from kvjax.models.feed_forward import MoE, mlp_of
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.params import plan, shapes
from kvjax.plan.cache_sizes import sizes_of
from kvjax.plan.named import named
from kvjax.plan.sizes import bits
from kvjax.plan.topologies import GIB, MEMORY

# The share of published rates of memory and of products that programs reach, and the host's time per
# iteration, as serving engines report them, rounded. They scale all systems alike.
OF_MEMORY, OF_PRODUCTS, HOST_SECONDS = 0.8, 0.55, 1.5e-3
# Bytes per second to host memory: 80% of PCIe 4.0 x16.
TO_HOST = 0.8 * 32e9
# The share of a device's memory left for activations and programs.
LEFT = 0.1
# How long the prompt is whose cache gives the bytes of a slot.
TOKENS = 4096


def serving_costs(model: str, device: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """Compute the fields of `kvjax.serve.sim.Costs` for a model of `kvjax plan --list` on one device.

    Raises InputError for unknown names, and for a model that leaves no memory for its cache.

    >>> round(serving_costs("llama-3.1-8b", "h100")["slot_bytes"])
    131072
    """
    chip = {**DEVICES, **GPUS}.get(device)
    if chip is None:
        near = difflib.get_close_matches(device, MEMORY, 1, 0.4)
        hint = f"did you mean {near[0]}?" if near else "simulations are of one device"
        raise InputError(f"unknown device {device!r}, expected one of {', '.join(MEMORY)}: {hint}")
    found = named(model)
    held, products = _weights(found.config)
    numbers, pairs = _slots(found.config)
    size = bits(dtype) / 8
    memory = (1 - LEFT) * MEMORY[device] * GIB - held * size
    if memory <= 0:
        raise InputError(
            f"the weights of {found.name} take {held * size / GIB:.0f} GiB, and programs have "
            f"{(1 - LEFT) * MEMORY[device]:.0f} on one {device}: give a smaller model or a larger device"
        )
    read, computed = 1 / (OF_MEMORY * chip.hbm), 1 / (OF_PRODUCTS * chip.bf16)
    return {
        "by": f"roofline of {found.name} in {dtype} on one {device}, {OF_MEMORY:g} of its bandwidth, "
        f"{OF_PRODUCTS:g} of its products, {1e3 * HOST_SECONDS:g} ms of host",
        "base": HOST_SECONDS,
        "weights": held * size * read,
        "slot": numbers * size * read,
        "token": 2 * products * computed,
        "pair": 2 * pairs * computed,
        "move": numbers * size / TO_HOST,
        "memory": memory,
        "slot_bytes": numbers * size,
    }


def _weights(config: Config) -> tuple[float, float]:
    """How many weights an iteration reads, all experts included, and by how many a token is multiplied."""
    tree, layer = shapes(config, plan(config, stacked=False)), 0
    held = products = 0.0
    for group in tree["layers"]:
        mlp, depth = mlp_of(config, layer), 1
        for name, shape in group.items():
            depth, count = shape[0], math.prod(shape)
            share = mlp.top / mlp.experts if isinstance(mlp, MoE) and name.startswith("experts_") else 1
            held += count
            products += share * count
        layer += depth
    out = math.prod(tree["embed" if config.tied else "unembed"])
    return held + out, products + out


def _slots(config: Config) -> tuple[float, float]:
    """How many numbers a token stores in all layers, and how many products a query has with its slots."""
    numbers = pairs = 0.0
    if any(window is not None for window in config.windows or ()):
        raise InputError("this model has sliding windows, expected layers that keep every token")
    for layer in range(config.layers):
        mixer = mixer_of(config, layer)
        shape = mixer.slots(config)
        if shape is None or mixer.source_of("slots") is not None:
            raise InputError(
                "this model has layers without slots of their own, expected slots in every layer"
            )
        numbers += shape.heads * (shape.key + (0 if shape.shared else shape.value))
        pairs += mixer.query_heads(config) * (shape.key + shape.value)
    return numbers, pairs


def serving_compression(
    model: str, method: Method | str, dtype: str = "bfloat16", tokens: int = TOKENS
) -> dict[str, Any]:
    """Compute the fields of `kvjax.serve.sim.Compression` for a method on a model of `kvjax plan --list`.

    Bytes are those of the method's cache of `tokens` tokens, scales and positions included.

    Raises InputError for a method that does more than store fewer bytes per slot and select once, at a
    prompt's end.

    >>> serving_compression("llama-3.1-8b", "snapkv(budget=0.25)")
    {'bytes': 1.0, 'slots': 0.25, 'again': 0}
    """
    config, found = named(model).config, as_method(method)
    keep, store = found.keep, Method(store=found.store)
    elsewhere = found.host, found.make, found.read, found.reread, found.stack, found.read_prompt
    if keep is not None:
        elsewhere += keep.merge, keep.lower, keep.narrow, keep.restore, keep.skip_layers, keep.per_query_head
    if found.layers or any(elsewhere) or (keep is not None and keep.when.in_steps):
        raise InputError(
            f"{found!r} does more than a simulation has, expected a method that stores slots in fewer "
            "bytes or evicts some once, at the end of a prompt: give such a one, or a share with --compress"
        )
    sizes = sizes_of(config, dtype, tokens, [Method(), store])
    return {
        "bytes": sizes.nbytes(store) / sizes.nbytes(Method()),
        "slots": 1.0 if keep is None else keep.budget.amount,
        "again": int(keep is not None and isinstance(keep.probe, RepeatContext)),
    }
