"""One decode step of every class of layout, over caches larger than everything else: no cache may be copied.

A class is the value of `kvjax.compat.layout_class` for a method, and one method represents each class. The
model's layers are narrow, so that any array as large as the keys of a layer is a copy of some cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.aot.case import Case
from kvjax.aot.cases.decoder import traced_on
from kvjax.aot.hardware import Device, Gpu
from kvjax.grammar import Method, chain
from kvjax.grammar.fitted import Fitted, with_fitted
from kvjax.methods import method
from kvjax.models.config import Config
from kvjax.models.params import init, plan
from kvjax.models.placement import weight_layout
from kvjax.ops.base.rope import Rope
from kvjax.state.cache import Cache, Slots, nbytes
from kvjax.steps import Run, prefill
from kvjax.steps.decoding.step import step_fn

LAYERS, HEADS, LISTS, WIDTH = 2, 16, 8, 128
# The keys of one layer take half a gigabyte in bfloat16, and no TPU moves half of them into VMEM.
BATCH, TOKENS, ROOM = 8, 32768 - 128, 128
WINDOW = 1024


class Sentence(NamedTuple):
    """The representative of a class: its parts, each an id and hyper-parameters.

    skips: whether it does not compress the first layers. windowed: the first layer has a window. apart: its
    layers use each other's slots, so they cannot be scanned.
    """

    parts: tuple[tuple[str, dict[str, Any]], ...]
    skips: bool = False
    windowed: bool = False
    apart: bool = False

    def method(self, skipped: int = 1) -> Method:
        """Return the method; one that skips layers does not compress the first `skipped`."""
        more = {"skip_layers": skipped} if self.skips else {}
        made = [method(id, **hyper, **more) for id, hyper in self.parts]
        return made[0] if len(made) == 1 else chain(*made)


def _one(id: str, skips: bool = False, windowed: bool = False, apart: bool = False, **hyper: Any) -> Sentence:
    return Sentence(((id, hyper),), skips, windowed, apart)


def _fitted(word: str, shapes: dict[str, tuple[int, ...]]) -> Fitted:
    """Return placeholder arrays, because compiling needs their shapes alone."""
    return Fitted({n: np.zeros((LAYERS, *shape), np.float32) for n, shape in shapes.items()}, word, "")


GATES = _fitted("HeadGates", {"gates": (LISTS,)})
REPEATS = _fitted("RepeatingHeads", {"echo": (HEADS,), "induction": (HEADS,)})
KERNELS = _fitted(
    "Residue",
    {
        "q1": (HEADS, WIDTH, 8), "q2": (HEADS, 8, 8), "k1": (LISTS, WIDTH, 8), "k2": (LISTS, 8, 8),
        "mix": (LISTS, 8, 8), "scale": (LISTS, 8), "scale_mix": (LISTS, 8),
    },
)  # fmt: skip
LEVELS = _fitted(
    "Levels",
    {
        "key centre": (LISTS, WIDTH), "key range": (LISTS, WIDTH), "key levels": (16,), "value levels": (16,),
    },
)  # fmt: skip
NORMS = _fitted("QueryDrivenChannels", {"norms": (LISTS, WIDTH)})
RUNS = _fitted(
    "Opening",
    {
        "join": (256, LISTS), "join_bias": (LISTS,), "weight": (256, LISTS), "weight_bias": (LISTS,),
    },
)  # fmt: skip
_SQUARE = {"matrix": (LISTS, WIDTH, WIDTH), "inverse": (LISTS, WIDTH, WIDTH)}
KEY_BASIS = _fitted("InBasis", {f"key {name}": shape for name, shape in _SQUARE.items()})
BASES = _fitted(
    "InBasis", {f"{of} {name}": shape for of in ("key", "value") for name, shape in _SQUARE.items()}
)
GROUPS = Fitted(
    {
        f"{of} group": np.broadcast_to(np.arange(WIDTH, dtype=np.int32) // 32, (LAYERS, LISTS, WIDTH))
        for of in ("key", "value")
    },
    "Clustered", "",
)  # fmt: skip
RANGES = _fitted(
    "StaticAffine", {f"{of} {name}": (LISTS,) for of in ("key", "value") for name in ("low", "step")}
)
# One bit per number. On a TPU, vectors of fewer channels fill less of a row of lanes when they are looked up.
VECTORS = _fitted("CoupledCodes", {f"{of} centroids": (LISTS, WIDTH // 8, 256, 8) for of in ("key", "value")})
_ALL = LISTS * WIDTH
MAPS = _fitted(
    "Predicted",
    {
        "key weights": (_ALL, _ALL), "key bias": (_ALL,),
        "value weights": (2 * _ALL, _ALL), "value bias": (_ALL,),
    },
)  # fmt: skip
HALF: dict[str, Any] = dict(budget=0.5)
# The longest page that a kernel accepts.
PAGED: dict[str, Any] = HALF | dict(page=128)
SENTENCES = {
    "full": _one("full"),
    "snapkv": _one("snapkv", **HALF),
    "snapkv-heads": _one("snapkv", **HALF, variant="paper"),
    "snapkv-windowed": _one("snapkv", windowed=True, **HALF),
    "l2compress": _one("l2compress", skips=True, **HALF),
    "snapkv-renumbered": Sentence((("snapkv", HALF), ("renumbered", {}))),
    "finch": _one("finch", **HALF),
    "laq": _one("laq", **HALF),
    "sink-recent": _one("sink-recent", **HALF),
    "streamingllm": _one("streamingllm", **HALF),
    "lm-infinite": _one("lm-infinite", **HALF),
    "h2o": _one("h2o", **HALF),
    "tova": _one("tova", **HALF),
    "r-kv": _one("r-kv", **HALF),
    "lacache": _one("lacache", **HALF),
    "ape": _one("ape", contexts=(8192, 8192, 8192)),
    "keepkv": _one("keepkv", **HALF),
    "ems": _one("ems", **HALF),
    "freqkv": _one("freqkv", **HALF),
    "compressive-transformer": _one("compressive-transformer", **HALF),
    "less": _one("less", **HALF, fitted=KERNELS),
    "adakv": _one("adakv", **PAGED),
    "adakv-renumbered": Sentence((("adakv", PAGED), ("renumbered", {}))),
    "pyramidkv-heads": _one("pyramidkv", **PAGED, variant="paper"),
    "duoattention": _one("duoattention", fitted=GATES, page=128),
    "razorattention": _one("razorattention", fitted=REPEATS, page=128),
    "cake": _one("cake", **PAGED),
    "kvzip": _one("kvzip", **PAGED, prefix=(1, 2)),
    "leankv": _one("leankv", page=128),
    "dmc": _one("dmc", fitted=RUNS, page=128),
    "minicache": _one("minicache", apart=True, start=0),
    "offloaded": _one("offloaded"),
    "int8": _one("int8"),
    "int4": _one("int4"),
    "kivi": _one("kivi"),
    "kvquant": _one("kvquant", bits=4, fitted=LEVELS),
    "qserve": _one("qserve", fitted=KEY_BASIS),
    "skvq": _one("skvq", fitted=GROUPS),
    "oscar": _one("oscar", fitted=BASES),
    "cq": _one("cq", channels=8, fitted=VECTORS),
    "aqua-kv": _one("aqua-kv", apart=True, fitted=MAPS),
    "intactkv": _one("intactkv"),
    "prefixquant": _one("prefixquant", fitted=RANGES),
    "think": _one("think", fitted=NORMS),
    "mikv": _one("mikv", **HALF),
    "zipcache": _one("zipcache", **HALF),
    "zdc": _one("zdc", **HALF),
    "snapkv-kivi": Sentence((("snapkv", HALF), ("kivi", {}))),
    "adakv-int4": Sentence((("adakv", PAGED), ("int4", {}))),
    "h2o-int8": Sentence((("h2o", HALF), ("int8", {}))),
    "alisa": _one("alisa", **HALF),
    "quest": _one("quest", skips=True, budget=1024),
    "tidaldecode": _one("tidaldecode", apart=True, budget=1024, skip_layers=0, reselect=1),
    "infllm": _one("infllm", budget=1024, newest=1024),
    "sparq": _one("sparq", budget=1024),
    "recycled-attention": _one("recycled-attention", budget=1024),
    "lserve": _one("lserve", budget=1024, fitted=GATES, page=128, part=16),
    "reattention": _one("reattention", budget=1024, newest=1024),
    "magicpig": _one("magicpig", budget=1024, skip_layers=0),
    "loki": _one("loki", budget=1024),
    "rocketkv": _one("rocketkv", budget=256),
    "hcattention": _one("hcattention", budget=1024),
    "shadowkv": _one("shadowkv", budget=1024),
    "tailorkv": _one("tailorkv", apart=True, budget=1024),
}


def config_of(sentence: Sentence, layers: int) -> Config:
    return Config(
        vocab=256, d_model=256, layers=layers, heads=HEADS, kv_heads=LISTS, head_dim=WIDTH, d_ff=256,
        rope=Rope(theta=1e4), windows=(WINDOW, *(None,) * (layers - 1)) if sentence.windowed else (),
    )  # fmt: skip


def leaf_bytes(cache: Cache) -> int:
    """Bytes of the keys of one layer, or of their largest array of codes, in the layer with the fewest.

    Tails of body-and-tail caches, and layers with a window, are negligible here.
    """
    slots = [part for group in cache.groups for part in group.bodies or (group.tail,)]
    found = [(x.k, x.pos.shape[0]) for x in slots if isinstance(x, Slots)]
    found += [(pool.k, pool.layers) for pool in cache.pools]
    each = [max(nbytes(leaf) for leaf in jax.tree.leaves(k)) // layers for k, layers in found]
    return min(size for size in each if 8 * size >= max(each))


def step_of(device: Device | Gpu | None, name: str) -> tuple[Run, Any, Cache]:
    """Return a decode step of a class as a run, and the shapes of parameters and of a cache of 32640 tokens.

    In bfloat16; device: None for a CPU, in float32. TPUs scan the layers; uncompressed layers are separate.
    """
    sentence, dtype = SENTENCES[name], jnp.float32 if device is None else jnp.bfloat16
    stacked = device is not None and device.platform == "tpu"
    layers = 2 * LAYERS if stacked and sentence.skips else LAYERS
    config, method = config_of(sentence, layers), sentence.method(layers // 2)
    groups = plan(config, stacked=stacked and not sentence.apart)

    def make(key: Any) -> Any:
        return with_fitted(init(config, key, dtype, groups=groups), method)

    def fill(params: Any, tokens: Any, lengths: Any) -> Cache:
        run, bounds = Run(config, method), dict(tokens_bound=TOKENS, room=ROOM, compress=True)
        return prefill(run, params, tokens, lengths, None, **bounds)[1]

    params = jax.eval_shape(make, jax.random.key(0))
    shape = jax.ShapeDtypeStruct
    with traced_on(device):
        cache = jax.eval_shape(fill, params, shape((BATCH, TOKENS), jnp.int32), shape((BATCH,), jnp.int32))
    return Run(config, method.decode_part()), params, cache


def layout(device: Device | Gpu | None, name: str) -> Case:
    """One token per row, over a cache that the step may reuse."""
    run, params, cache = step_of(device, name)
    operands = params, cache, *(jax.ShapeDtypeStruct((BATCH,), dtype) for dtype in (jnp.int32, jnp.bool_))
    case = Case(
        partial(step_fn, run), operands, nbytes(cache), 0, nbytes(cache), "_decode", {}, profiles=False,
        donated=(1,), leaf=leaf_bytes(cache),
    )  # fmt: skip
    if device is None or isinstance(device, Gpu):
        return case
    return case._replace(layouts={0: partial(weight_layout, device.generation)})


CASES: dict[str, Callable[..., Case]] = {f"layout-{name}": partial(layout, name=name) for name in SENTENCES}
