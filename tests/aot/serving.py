"""The decode step of a server, compiled for a TPU or a GPU (`python -m tests.aot.serving v5e:2x2`)."""

import json
import sys
from functools import partial


def main():
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kvjax.aot import reading
    from kvjax.api.sampling import Sampler, Settings
    from kvjax.models.config import Config
    from kvjax.models.params import init
    from kvjax.ops.decode.page_pool import PagePool, page_rows
    from kvjax.serve.device.paged_step import PagedStep, RowPages
    from kvjax.serve.device.write import STOPS, RowDraws, write_slice

    topology = sys.argv[1]
    kind = "tpu" if ":" in topology else "gpu"
    if kind == "tpu":
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    else:
        from kvjax.aot.gpu_reading import target
        from kvjax.aot.hardware import GPUS

        how = dict(target_config=target(GPUS[topology]), topology="1x1x1")
        devices = topologies.get_topology_desc(platform="cuda", **how).devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    rows, page, blocks, layers, heads = 4, 16, 1024, 1, 4
    config = Config(
        vocab=256, d_model=256, layers=layers, heads=8, kv_heads=heads, head_dim=128, d_ff=256,
        max_positions=8192,
    )  # fmt: skip
    params = jax.eval_shape(partial(init, config, dtype=jnp.bfloat16), jax.random.key(0))
    high = page_rows("bfloat16", page, 128, ("pos",))
    of = jax.ShapeDtypeStruct
    sizes = [next(iter(group.values())).shape[0] for group in params["layers"]]
    words = [of((size, heads * blocks, high, 128), jnp.int32) for size in sizes]
    pools = tuple(PagePool(one, page, "bfloat16", ("pos",)) for one in words)
    table = RowPages(of((rows, 64), jnp.int32), of((layers, rows, heads), jnp.int32), of((rows,), jnp.int32))
    settings = Settings(*(of((rows, *np.shape(x)), np.asarray(x).dtype) for x in Sampler().settings))
    draws = RowDraws(
        settings, of((rows, 2), jnp.uint32), of((rows,), jnp.int32), of((rows, STOPS), jnp.int32)
    )
    token, active = of((rows,), jnp.int32), of((rows,), jnp.bool_)
    given = params, (pools, table), token, active, draws, of((), jnp.int32)
    placed = jax.tree.map(lambda x: of(x.shape, x.dtype, sharding=whole), given)
    step = PagedStep(config, None, kind)
    with jax.set_mesh(mesh):
        compiled = write_slice.lower(step, *placed, 0).compile()
    held = 4 * sum(int(np.prod(one.shape)) for one in words)
    print("AOT " + json.dumps({**reading.memory(compiled, held // 4), "pool": held}), flush=True)


if __name__ == "__main__":
    main()
