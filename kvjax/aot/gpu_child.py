"""One case compiled for one GPU, in a process of its own: the compiler may abort.

    python -m kvjax.aot.gpu_child GPU CASE FOLDER OPTIONS

It prints one line, "AOT " and JSON; the compiler's dumps go to FOLDER. The environment is read when the
compiler's library is loaded, so it is set before anything imports jax.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import partial
from typing import Any


def main() -> None:
    name, case_name, folder, options = sys.argv[1:5]
    os.environ.update(
        JAX_PLATFORMS="cpu",
        # Compiling needs none of CUDA's libraries.
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        JAX_ENABLE_COMPILATION_CACHE="false",
        # A caller in a hurry, such as the tests, would have other figures.
        JAX_DISABLE_MOST_OPTIMIZATIONS="0",
        # Newer releases write the assembly of kernels only where it is named.
        XLA_FLAGS=f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx",
        TF_CPP_MIN_LOG_LEVEL="2",
    )
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kvjax.aot import gpu_reading, reading
    from kvjax.aot.cases.gpu import CASES
    from kvjax.aot.hardware import GPUS

    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    gpu = GPUS[name]
    case = partial(CASES[case_name], **json.loads(options))(gpu)
    target = gpu_reading.target(gpu)
    devices = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1").devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)

    with jax.set_mesh(mesh):
        operands = jax.tree.map(place, case.operands)
        compiled = jax.jit(case.run, donate_argnums=case.donated).lower(*operands).compile()
    memory, module = compiled.memory_analysis(), compiled.as_text() or ""
    assert memory is not None
    found = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "aliases": memory.alias_size_in_bytes,
        "copies": reading.large_copies(module, case.cache // 4 or sys.maxsize),
        "kernels": gpu_reading.kernels(module),
    }
    print("AOT " + json.dumps(found | gpu_reading.programs(folder, case.kernel, gpu)))


if __name__ == "__main__":
    main()
