"""One case compiled for one GPU, in a separate process, because the compiler may abort.

    python -m kvjax.aot.gpu_child GPU CASE FOLDER OPTIONS

It prints one line, "AOT " and JSON; the compiler's dumps go to FOLDER. The environment is read when the
compiler's library is loaded, so it is set before anything imports jax; what is the same for every compiler is
`probe.ENVIRONMENT`.
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
        # Compiling needs none of CUDA's libraries.
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        # Newer releases write the assembly of kernels only if the emitter is named.
        XLA_FLAGS=f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx",
        TF_CPP_MIN_LOG_LEVEL="2",
    )
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kvjax.aot import gpu_reading, reading
    from kvjax.aot.hardware import GPUS
    from kvjax.aot.probe import cases_of
    from kvjax.state.cache import lies_far

    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    gpu = GPUS[name]
    case = partial(cases_of(gpu)[case_name], **json.loads(options))(gpu)
    target = gpu_reading.target(gpu)
    devices = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1").devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)

    with jax.set_mesh(mesh):
        operands = jax.tree.map(place, case.operands)
        compiled = jax.jit(case.run, donate_argnums=case.donated).lower(*operands).compile()
    least = case.leaf or case.cache // 4 or sys.maxsize
    found = reading.memory(compiled, least)
    if any(jax.tree.leaves(lies_far(case.operands))):
        found |= reading.host_memory(compiled, least)
    found["kernels"] = gpu_reading.kernels(compiled.as_text() or "")
    print("AOT " + json.dumps(found | gpu_reading.programs(folder, case.kernel, gpu)))


if __name__ == "__main__":
    main()
