"""Scripts of a checkout: `python -m scripts.studies.NAME`, `scripts.fixtures.NAME`, `scripts.bench`."""
