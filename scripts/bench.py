"""Speed of prefill and decoding: `python scripts/bench.py --help`; the same as `python -m scripts.bench`."""

import sys
from pathlib import Path

# The package `bench` is in this folder, so this script's own folder must not come first on the path.
sys.path[0] = str(Path(__file__).resolve().parents[1])

if __name__ == "__main__":
    from scripts.bench.main import main

    main()
