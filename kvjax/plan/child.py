"""Compiles one program for absent devices in a child process, because compilers may abort.

    python -m kvjax.plan.child JOB

JOB is a pickled `kvjax.plan.job.CompileJob`. It prints one line, "PLAN " and JSON. The environment is read
when a compiler's library is loaded, so it is set before anything imports jax.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
from pathlib import Path


def main() -> None:
    # Reading the job imports kvjax, and with it jax, but starts no compiler.
    os.environ.update(
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        # The compiler's log files grow to gigabytes; fatal errors still go to stderr.
        TPU_LOG_DIR="disabled",
        TPU_MIN_LOG_LEVEL="3",
        TF_CPP_MIN_LOG_LEVEL="2",
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = pickle.loads(Path(sys.argv[1]).read_bytes())
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={job.topology.count}"

    from kvjax.plan.compiling import compiled

    print("PLAN " + json.dumps(compiled(job)))


if __name__ == "__main__":
    main()
