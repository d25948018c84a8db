"""Published benchmarks read from local files: their prompts, truncation, answer lengths and metrics."""
