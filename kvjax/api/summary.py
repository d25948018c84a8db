"""Summary: slots and bytes of a cache, in a few lines."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax import steps
from kvjax.grammar import Method
from kvjax.grammar.to_text import name_of
from kvjax.hosts.arrays import fetch
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.state.cache import Cache, check_alive, host_nbytes, nbytes, positions_by_group
from kvjax.state.layer_order import layers_of
from kvjax.state.shardings import heavier, size_text
from kvjax.steps import Run


class LayerSummary(NamedTuple):
    """Layers first to last: live slots per KV head (minimum, mean, maximum), slots that fit, bytes.

    stride: how far apart the layers are, more than 1 where kinds of layers take turns and are stacked so.
    Layers that carry a state have no slots. Slots in pages are counted here; their bytes are counted only in
    the cache's total, because layers share the pages.
    """

    first: int
    last: int
    slots: tuple[int, float, int]
    fit: int
    nbytes: int
    stride: int = 1

    @property
    def name(self) -> str:
        """The layers in words."""
        if self.stride > 1:
            return f"layers {', '.join(map(str, range(self.first, self.last + 1, self.stride)))}"
        return f"layer {self.first}" if self.first == self.last else f"layers {self.first}-{self.last}"


class Summary(NamedTuple):
    """The result of `summary`; `print` shows it as lines.

    tokens: how many each row has seen. full_nbytes: bytes of the full cache for them, with as many free
    slots; None if no model was given.
    """

    method: str
    tokens: tuple[int, ...]
    layers: tuple[LayerSummary, ...]
    nbytes: int
    host_nbytes: int
    full_nbytes: int | None

    def __str__(self) -> str:
        rows = f"{len(self.tokens)} row{'s' if len(self.tokens) != 1 else ''}"
        seen = ", ".join(map(str, self.tokens[:8])) + (", ..." if len(self.tokens) > 8 else "")
        lines = [f"{self.method}: {rows}, {seen} tokens"]
        for part in self.layers:
            least, mean, most = part.slots
            of_heads = f"{mean:.1f} slots per KV head" if least == most else (
                f"{mean:.1f} slots per KV head, from {least} to {most}"
            )  # fmt: skip
            kept = f"{of_heads}, {part.fit} fit" if part.fit else "states, no slots"
            lines.append(f"  {part.name}: {kept}; {size_text(part.nbytes)}")
        total = f"  all: {size_text(self.nbytes)}"
        if self.host_nbytes:
            total += f", {size_text(self.host_nbytes)} of them in host memory"
        if self.full_nbytes:
            share = 100 * self.nbytes / self.full_nbytes
            total += f"; {share:.1f}% of the full cache's {size_text(self.full_nbytes)}"
            if note := heavier(self.nbytes, self.full_nbytes):
                total += f": {note}"
        return "\n".join([*lines, total])

    __repr__ = __str__


def summary(cache: Cache, model: Model | None = None) -> Summary:
    """Sum up a cache: slots and bytes of its layers.

    Args:
        cache: a live cache.
        model: with it, the summary also has the bytes of the full cache.

    Returns:
        A `Summary`; `print` shows it as lines.

    Raises:
        InputError: if the value is not a cache, or a step has consumed it.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> method = kvjax.method("streamingllm", budget=16)
    >>> print(kvjax.summary(kvjax.prefill(model, [[*range(64)]], method=method, room=0)[1], model))
    streamingllm(budget=16): 1 row, 64 tokens
      layers 0-3: 16.0 slots per KV head, 17 fit; 34.5 KiB
      all: 34.5 KiB; 26.2% of the full cache's 132.0 KiB
    """
    check_alive(cache)
    tokens = tuple(fetch(cache.next).tolist())
    method = "no method" if cache.method is None else name_of(cache.method.spec)
    full = None if model is None else _full_nbytes(model, len(tokens), max(tokens), _room(cache))
    return Summary(method, tokens, tuple(_layers(cache)), nbytes(cache), host_nbytes(cache), full)


def _layers(cache: Cache) -> list[LayerSummary]:
    """Group layers; neighbouring groups that are alike are merged."""
    found: list[LayerSummary] = []
    each = zip(cache.groups, layers_of(cache), positions_by_group(cache), strict=True)
    for group, numbers, layers in each:
        count = nbytes(group)
        if not group.parts and group.state is None:
            continue
        first, last = numbers[0], numbers[-1]
        new = LayerSummary(first, last, _live(layers), layers[0].shape[-1], count, numbers.step)
        before = found[-1] if found and found[-1].stride == new.stride == 1 else None
        if before is not None and before.last + 1 == first and before[2:4] == new[2:4]:
            new = new._replace(first=before.first, nbytes=before.nbytes + count)
            found.pop()
        found.append(new)
    return found


def _live(layers: list[Int[np.ndarray, "B K S"]]) -> tuple[int, float, int]:
    counts = np.concatenate([(pos >= 0).sum(-1).ravel() for pos in layers])
    return (int(counts.min()), float(counts.mean()), int(counts.max())) if counts.size else (0, 0.0, 0)


def _room(cache: Cache) -> int:
    """How many more tokens every row can take, by the layer with the most free slots for new ones."""
    tails = [fetch(group.tail.pos) for group in cache.groups if group.tail is not None]
    return max((int((pos < 0).sum(-1).min(initial=pos.shape[-1])) for pos in tails), default=0)


def _full_nbytes(model: Model, rows: int, tokens: int, room: int) -> int | None:
    """Bytes of the full cache, from the shapes of its prefill; None for a model of two decoders."""
    if not isinstance(model.config, Config):
        return None
    ids, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, tokens), (rows,)))
    sizes: dict[str, Any] = dict(cache=None, tokens_bound=tokens, room=room, compress=True)
    call = partial(steps.prefill, Run(model.config, Method()), **sizes)
    return nbytes(jax.eval_shape(call, model.params, ids, lengths)[1])
