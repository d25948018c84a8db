"""Which cases are compiled every time: the first of each kernel and payload. The others are `rotating`."""

from tests.sweep import sweep


def by_kernel(cases, topologies):
    """Parameters (case, topology): every case once, the topologies in turn."""
    first = {}
    for case in cases:
        first.setdefault(_kernel_and_payload(case), case)
    always = list(first.values())
    ordered = [*always, *(case for case in cases if case not in always)]
    pairs = [(case, topologies[i % len(topologies)]) for i, case in enumerate(ordered)]
    return sweep(pairs, *pairs[: len(always)])


def _kernel_and_payload(case):
    """Return the kernel and payload in a case's name; gradients are kernels, and all decoders are one."""
    kernel, payload, *_ = case.split("-")
    return kernel if kernel == "decoder" else (kernel, payload, case.endswith("-back"))
