"""API: what users call (`prefill`, `step`, `generate`, `verify` ...): checks, buckets, loops."""
