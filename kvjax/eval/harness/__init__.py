"""Tasks of lm-evaluation-harness (`lm_eval`), answered over compressed caches."""
