"""Training: plain optax loops over pure functions, resumable, reproducible from a seed."""
