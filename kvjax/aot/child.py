"""One case compiled for one topology, in a separate process, because the compiler may abort.

    python -m kvjax.aot.child TOPOLOGY CASE FOLDER profile|plain OPTIONS

OPTIONS of the case are JSON. It prints one line, "AOT " and JSON; the compiler's dumps go to FOLDER. The
environment is read when the compiler's library is loaded, so it is set before anything imports jax; what is
the same for every compiler is `probe.ENVIRONMENT`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from functools import partial
from typing import Any


def main() -> None:
    topology, name, folder, how, options = sys.argv[1:6]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    profile = f" --xla_jf_dump_static_llo_profile_to={folder}/profile" if how == "profile" else ""
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        XLA_FLAGS="",
        # Only the final passes are dumped: dumping all takes half a gigabyte and doubles the time.
        LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex=final_(bundles|hlo){profile}",
        # The compiler's log files grow by gigabytes; fatal errors come to stderr without them.
        TPU_LOG_DIR="disabled",
        TPU_MIN_LOG_LEVEL="3",
    )
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.experimental.layout import Format
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kvjax.aot import reading
    from kvjax.aot.hardware import device_of
    from kvjax.aot.probe import cases_of
    from kvjax.ops.base.memory import KIND
    from kvjax.pallas_kernels.block_sizes import here
    from kvjax.state.cache import lies_far

    device = device_of(topology)
    case = partial(cases_of(device)[name], **json.loads(options))(device)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def place(at: int, operand: Any) -> Any:
        def one(x: Any, far: bool) -> Any:
            layout = case.layouts.get(at)
            layout = layout(x) if callable(layout) else layout
            where = whole.with_memory_kind(KIND) if far else whole
            how = where if layout is None else Format(layout, where)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=how)

        return jax.tree.map(one, operand, lies_far(operand))

    placed = [place(at, operand) for at, operand in enumerate(case.operands)]
    # Pallas reads from the mesh which TPU generation to compile for.
    with jax.set_mesh(mesh):
        if here() != device.generation:
            raise RuntimeError(
                f"{topology} is a {devices[0].device_kind}: add that to pallas_kernels/block_sizes.py"
            )
        compiled = jax.jit(case.run, donate_argnums=case.donated).lower(*placed).compile()
    # Only copies of at least a quarter of the cache count, or of a leaf; without a cache, none do.
    least = case.leaf or case.cache // 4 or sys.maxsize
    found = reading.memory(compiled, least)
    if any(jax.tree.leaves(lies_far(case.operands))):
        found |= reading.host_memory(compiled, least)
    found["staged"] = reading.staged(compiled.as_text() or "", least)
    print("AOT " + json.dumps(found | reading.schedule(folder, case.kernel)))


if __name__ == "__main__":
    main()
