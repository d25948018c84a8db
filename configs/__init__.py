"""Presets as gin files, for evaluation, training and benchmarks; data only, bound by `kvjax.io.gin_bindings`."""
