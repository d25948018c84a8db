"""API: the functions that users call (`prefill`, `step`, `generate`, `verify` ...): checks, buckets, loops."""
