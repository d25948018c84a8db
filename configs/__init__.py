"""Presets as gin files, for evaluation, training and benchmarks; bound by `kvjax.io.gin_bindings`."""
