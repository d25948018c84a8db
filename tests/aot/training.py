"""Compiles a step of `kvjax train` for four TPUs, in a process of its own, and counts its kernels.

python -m tests.aot.training RULES
"""

import os
import sys


def main():
    # Read when the compiler's library is loaded, so set before anything imports jax; see `kvjax.plan.child`.
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_LOG_DIR="disabled", TPU_MIN_LOG_LEVEL="3", TF_CPP_MIN_LOG_LEVEL="2",
    )  # fmt: skip
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    from kvjax.mesh.on_mesh import OnMesh
    from kvjax.mesh.rules import PRESETS
    from kvjax.models.params import init, plan
    from kvjax.train.devices import places
    from kvjax.train.optimiser import optimiser
    from kvjax.train.settings import training
    from kvjax.train.step import BatchParts, TrainState, make_step

    rules = sys.argv[1]
    names, shape = (("data",), (4,)) if rules == "fsdp" else (("data", "model"), (2, 2))
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    on = OnMesh(Mesh(np.array(devices).reshape(shape), names), PRESETS[rules])
    model = dict(layers=2, d_model=256, heads=2, kv_heads=2, head_dim=128, d_ff=256, vocab=256)
    run = training({"model": model, "train": dict(batch=4, length=512, compute="bfloat16", remat=True)})
    rule = optimiser(run.optimiser, run.loop)
    with jax.set_mesh(on.mesh):
        groups = plan(run.config, stacked=True)
        params = jax.eval_shape(lambda: init(run.config, jax.random.key(0), jnp.float32, groups))
        state = TrainState(params, jax.eval_shape(rule.init, params), jax.ShapeDtypeStruct((), jnp.int32))
        state = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            state, places(state, params, run.config, on),
        )  # fmt: skip
        where = on.sharding((None, "batch", None), (1, 4, 513))
        tokens, weights = (
            jax.ShapeDtypeStruct((1, 4, 513), dtype, sharding=where) for dtype in (jnp.int32, jnp.float32)
        )
        step = make_step(run.config, run.loop, rule, on=on)
        print(
            step.lower(state, BatchParts(tokens, weights, None)).compile().as_text().count("tpu_custom_call")
        )


if __name__ == "__main__":
    main()
