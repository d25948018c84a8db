"""Compiles a decode step of families for a TPU, in a process of its own: a line of JSON for each.

python -m tests.aot.families TOPOLOGY NAME...
"""

import json
import os
import sys

# Published sizes, but few layers, of each kind that the family has, and few experts.
_MLA = dict(num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=8)
FEW = {
    "gemma-3n-e4b": dict(num_hidden_layers=7, num_kv_shared_layers=2, intermediate_size=[16384] * 7),
    "falcon-h1-7b": dict(num_hidden_layers=2),
    "deepseek-v3.2": _MLA | dict(n_group=1, topk_group=1),
    "glm-5": _MLA | dict(indexer_types=["full", "shared"]),
    "rwkv-7-2.9b": dict(num_hidden_layers=2),
    "qwen3.5-27b": dict(num_hidden_layers=4),
    "qwen3.5-35b-a3b": dict(num_hidden_layers=4, num_experts=8),
    "gpt-oss-20b": dict(num_hidden_layers=2, num_local_experts=4),
    "gemma-4-31b": dict(num_hidden_layers=6),
    "olmo-3-32b": dict(num_hidden_layers=4),
    "smollm3-3b": dict(num_hidden_layers=4),
    "glm-4.5": _MLA,
    "glm-4.7-flash": _MLA,
    "minimax-m2": dict(num_hidden_layers=2, num_local_experts=8),
    "ministral-3-8b": dict(num_hidden_layers=2),
    "llama-4-scout": dict(num_hidden_layers=4, num_local_experts=2),
    "granite-4-h-small": dict(num_hidden_layers=2, num_local_experts=10, layer_types=["mamba", "attention"]),
    "nemotron-h-8b": dict(num_hidden_layers=3, hybrid_override_pattern="M*-"),
    "lfm2-8b-a1b": dict(
        num_hidden_layers=3, num_experts=8, num_dense_layers=1, layer_types=["conv", "full_attention", "conv"]
    ),
    "bamba-9b": dict(num_hidden_layers=2, attn_layer_indices=[1]),
    "jamba-mini": dict(
        num_hidden_layers=2, num_experts=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_offset=0
    ),
    "kimi-linear-48b": dict(
        num_hidden_layers=2, num_experts=8, linear_attn_config=dict(
            head_dim=128, num_heads=32, short_conv_kernel_size=4, full_attn_layers=[2], kda_layers=[1]
        ),
    ),
    "kimi-k2": _MLA,
    "ernie-4.5-21b-a3b": dict(num_hidden_layers=2, moe_num_experts=8),
    "seed-oss-36b": dict(num_hidden_layers=2),
    "exaone-4-32b": dict(num_hidden_layers=4),
    "command-r7b": dict(num_hidden_layers=4),
}  # fmt: skip

# States alone are small: of two rows, the compiler would pad most of what they hold.
ROWS = {"rwkv-7-2.9b": 64}


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
        case = decoder(device, Method(), config, batch=ROWS.get(name, 2))
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), case.operands)
        with jax.set_mesh(mesh):
            compiled = jax.jit(case.run, donate_argnums=case.donated).lower(*placed).compile()
        found = reading.memory(compiled, case.cache // 4)
        found |= {"kernels": (compiled.as_text() or "").count("tpu_custom_call"), "cache": case.cache}
        print("AOT " + json.dumps({"name": name, **found}), flush=True)


def _less(name: str) -> dict[str, int]:
    """Give the embeddings of single layers as many rows as the vocabulary has."""
    return {"vocab_size_per_layer_input": 4096} if name.startswith("gemma") else {}


if __name__ == "__main__":
    main()
