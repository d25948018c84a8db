"""Compiles a decode step of families for a TPU, in a process of its own: a line of JSON for each.

python -m tests.aot.families TOPOLOGY NAME...
"""

import json
import os
import sys

# Published sizes, but few layers, of each kind that the family has, and few experts.
FEW = {
    "gemma-3n-e4b": dict(num_hidden_layers=7, num_kv_shared_layers=2, intermediate_size=[16384] * 7),
    "falcon-h1-7b": dict(num_hidden_layers=2),
    "deepseek-v3.2": dict(
        num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=8, n_group=1, topk_group=1
    ),
    "glm-5": dict(
        num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=8, indexer_types=["full", "shared"]
    ),
}


def main() -> None:
    # Read when the compiler's library is loaded, so set before anything imports jax.
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_LOG_DIR="disabled", TPU_MIN_LOG_LEVEL="3", TF_CPP_MIN_LOG_LEVEL="2",
    )  # fmt: skip
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kvjax.aot import reading
    from kvjax.aot.cases.decoder import decoder
    from kvjax.aot.hardware import device_of
    from kvjax.grammar import Method
    from kvjax.models.hf_config import config_from_hf
    from kvjax.plan.named import rows

    topology, *names = sys.argv[1:]
    device = device_of(topology)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    for name in names:
        config = config_from_hf(rows()[name]["config"] | FEW[name] | {"vocab_size": 4096} | _less(name))
        case = decoder(device, Method(), config, batch=2)
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), case.operands)
        with jax.set_mesh(mesh):
            compiled = jax.jit(case.run, donate_argnums=case.donated).lower(*placed).compile()
        found = reading.memory(compiled, case.cache // 4)
        found |= {"kernels": (compiled.as_text() or "").count("tpu_custom_call"), "cache": case.cache}
        print("AOT " + json.dumps({"name": name, **found}), flush=True)


def _less(name: str) -> dict[str, int]:
    """The embeddings of single layers have as many rows as the vocabulary."""
    return {"vocab_size_per_layer_input": 4096} if name.startswith("gemma") else {}


if __name__ == "__main__":
    main()
