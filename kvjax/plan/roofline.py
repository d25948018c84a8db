"""Roofline: a lower bound of the time of a step or a chunk: bytes and operations at published rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.config import Config
from kvjax.models.feed_forward import MoE, mlp_of
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.stacking import groups_in, layers_of_groups
from kvjax.plan.collectives import Collective
from kvjax.plan.sizes import bits, on_device
from kvjax.plan.topologies import Topology
from kvjax.state.cache import Cache, GroupState, Paged

NOTE = (
    "Roofline: a model, not measured. hbm: weights that a step needs and all of the cache, read once; mxu: "
    "products; links: collectives at what a device sends to all its neighbours, without latency. A step "
    "takes at least the larger of the first two, and the third."
)


class Roofline(NamedTuple):
    """Milliseconds of one step of all rows, on one device: for memory, products and links."""

    hbm: float
    mxu: float
    links: float

    @property
    def ms(self) -> float:
        return max(self.hbm, self.mxu) + self.links

    def tokens_per_second(self, batch: int) -> float:
        return 1e3 * batch / self.ms


def roofline(
    config: Config, params: Params, cache: Cache, topology: Topology, on: OnMesh, sent: Iterable[Collective],
    tokens: int = 1, past: float = 1.0,
) -> Roofline | None:  # fmt: skip
    """For `tokens` tokens per row over sharded weights and a cache; None for devices with unknown rates.

    sent: the program's collectives. past: the share of the cache's slots that the tokens attend to.
    """
    device = topology.device
    if device is None:
        return None
    batch = cache.next.shape[0]
    rows = batch // on.devices("batch") if on.splits("batch", batch) else batch
    moved, flops = _of_weights(config, params, rows, batch, tokens)
    moved += past * _of_cache(config, params, cache)
    flops += past * tokens * _of_attention(config, params, cache, on)
    # An all-reduce sends its operands, and then the results.
    wire = sum(one.bytes * (2 if one.kind == "all-reduce" else 1) for one in sent)
    links = wire / topology.links if topology.links else 0.0
    return Roofline(1e3 * moved / device.hbm, 1e3 * flops / device.bf16, 1e3 * links)


def _of_weights(config: Config, params: Params, rows: int, batch: int, tokens: int) -> tuple[float, float]:
    """Bytes and operations of the weights on one device, which reads `tokens` of `rows` of `batch` rows.

    The experts counted are those that the tokens are expected to choose, if all are chosen equally. Logits
    are those of one token per row.
    """
    moved = flops = 0.0
    one, rows, batch = rows, rows * tokens, batch * tokens
    for group, first in zip(layers_of_groups(params), _firsts(params), strict=True):
        mlp = mlp_of(config, first)
        for name, x in group.items():
            here = _here(x)
            count = here * 8 / bits(x.dtype)
            if isinstance(mlp, MoE) and name.startswith("experts_"):
                share = mlp.top / mlp.experts
                moved += here * (1 - (1 - share) ** batch)
                flops += 2 * rows * count * share
            else:
                moved += here
                flops += 2 * rows * count if x.ndim > 2 else 0
    for name in ("norm", "embed" if config.tied else "unembed"):
        here = _here(params[name])
        moved += here
        flops += 2 * one * here * 8 / bits(params[name].dtype)
    return moved, flops


def _of_cache(config: Config, params: Params, cache: Cache) -> int:
    """Bytes of a cache on one device that a step moves: slots are read, states read and written.

    Slots that other layers read are counted once for each reader.
    """
    total = sum(_here(x) for x in jax.tree.leaves((cache.pools, cache.next)))
    for _, layers, holder in _attending(config, params, cache):
        held = sum(_here(x) for x in jax.tree.leaves(holder.parts))
        total += held * layers // _layers(holder)
    return total + sum(2 * _here(x) for group in cache.groups for x in jax.tree.leaves(group.state))


def _of_attention(config: Config, params: Params, cache: Cache, on: OnMesh) -> float:
    """Operations of a device's queries on its slots of the cache."""
    flops = 0.0
    for first, layers, holder in _attending(config, params, cache):
        mixer = mixer_of(config, first)
        shape = mixer.slots_of(config)
        for part in holder.parts:
            table: Any = part.lengths if isinstance(part, Paged) else part.pos
            slots = float(_numbers(table))
            if isinstance(part, Paged):
                pool = cache.pools[part.pool]
                slots *= pool.pos.size / (pool.layers * part.lengths.shape[1] * part.lengths.shape[2])
            queries = mixer.query_heads(config) / table.shape[2]
            _, _, lists, over, *_ = (*table.sharding.spec, None, None, None, None)
            if lists is None and not {*(over or ())} & {*on.rules.mesh_axes("heads")}:
                # Each device holds all KV heads here, and attends with its share of the query heads.
                queries /= on.devices("heads")
            flops += 2 * slots * layers / table.shape[0] * queries * (shape.key + shape.value)
    return flops


def _attending(config: Config, params: Params, cache: Cache) -> Iterator[tuple[int, int, GroupState]]:
    """(first layer, layers, the group whose slots they read) of all groups that read slots."""
    firsts = _firsts(params)
    for (first, size, _), group in zip(groups_in(params), cache.groups, strict=True):
        source = mixer_of(config, first).source_of("slots")
        holder = group if source is None else cache.groups[firsts.index(source)]
        if mixer_of(config, first).slots(config) is not None and _layers(holder):
            yield first, size, holder


def _layers(group: GroupState) -> int:
    """How many layers of a group hold slots; 0 if none do."""
    tables = [part.lengths if isinstance(part, Paged) else part.pos for part in group.parts]
    return tables[0].shape[0] if tables and tables[0].shape[-1] else 0


def _numbers(x: Any) -> int:
    """How many elements of an array are on one device."""
    return on_device(x.shape, "int8", x.sharding.spec, x.sharding.mesh)


def _here(x: Any) -> int:
    """Bytes of an array on one device."""
    return on_device(x.shape, x.dtype, x.sharding.spec, x.sharding.mesh)


def _firsts(params: Params) -> list[int]:
    """Find the first layer of every group."""
    return [group.first for group in groups_in(params)]
