"""What is run from a checkout: `python -m scripts.studies.NAME`, `scripts.fixtures.NAME`, `scripts.bench`."""
